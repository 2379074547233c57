"""The plugin's hook: what `lightning_spans.attach("google-adk")` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lightning_google_adk import FRAMEWORK
from lightning_spans.record.instrument.binding import attaches

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


@attaches(FRAMEWORK)
def lightning_attach(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Record Google ADK's agents, tools and models, in addition to the patches of model clients."""
    from lightning_google_adk import agents, models, tools
    from lightning_openai import patch

    yield patch.bind(recorder)
    yield from models.bind(recorder)
    yield from tools.bind(recorder)
    yield from agents.bind(recorder)
