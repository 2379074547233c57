"""The plugin's hook: what `lightning_spans.attach("haystack")` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lightning_haystack import FRAMEWORK
from lightning_spans.record.instrument.binding import attaches

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


@attaches(FRAMEWORK)
def lightning_attach(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Record Haystack's agents, pipelines, tools and generators, in addition to the openai client's patches."""
    from lightning_haystack import agents, models, tools
    from lightning_openai import patch

    yield patch.bind(recorder)
    yield from models.bind(recorder)
    yield from tools.bind(recorder)
    yield from agents.bind(recorder)
