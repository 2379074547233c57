"""Agent spans: record which AG2 agent makes each model call."""

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

# AG2 creates one agent per subtask, with a random name.
_SUBTASK: Final = re.compile(r"subtask-[0-9a-f]{8}")


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch AG2 to record every agent; what is yielded removes each patch."""
    agents = Ag2Agents(recorder, FRAMEWORK)
    yield agents.stop
    yield replace(Agent, "_turn_scope", agents.wrap_turn)


class Ag2Agents(Tracker):
    """Starts and ends agent spans around the turns of AG2's agents."""

    def wrap_turn(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the scope of a turn: the agent span covers the turn from prompt to answer."""

        @asynccontextmanager
        async def turn_scope(agent: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
            async with original(agent, *args, **kwargs) as drive:

                async def work() -> Any:
                    with self.inside(self.begin_agent(_SUBTASK.sub("subtask", agent.name))):
                        return await drive()

                yield work

        return turn_scope
