"""Agent spans for the command that the SDK starts. Its environment sends its calls to the gateway."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from claude_agent_sdk._internal.query import Query
from claude_agent_sdk._internal.transport.subprocess_cli import SubprocessCLITransport

from lightning_claude_agent_sdk import FRAMEWORK, UNNAMED
from lightning_claude_agent_sdk.turns import Turn
from lightning_spans import child_environment
from lightning_spans.record.context import current_agent
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch the SDK to record every command; what is yielded removes each patch."""
    agents = ClaudeAgents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace(SubprocessCLITransport, "connect", agents.wrap_connect)
    yield replace(Query, "receive_messages", agents.wrap_receive_messages)


class ClaudeAgents(Tracker):
    """Starts and ends spans from the messages that the command reports."""

    def wrap_connect(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the start of the command. If its agent uses the gateway, the gateway replaces the user's endpoint."""

        async def connect(transport: Any, *args: Any, **kwargs: Any) -> Any:
            if self.live:
                with self.guard():
                    led = child_environment(agent=current_agent() or UNNAMED)
                    environment = {**transport._options.env, **led}
                    transport._options = dataclasses.replace(transport._options, env=environment)
            return await original(transport, *args, **kwargs)

        return connect

    def wrap_receive_messages(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the reading of the command's messages, grouped by turn, from the first message of each to its result."""

        def receive_messages(query: Any, *args: Any, **kwargs: Any) -> Any:
            messages = original(query, *args, **kwargs)
            return self._read(messages) if self.live else messages

        return receive_messages

    async def _read(self, messages: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        turn: Turn | None = None
        try:
            async for message in messages:
                with self.guard():
                    turn = self._hear(turn, message)
                yield message
        except Exception as error:
            if turn is not None:
                turn.end(error)
            raise
        finally:
            await messages.aclose()
            if turn is not None:
                turn.end()

    def _hear(self, turn: Turn | None, message: Mapping[str, Any]) -> Turn | None:
        """Add a message to the turn it belongs to; None if that turn has ended."""
        kind = message.get("type")
        if kind == "result":
            if turn is not None:
                turn.end(_failure(message))
            return None
        if kind not in {"assistant", "user"}:
            return turn
        turn = turn or Turn(self, self.begin_agent(UNNAMED, by_default=True))
        turn.hear(message)
        return turn


def _failure(result: Mapping[str, Any]) -> str | None:
    if not result.get("is_error"):
        return None
    return str(result.get("result") or "; ".join(map(str, result.get("errors") or ())) or result.get("subtype"))
