"""The plugin's hook: what `lightning_spans.attach("strands")` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lightning_spans.record.instrument.binding import attaches
from lightning_strands import FRAMEWORK

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


@attaches(FRAMEWORK)
def lightning_attach(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Record Strands' agents, tools and models, in addition to the patches of openai's and LiteLLM's clients."""
    from lightning_openai import patch
    from lightning_strands import agents, models, tools

    yield patch.bind(recorder)
    yield from models.bind(recorder)
    yield from tools.bind(recorder)
    yield from agents.bind(recorder)
