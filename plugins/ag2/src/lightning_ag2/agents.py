"""Agents: their spans, and their names for the model calls that they make."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from ag2 import Agent

from lightning_ag2 import FRAMEWORK
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tracker import Tracker

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder

# AG2 makes an agent for each subtask, with a random name.
_SUBTASK: Final = re.compile(r"subtask-[0-9a-f]{8}")


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Follow every agent, until what is yielded is called."""
    agents = Ag2Agents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace(Agent, "_turn_scope", agents.wrap_turn)


class Ag2Agents(Tracker):
    """Begins and ends our spans with the framework's agents."""

    def wrap_turn(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Make a span of what a turn's scope gives to be called: from an agent's prompt to its answer."""

        @asynccontextmanager
        async def turn_scope(agent: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
            async with original(agent, *args, **kwargs) as drive:

                async def work() -> Any:
                    with self.inside(self.begin_agent(_SUBTASK.sub("subtask", agent.name))):
                        return await drive()

                yield work

        return turn_scope
