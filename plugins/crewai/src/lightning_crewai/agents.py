"""CrewAI's event bus, followed: its events tell who works, and begin and end agent and tool spans.

Not by a listener: the bus calls those in threads of its own, in any order and in copies of the context. `emit` itself
is called where the work is done, in order, so that what is entered there is found when a model is called.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from crewai import LLM, Agent, Crew, Task
from crewai.events.event_bus import CrewAIEventsBus
from crewai.flow.flow import Flow
from crewai.llms.base_llm import BaseLLM

from lightning_crewai import FRAMEWORK, tools
from lightning_crewai.models import begin_call, response_body, uses_openai, wrap_started
from lightning_crewai.tools import nobody_of, requests_in, take_request, tell_tool
from lightning_openai.json_text import to_json
from lightning_spans.record.context import current, current_agent, settled, with_agent
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.scope import Scope, scopes_around
from lightning_spans.record.instrument.tracker import EventTracker, begins
from lightning_spans.record.recorder import agent_path
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.hooks import OpenSpan, Recorder
    from lightning_spans.record.instrument.tool_requests import ToolRequest

_UNNAMED: Final = "crew"  # what CrewAI calls a crew that has no name

# What events begin and end.
CREW: Final = "crew"
FLOW: Final = "flow"
STEP: Final = "step"  # a method of a flow
TASK: Final = "task"
AGENT: Final = "agent"
LOOKUP: Final = "lookup"  # in memory or knowledge, for an agent that has not begun yet
TOOL: Final = "tool"
MODEL: Final = "model"

_KINDS: Final = {  # of events: what their names begin with
    "crew_kickoff": CREW,
    "flow": FLOW,
    "method_execution": STEP,
    "task": TASK,
    "agent_execution": AGENT,
    "lite_agent_execution": AGENT,
    "knowledge_search_query": LOOKUP,
    "memory_retrieval": LOOKUP,
    "tool_usage": TOOL,
    "llm_call": MODEL,
}
_ENDS: Final = frozenset({"completed", "finished", "failed", "error", "paused"})  # what they end with


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Follow every event of CrewAI, until what is yielded is called."""
    crews = CrewTracker(recorder, FRAMEWORK)
    yield crews.stop
    yield replace(CrewAIEventsBus, "emit", crews.wrap_emit)
    yield replace(BaseLLM, "_emit_call_started_event", wrap_started)
    for kind, name in entries():
        yield replace(kind, name, crews.wrap_entry)
    for name in ("call", "acall"):
        yield replace(LLM, name, crews.wrap_call)
    yield from tools.bind(crews)


def entries() -> list[tuple[type, str]]:
    """Name where work begins that CrewAI gives no end to when it is cancelled or interrupted."""
    flow = next(kind for kind in Flow.__mro__ if "kickoff_async" in vars(kind))
    crews = [(Crew, "kickoff"), (Crew, "akickoff"), (Task, "_execute_core"), (Task, "_aexecute_core")]
    return [*crews, (Agent, "kickoff"), (Agent, "kickoff_async"), (flow, "kickoff_async")]


class CrewScope(Scope):
    """What CrewAI does between two events."""

    __slots__ = ("call_id", "kind", "number", "place", "requests", "source")

    def __init__(self, kind: str, source: Any, number: int) -> None:
        super().__init__()
        self.kind = kind
        self.source = source
        self.number = number  # scopes are counted as they begin
        self.place = place()
        self.requests: list[ToolRequest] = []  # of an agent: the tool calls that its model asked for
        self.call_id: str | None = None  # of a model call

    def call_began(self) -> None:
        """Be told of a chat span. A tool that a model call runs itself makes calls of its own."""
        if self.kind == TOOL:
            self.seen = True
        else:
            super().call_began()


class CrewTracker(EventTracker[CrewScope]):
    """Begins and ends our spans with CrewAI's events. Its scopes are known by their numbers."""

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._begun = 0

    def wrap_emit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An event; it is heard after the bus has it, as a listener's context is a copy of the one before."""

        def emit(bus: Any, source: Any, event: Any) -> Any:
            answer = original(bus, source, event)
            self._hear(source, event)
            return answer

        return emit

    def wrap_entry(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A run; when it is over, what is still open of it ends."""
        return _followed(original, lambda: self._begun, self._left)

    def wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A call of LiteLLM's; it ends as it returns, as CrewAI does not tell of answers that are tool calls (1.15)."""
        return _followed(original, lambda: self._begun, self._returned)

    def _returned(self, llm: Any, begun: int, answer: Any, error: BaseException | None) -> None:
        if error is not None:
            return  # CrewAI tells of it
        with self.guard():
            for scope in self._since(begun):
                if scope.kind == MODEL and scope.source is llm and scope.place == place():
                    self._answered(scope, SimpleNamespace(response=answer, model=llm.model))
                    self._finish(scope)

    def _left(self, _owner: Any, begun: int, _answer: Any, error: BaseException | None) -> None:
        """End what began since, in this task of this thread: others end their own, and may go on."""
        here = place()
        with self.guard():
            for scope in self._since(begun):
                if scope.place == here:
                    self._finish(scope, error)
            for scope in self._since(begun) if error is not None else ():
                if scope.kind == TOOL and _is_left(scope):  # it ran in a thread of its own
                    self._finish(scope, error)

    def _since(self, begun: int) -> list[CrewScope]:
        """Return what began since and is open, the last first."""
        return [scope for scope in reversed(list(self.scopes.values())) if scope.number > begun]

    @begins
    def _hear(self, source: Any, event: Any) -> None:
        what, _, word = event.type.rpartition("_")
        kind = _KINDS.get(what)
        if kind is not None and word == "started":
            self._begin(kind, source, event)
        elif kind is not None and word in _ENDS:
            self._end(kind, source, event)
        elif event.type == "tool_failure_detected" and event.failure.reason == "invalid_input":
            self._refused(event)

    def _begin(self, kind: str, source: Any, event: Any) -> None:
        if kind == FLOW and type(source).__module__.startswith("crewai."):
            return  # how CrewAI itself runs an agent or its memory
        failed, error = innermost(AGENT, TOOL), sys.exception()
        if kind == AGENT and error is not None and failed is not None and failed.source is source:
            self._finish_through(failed, error)  # it tries again, and has not told before that it failed
        here = current()
        # Of `here`: what an agent leaves to a thread, such as to remember, is its own also when it is done.
        agent = agent_of(kind, source, event) or current_agent(here)
        self._begun += 1
        scope = CrewScope(kind, source, self._begun)
        context = with_agent(agent, settled(here))
        if kind == MODEL:
            scope.call_id = event.call_id
            if not uses_openai(source.__class__):
                begin_call(self, scope, source, event, context)
        else:
            scope.span = self._span(kind, event, agent, context)
        self.enter(scope.number, scope, context)

    def _span(self, kind: str, event: Any, agent: str | None, context: Context) -> OpenSpan | None:
        if kind == AGENT:
            return self.begin_agent(str(agent), context)
        if kind == TOOL:
            return self._tool(event, context)
        if kind not in {CREW, FLOW}:
            return None
        name = str((event.crew_name if kind == CREW else event.flow_name) or _UNNAMED)
        path = agent_path(name, context) if kind == CREW and name != _UNNAMED else None
        return self.begin(names.INVOKE_WORKFLOW, name, context=context, attributes={names.AGENT_PATH: path})

    def _tool(self, event: Any, context: Context) -> OpenSpan | None:
        home, arguments = innermost(AGENT), event.tool_args
        request = take_request(home.requests, event.tool_name, arguments) if home is not None else None
        text = arguments if isinstance(arguments, str) else to_json(arguments)
        return self.begin_tool(event.tool_name, None if request is None else request.call_id, text, context)

    def _refused(self, event: Any) -> None:
        """Record a tool call whose arguments can't be read: no tool runs, and CrewAI tells the failure alone."""
        context = settled()
        agent = stripped(event.agent_role) or current_agent(context)
        self.end(self._tool(event, with_agent(agent, context)), error=event.failure.message)

    def _end(self, kind: str, source: Any, event: Any) -> None:
        scope = self._model(event.call_id) if kind == MODEL else innermost(kind)
        if scope is None or scope.source is not source:
            return  # told twice, or of before we listened
        if kind == MODEL:
            self._answered(scope, event)
        error = error_of(event)
        if kind == TOOL and scope.span is not None:
            tell_tool(scope.span, event)
            error = error or nobody_of(event)
        self._finish_through(scope, error)

    def _model(self, call_id: str) -> CrewScope | None:
        return next((scope for scope in self._since(0) if scope.call_id == call_id), None)

    def _answered(self, scope: CrewScope, event: Any) -> None:
        home, requests = innermost(AGENT), list(requests_in(getattr(event, "response", None)))
        if home is not None and requests:
            home.requests[:] = requests
        if scope.call is not None:
            call, scope.call = scope.call, None
            error = error_of(event)
            call.end((lambda: response_body(event)) if error is None else None, error=error)

    def _finish_through(self, scope: CrewScope, error: BaseException | str | None) -> None:
        """End a scope, and first what is still open inside of it."""
        for inner in list(_open_around()):
            if inner is scope:
                break
            self._finish(inner, error)
        self._finish(scope, error)

    def _finish(self, scope: CrewScope, error: BaseException | str | None = None) -> None:
        if self.leave(scope.number) is None or not self.live:
            return
        if scope.call is not None and (error is not None or scope.call.named):
            scope.call.end(error=error)
        self.end(scope.span, error=error)


def _followed(
    original: Callable[..., Any], before: Callable[[], int], after: Callable[..., None]
) -> Callable[..., Any]:
    """Return a method that calls the original one, and then `after(owner, what before said, answer, error)`."""

    def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
        known = before()
        try:
            answer = original(owner, *args, **kwargs)
        except BaseException as error:
            after(owner, known, None, error)
            raise
        after(owner, known, answer, None)
        return answer

    async def async_method(owner: Any, *args: Any, **kwargs: Any) -> Any:
        known = before()
        try:
            answer = await original(owner, *args, **kwargs)
        except BaseException as error:
            after(owner, known, None, error)
            raise
        after(owner, known, answer, None)
        return answer

    return async_method if inspect.iscoroutinefunction(original) else method


def _open_around() -> Iterator[CrewScope]:
    """Return what is open here, innermost first."""
    return (scope for scope in scopes_around() if isinstance(scope, CrewScope) and not scope.closed)


def innermost(*kinds: str) -> CrewScope | None:
    """Return the innermost open scope of one of these kinds."""
    return next((scope for scope in _open_around() if scope.kind in kinds), None)


def _is_left(scope: CrewScope) -> bool:
    """Whether what a scope was begun in is over."""
    around = scope.outer
    while around is not None and not isinstance(around, CrewScope):
        around = around.outer
    return around is not None and around.closed


def place() -> tuple[int, int | None]:
    """Say which thread, and which task of its event loop, this is."""
    loop = asyncio._get_running_loop()  # `current_task` raises where none runs, which takes longer than all of this
    task = None if loop is None else asyncio.current_task(loop)
    return threading.get_ident(), None if task is None else id(task)


def agent_of(kind: str, source: Any, event: Any) -> str | None:
    """Return the name that an event itself tells; a call that carries no role is of the agent around it."""
    if kind == STEP:
        return str(event.method_name)
    if kind == TASK:
        return stripped(getattr(source.agent, "role", None))
    if kind == AGENT:
        return stripped(source.role)
    return stripped(event.agent_role)


def stripped(role: Any) -> str | None:
    """Return a role as a name: in YAML, where roles often stand, they end with a line break."""
    return str(role).strip() or None if role else None


def error_of(event: Any) -> BaseException | str | None:
    """Return what went wrong: the exception itself where it is at hand."""
    failure = getattr(event, "failure", None)  # since 1.15: the tool ran, and said that it failed
    error = getattr(event, "error", None)
    if error is None:
        return None if failure is None else str(failure.message)
    if isinstance(error, BaseException):
        return error
    raised = sys.exception()
    return raised if raised is not None and str(raised) == str(error) else str(error)
