"""The plugin's hook: what `lightning_spans.attach("new-framework")` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lightning_new_framework import FRAMEWORK
from lightning_spans.record.instrument.binding import attaches

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


@attaches(FRAMEWORK)
def lightning_attach(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Record New Framework's agents and tools. The openai client's own patches create the chat spans."""
    from lightning_new_framework import agents, tools
    from lightning_openai import patch

    yield patch.bind(recorder)
    yield from tools.bind(recorder)
    yield from agents.bind(recorder)
