"""CrewAI's event bus, followed: its events tell who is at work, and begin and end agent and tool spans.

Not by a listener: the bus calls those in threads of its own, in any order and in copies of the context. `emit` itself
is called where the work is done, in order, so that what is entered there is what the wire finds.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from crewai import LLM, Agent, Crew, Task
from crewai.events.event_bus import CrewAIEventsBus
from crewai.flow.flow import Flow
from crewai.llms.base_llm import BaseLLM

from lightning_crewai.bodies import asked_in, request_body, response_body, take_asked
from lightning_crewai.events import agent_of, error_of, stripped, tell_tool
from lightning_crewai.works import (
    AGENT,
    BEGINS,
    CREW,
    ENDS,
    FLOW,
    MODEL,
    TOOL,
    Work,
    innermost,
    place,
    works_around,
)
from lightning_openai.elsewhere import OtherCall, to_json
from lightning_spans import spans as names
from lightning_spans.context import current, current_agent, settled, with_agent
from lightning_spans.patches import Undo, replace
from lightning_spans.recorder import agent_path, log_failure

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.recorder import OpenSpan, Recorder

PLUGIN: Final = "lightning_crewai"
FRAMEWORK: Final = "crewai"
_UNNAMED: Final = "crew"  # what CrewAI calls a crew that has no name
_WIRED: Final = "crewai.llms.providers.openai"  # the providers in here, and all made from them, use the openai client
# Messages and tools of the call that is about to be reported: the event's own are cut at a depth of five.
_offered: ContextVar[tuple[Any, Any] | None] = ContextVar("lightning_crewai_offered", default=None)


def bind(recorder: Recorder) -> Callable[[], None]:
    """Follow every event of CrewAI, until the callable that is given back is called."""
    following = Following(recorder)
    undo = Undo()
    undo.add(following.stop)
    undo.add(replace(CrewAIEventsBus, "emit", following.wrap_emit))
    undo.add(replace(BaseLLM, "_emit_call_started_event", _wrap_started))
    for kind, name in entries():
        undo.add(replace(kind, name, following.wrap_entry))
    for name in ("call", "acall"):
        undo.add(replace(LLM, name, following.wrap_call))
    return undo


def entries() -> list[tuple[type, str]]:
    """Name where work begins that CrewAI gives no end to when it is cancelled or interrupted."""
    flow = next(kind for kind in Flow.__mro__ if "kickoff_async" in vars(kind))
    crews = [(Crew, "kickoff"), (Crew, "akickoff"), (Task, "_execute_core"), (Task, "_aexecute_core")]
    return [*crews, (Agent, "kickoff"), (Agent, "kickoff_async"), (flow, "kickoff_async")]


class Following:
    """Begins and ends our spans with CrewAI's events."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._live = True
        self._open: dict[int, Work] = {}
        self._begun = 0
        self._calls: dict[str, Work] = {}  # open model calls by CrewAI's id

    def stop(self) -> None:
        """End what is open, and hear no more."""
        self._live = False
        for work in reversed(list(self._open.values())):
            with self._recorder.guard(PLUGIN):
                self._finish(work)

    def wrap_emit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Hear an event after the bus has it: a listener's context is a copy of the one before."""

        def emit(bus: Any, source: Any, event: Any) -> Any:
            answer = original(bus, source, event)
            if self._live:
                try:
                    self._hear(source, event)
                except Exception as error:  # noqa: BLE001 - logged
                    log_failure(PLUGIN, error)
            return answer

        return emit

    def wrap_entry(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """End what is still open of a call when it is over."""

        def entry(*args: Any, **kwargs: Any) -> Any:
            begun = self._begun
            try:
                answer = original(*args, **kwargs)
            except BaseException as error:
                self._left(begun, error)
                raise
            self._left(begun)
            return answer

        async def async_entry(*args: Any, **kwargs: Any) -> Any:
            begun = self._begun
            try:
                answer = await original(*args, **kwargs)
            except BaseException as error:
                self._left(begun, error)
                raise
            self._left(begun)
            return answer

        return async_entry if inspect.iscoroutinefunction(original) else entry

    def wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """End a call of LiteLLM's when it returns: CrewAI tells nothing where the answer is tool calls (1.15)."""

        def call(llm: Any, *args: Any, **kwargs: Any) -> Any:
            begun = self._begun
            answer = original(llm, *args, **kwargs)
            self._returned(llm, begun, answer)
            return answer

        async def async_call(llm: Any, *args: Any, **kwargs: Any) -> Any:
            begun = self._begun
            answer = await original(llm, *args, **kwargs)
            self._returned(llm, begun, answer)
            return answer

        return async_call if inspect.iscoroutinefunction(original) else call

    def _returned(self, llm: Any, begun: int, answer: Any) -> None:
        here = place()
        with self._recorder.guard(PLUGIN):
            for work in reversed(list(self._open.values())):
                if work.kind == MODEL and work.source is llm and work.number > begun and work.place == here:
                    self._answered(work, SimpleNamespace(response=answer, model=llm.model))
                    self._finish(work)

    def _left(self, begun: int, error: BaseException | None = None) -> None:
        """End what began since, in this task of this thread: others end their own, and may go on."""
        here = place()
        with self._recorder.guard(PLUGIN):
            for work in reversed(list(self._open.values())):
                if work.number > begun and work.place == here:
                    self._finish(work, error)
            for work in reversed(list(self._open.values())) if error is not None else ():
                if work.number > begun and work.kind == TOOL and _is_left(work):  # it ran in a thread of its own
                    self._finish(work, error)

    def _hear(self, source: Any, event: Any) -> None:
        if kind := BEGINS.get(event.type):
            self._begin(kind, source, event)
        elif kind := ENDS.get(event.type):
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
        context = settled(here)
        # Of `here`: what an agent leaves to a thread, such as to remember, is its own also when it is done.
        agent = agent_of(kind, source, event) or current_agent(here)
        self._begun += 1
        work = Work(kind, source, self._begun)
        if kind == MODEL:
            self._calls[event.call_id] = work
            work.call_id = event.call_id
            if not _is_wired(source.__class__):
                self._follow_call(work, event, with_agent(agent, context))
        else:
            work.span = self._span(kind, event, agent, context)
        self._open[id(work)] = work
        work.enter(with_agent(agent, context) if work.span is None else work.span.context)

    def _span(self, kind: str, event: Any, agent: str | None, context: Context) -> OpenSpan | None:
        start = self._recorder.start
        known = {names.FRAMEWORK: FRAMEWORK}
        if kind in {CREW, FLOW}:
            name = str((event.crew_name if kind == CREW else event.flow_name) or _UNNAMED)
            if kind == CREW and name != _UNNAMED:
                known[names.AGENT_PATH] = agent_path(name, context)
            return start(names.INVOKE_WORKFLOW, name, context=context, attributes=known)
        if kind == AGENT:
            return start(names.INVOKE_AGENT, str(agent), agent=agent, context=context, attributes=known)
        if kind == TOOL:
            return self._tool(event.tool_name, event.tool_args, agent, context)
        return None

    def _tool(self, name: str, arguments: Any, agent: str | None, context: Context) -> OpenSpan:
        home = innermost(AGENT)
        asked = take_asked(home.asked, name, arguments) if home is not None else None
        attributes = {
            names.FRAMEWORK: FRAMEWORK,
            names.TOOL_NAME: name,
            names.TOOL_CALL_ID: asked.call_id if asked is not None else None,
            names.TOOL_ARGUMENTS: arguments if isinstance(arguments, str) else to_json(arguments),
        }
        return self._recorder.start(names.EXECUTE_TOOL, name, agent=agent, context=context, attributes=attributes)

    def _refused(self, event: Any) -> None:
        """Record a tool call whose arguments can't be read: no tool runs, and CrewAI tells the failure alone."""
        context = settled()
        agent = stripped(event.agent_role) or current_agent(context)
        self._tool(event.tool_name, event.tool_args, agent, context).end(error=event.failure.message)

    def _end(self, kind: str, source: Any, event: Any) -> None:
        work = self._calls.get(event.call_id) if kind == MODEL else innermost(kind)
        if work is None or work.source is not source:
            return  # told twice, or of before we listened
        if kind == MODEL:
            self._answered(work, event)
        if kind == TOOL and work.span is not None:
            tell_tool(work.span, event)
        self._finish_through(work, error_of(event))

    def _answered(self, work: Work, event: Any) -> None:
        response = getattr(event, "response", None)
        home, asked = innermost(AGENT), list(asked_in(response))
        if home is not None and asked:
            home.asked[:] = asked
        if work.call is not None:
            call, work.call = work.call, None
            error = error_of(event)
            call.end((lambda: response_body(event)) if error is None else None, error=error)

    def _follow_call(self, work: Work, event: Any, context: Context) -> None:
        request = request_body(event, work.source, *(_offered.get() or (event.messages, event.tools)))
        OtherCall(
            self._recorder,
            PLUGIN,
            FRAMEWORK,
            lambda: request,
            provider=getattr(work.source, "provider", None),
            streamed=bool(request.get("stream")),
            place=lambda: context,
            stay=work,
        )

    def _finish_through(self, work: Work, error: BaseException | str | None) -> None:
        """End a work, and first what is still open inside of it."""
        for inner in list(works_around()):
            if inner is work:
                break
            self._finish(inner, error)
        self._finish(work, error)

    def _finish(self, work: Work, error: BaseException | str | None = None) -> None:
        if self._open.pop(id(work), None) is None:
            return
        if work.call_id is not None:
            self._calls.pop(work.call_id, None)
            if work.call is not None and (error is not None or work.call.named):
                work.call.end(error=error)
        work.leave()
        if work.span is not None:
            work.span.end(error=error)


def _wrap_started(original: Callable[..., Any]) -> Callable[..., Any]:
    def emit_call_started_event(llm: Any, messages: Any, tools: Any = None, *args: Any, **kwargs: Any) -> Any:
        token = _offered.set((messages, tools))
        try:
            return original(llm, messages, tools, *args, **kwargs)
        finally:
            _offered.reset(token)

    return emit_call_started_event


def _is_left(work: Work) -> bool:
    """Whether what a work was begun in is over."""
    around: Any = work.outer
    while around is not None and not isinstance(around, Work):
        around = getattr(around, "outer", None)
    return around is not None and around.closed


@functools.lru_cache(256)
def _is_wired(kind: type) -> bool:
    return any(known.__module__.startswith(_WIRED) for known in kind.__mro__)
