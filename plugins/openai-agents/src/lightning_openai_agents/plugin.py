"""The plugin's hook: what `lightning_spans.attach("openai-agents")` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lightning_openai_agents import FRAMEWORK
from lightning_spans.record.instrument.binding import attaches

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


@attaches(FRAMEWORK)
def lightning_attach(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Record the SDK's own spans and its tools, in addition to the openai client's own patches."""
    from lightning_openai import patch
    from lightning_openai_agents import agents, tools

    yield patch.bind(recorder)
    yield from agents.bind(recorder)
    yield from tools.bind(recorder)
