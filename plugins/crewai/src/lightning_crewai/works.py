"""What CrewAI's events begin and end, and where that stands among what is open around it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from lightning_spans.stays import Stay, current_watch

if TYPE_CHECKING:
    from lightning_crewai.bodies import Asked
    from lightning_spans.recorder import OpenSpan

CREW: Final = "crew"
FLOW: Final = "flow"
STEP: Final = "step"  # a method of a flow
TASK: Final = "task"
AGENT: Final = "agent"
LOOKUP: Final = "lookup"  # in memory or knowledge, for an agent that has not begun yet
TOOL: Final = "tool"
MODEL: Final = "model"

BEGINS: Final = {
    "crew_kickoff_started": CREW,
    "flow_started": FLOW,
    "method_execution_started": STEP,
    "task_started": TASK,
    "agent_execution_started": AGENT,
    "lite_agent_execution_started": AGENT,
    "knowledge_search_query_started": LOOKUP,
    "memory_retrieval_started": LOOKUP,
    "tool_usage_started": TOOL,
    "llm_call_started": MODEL,
}
ENDS: Final = {
    "crew_kickoff_completed": CREW,
    "crew_kickoff_failed": CREW,
    "flow_finished": FLOW,
    "flow_failed": FLOW,
    "flow_paused": FLOW,
    "method_execution_finished": STEP,
    "method_execution_failed": STEP,
    "method_execution_paused": STEP,
    "task_completed": TASK,
    "task_failed": TASK,
    "agent_execution_completed": AGENT,
    "agent_execution_error": AGENT,
    "lite_agent_execution_completed": AGENT,
    "lite_agent_execution_error": AGENT,
    "knowledge_search_query_completed": LOOKUP,
    "knowledge_search_query_failed": LOOKUP,
    "memory_retrieval_completed": LOOKUP,
    "memory_retrieval_failed": LOOKUP,
    "tool_usage_finished": TOOL,
    "tool_usage_error": TOOL,
    "llm_call_completed": MODEL,
    "llm_call_failed": MODEL,
}


class Work(Stay):
    """A stretch of work between two events."""

    __slots__ = ("asked", "call_id", "kind", "number", "place", "source", "span")

    def __init__(self, kind: str, source: Any, number: int) -> None:
        super().__init__()
        self.kind = kind
        self.source = source
        self.number = number  # works are counted as they begin
        self.place = place()
        self.span: OpenSpan | None = None
        self.asked: list[Asked] = []  # of an agent: the tool calls that its model asked for, until they are made
        self.call_id: str | None = None  # of a model call

    def called(self) -> None:
        """The wire began a chat span in here. A tool that a model call runs itself makes calls of its own."""
        if self.kind == TOOL:
            self.seen = True
        else:
            super().called()


def place() -> tuple[int, int | None]:
    """Say which thread, and which task of its event loop, this is."""
    loop = asyncio._get_running_loop()  # `current_task` raises where none runs, which takes longer than all of this
    task = None if loop is None else asyncio.current_task(loop)
    return threading.get_ident(), None if task is None else id(task)


def works_around() -> Iterator[Work]:
    """Give the works that are open here, innermost first."""
    watch = current_watch()
    while watch is not None:
        if isinstance(watch, Work) and not watch.closed:
            yield watch
        watch = getattr(watch, "outer", None)


def innermost(*kinds: str) -> Work | None:
    """Give the innermost open work of one of these kinds."""
    return next((work for work in works_around() if work.kind in kinds), None)
