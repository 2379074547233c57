"""Follow CrewAI's event bus: its events name the working agent and begin and end agent and tool spans.

This is not a listener, because the bus calls listeners in its own threads, in any order, and in copies of the context.
It wraps `emit`, which runs where the work is done and in order, so that model calls see the context set here.
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
from lightning_spans.record.context import current, current_agent, settle_context, with_agent
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.scope import Scope, scopes_around
from lightning_spans.record.instrument.tracker import EventTracker, begins
from lightning_spans.record.recorder import agent_path
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.hooks import OpenSpan, Recorder
    from lightning_spans.record.instrument.tool_requests import ToolRequest

_UNNAMED: Final = "crew"  # CrewAI's name for an unnamed crew

# Which events begin and end a scope.
CREW: Final = "crew"
FLOW: Final = "flow"
STEP: Final = "step"  # a method of a flow
TASK: Final = "task"
AGENT: Final = "agent"
LOOKUP: Final = "lookup"  # memory or knowledge, used for an agent that has not begun yet
TOOL: Final = "tool"
MODEL: Final = "model"

_KINDS: Final = {  # prefixes of event names
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
_ENDS: Final = frozenset({"completed", "finished", "failed", "error", "paused"})  # suffixes of event names


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch CrewAI to record every event; what is yielded removes each patch."""
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
    """List the methods whose work CrewAI does not report as ended if it is cancelled or interrupted."""
    flow = next(kind for kind in Flow.__mro__ if "kickoff_async" in vars(kind))
    crews = [(Crew, "kickoff"), (Crew, "akickoff"), (Task, "_execute_core"), (Task, "_aexecute_core")]
    return [*crews, (Agent, "kickoff"), (Agent, "kickoff_async"), (flow, "kickoff_async")]


class CrewScope(Scope):
    """What CrewAI does between a start and an end event."""

    __slots__ = ("call_id", "kind", "number", "place", "requests", "source")

    def __init__(self, kind: str, source: Any, number: int) -> None:
        super().__init__()
        self.kind = kind
        self.source = source
        self.number = number  # scopes are numbered as they begin
        self.place = place()
        self.requests: list[ToolRequest] = []  # of an agent: the tool calls that its model asked for
        self.call_id: str | None = None  # of a model call

    def call_began(self) -> None:
        """Note that a chat span began. A tool that runs within a model call makes calls of its own."""
        if self.kind == TOOL:
            self.seen = True
        else:
            super().call_began()


class CrewTracker(EventTracker[CrewScope]):
    """Starts and ends spans with CrewAI's events. Its scopes are identified by number."""

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._begun = 0

    def wrap_emit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an event. It is processed after the bus has it, because listeners get a copy of the previous context."""

        def emit(bus: Any, source: Any, event: Any) -> Any:
            answer = original(bus, source, event)
            self._hear(source, event)
            return answer

        return emit

    def wrap_entry(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a run. When it ends, so does everything still open within it."""
        return _call_around(original, lambda: self._begun, self._left)

    def wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a LiteLLM call. Its span ends when it returns: 1.15 reports no answers that are tool calls."""
        return _call_around(original, lambda: self._begun, self._returned)

    def _returned(self, llm: Any, begun: int, answer: Any, error: BaseException | None) -> None:
        if error is not None:
            return  # CrewAI reports it
        with self.guard():
            for scope in self._since(begun):
                if scope.kind == MODEL and scope.source is llm and scope.place == place():
                    self._answered(scope, SimpleNamespace(response=answer, model=llm.model))
                    self._finish(scope)

    def _left(self, _owner: Any, begun: int, _answer: Any, error: BaseException | None) -> None:
        """End what began since, in this task of this thread. Other tasks end their own and may continue."""
        here = place()
        with self.guard():
            for scope in self._since(begun):
                if scope.place == here:
                    self._finish(scope, error)
            for scope in self._since(begun) if error is not None else ():
                if scope.kind == TOOL and _is_left(scope):  # it ran in its own thread
                    self._finish(scope, error)

    def _since(self, begun: int) -> list[CrewScope]:
        """Return what began since and is still open, the last first."""
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
            self._finish_through(failed, error)  # a retry: CrewAI has not reported the failure before
        here = current()
        # Of `here`: work that an agent leaves to a thread, such as memory, is still the agent's after it has ended.
        agent = agent_of(kind, source, event) or current_agent(here)
        self._begun += 1
        scope = CrewScope(kind, source, self._begun)
        context = with_agent(agent, settle_context(here))
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
        """Record a tool call with unreadable arguments. No tool runs, and CrewAI reports only the failure."""
        context = settle_context()
        agent = strip_role(event.agent_role) or current_agent(context)
        self.end(self._tool(event, with_agent(agent, context)), error=event.failure.message)

    def _end(self, kind: str, source: Any, event: Any) -> None:
        scope = self._model(event.call_id) if kind == MODEL else innermost(kind)
        if scope is None or scope.source is not source:
            return  # reported twice, or it began before recording did
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
        """End a scope, after everything still open within it."""
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


def _call_around(
    original: Callable[..., Any], before: Callable[[], int], after: Callable[..., None]
) -> Callable[..., Any]:
    """Return a method that calls the original, and then `after(owner, result of before, answer, error)`."""

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
    """Return the scopes that are open here, innermost first."""
    return (scope for scope in scopes_around() if isinstance(scope, CrewScope))


def innermost(*kinds: str) -> CrewScope | None:
    """Return the innermost open scope of one of these kinds."""
    return next((scope for scope in _open_around() if scope.kind in kinds), None)


def _is_left(scope: CrewScope) -> bool:
    """Whether the surrounding scope has ended."""
    around = scope.outer
    while around is not None and not isinstance(around, CrewScope):
        around = around.outer
    return around is not None and around.closed


def place() -> tuple[int, int | None]:
    """Return the current thread, and the current task of its event loop."""
    loop = asyncio._get_running_loop()  # `current_task` raises without a task, which takes longer than all of this
    task = None if loop is None else asyncio.current_task(loop)
    return threading.get_ident(), None if task is None else id(task)


def agent_of(kind: str, source: Any, event: Any) -> str | None:
    """Return the agent's name from an event. A call without a role belongs to the surrounding agent."""
    if kind == STEP:
        return str(event.method_name)
    if kind == TASK:
        return strip_role(getattr(source.agent, "role", None))
    if kind == AGENT:
        return strip_role(source.role)
    return strip_role(event.agent_role)


def strip_role(role: Any) -> str | None:
    """Return a role as a name. Roles read from YAML often end with a line break."""
    return str(role).strip() or None if role else None


def error_of(event: Any) -> BaseException | str | None:
    """Return the error: the exception itself if it is available."""
    failure = getattr(event, "failure", None)  # since 1.15: the tool ran and reported a failure
    error = getattr(event, "error", None)
    if error is None:
        return None if failure is None else str(failure.message)
    if isinstance(error, BaseException):
        return error
    raised = sys.exception()
    return raised if raised is not None and str(raised) == str(error) else str(error)
