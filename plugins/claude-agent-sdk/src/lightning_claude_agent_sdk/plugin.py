"""The plugin's hook: what `lightning_spans.attach("claude-agent-sdk")` calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lightning_claude_agent_sdk import FRAMEWORK
from lightning_spans.record.instrument.binding import attaches

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


@attaches(FRAMEWORK)
def lightning_attach(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Send the command's calls to the gateway, and record what it reports."""
    from lightning_claude_agent_sdk import agents

    yield from agents.bind(recorder)
