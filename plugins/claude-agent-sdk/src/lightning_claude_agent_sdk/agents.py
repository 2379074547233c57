"""The command that the SDK starts: led to the gateway by its environment, and followed by what it reports."""

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
    """Follow every command, until what is yielded is called."""
    agents = ClaudeAgents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace(SubprocessCLITransport, "connect", agents.wrap_connect)
    yield replace(Query, "receive_messages", agents.wrap_receive_messages)


class ClaudeAgents(Tracker):
    """Begins and ends our spans with what the command reports."""

    def wrap_connect(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The command starts: where its agent's calls go to the gateway, that goes before the user's own endpoint."""

        async def connect(transport: Any, *args: Any, **kwargs: Any) -> Any:
            if self.live:
                with self.guard():
                    led = child_environment(agent=current_agent() or UNNAMED)
                    environment = {**transport._options.env, **led}
                    transport._options = dataclasses.replace(transport._options, env=environment)
            return await original(transport, *args, **kwargs)

        return connect

    def wrap_receive_messages(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The program reads what the command reports: turn after turn, each from the first message to the result."""

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
        """Take one message into the turn that it belongs to; None where that has ended."""
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
