"""The plugin's hook: what `lightning_spans.attach("agent-framework")` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lightning_agent_framework import FRAMEWORK
from lightning_spans.record.instrument.binding import attaches

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


@attaches(FRAMEWORK)
def lightning_attach(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Record Agent Framework's agents and tools, in addition to the patches of the openai client."""
    from lightning_agent_framework import agents, tools
    from lightning_openai import patch

    yield patch.bind(recorder)
    yield from tools.bind(recorder)
    yield from agents.bind(recorder)
