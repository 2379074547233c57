"""The plugin's hook: what `lightning_spans.attach("pydantic-ai")` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lightning_pydantic_ai import FRAMEWORK
from lightning_spans.record.instrument.binding import attaches

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


@attaches(FRAMEWORK)
def lightning_attach(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Record Pydantic AI's agents, tools and models, in addition to the openai client's own patches."""
    from lightning_openai import patch
    from lightning_pydantic_ai import agents, models, tools

    yield patch.bind(recorder)
    yield from models.bind(recorder)
    yield from tools.bind(recorder)
    yield from agents.bind(recorder)
