"""Agent and workflow spans: record which agent makes each model call.

A run begins in a call and continues in tasks of its own, which copy the context in which they start. For an agent that
runs alone, this is the agent's context. In an `AgentWorkflow`, agents take turns: each has a span from its first step
to the first step of another, and its steps run within that span. In any other workflow, a step is an agent if it calls
a model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from llama_index.core.agent.workflow import AgentWorkflow
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.workflow import Workflow

from lightning_llama_index import FRAMEWORK
from lightning_spans.record.context import settle_context, use_context
from lightning_spans.record.instrument.caller import following
from lightning_spans.record.instrument.patches import Undo, replace
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.recorder import current_span
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder

UNNAMED: Final = "Agent"  # LlamaIndex's name for an unnamed agent
_STEPS: Final = ("setup_agent", "run_agent_step", "parse_agent_output", "call_tool", "aggregate_tool_results")

_STEP_MARKS: Final = ("_step_config", "__step_config")  # attribute of a step; the second before llama-index-workflows 2
_SIGNALS: Final = ("WaitingForEvent",)  # a step that waits starts again when its event has arrived


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch LlamaIndex to record every agent and workflow; what is yielded removes each patch."""
    agents = LlamaIndexAgents(recorder, FRAMEWORK)
    yield agents.stop
    yield agents.undo
    yield replace(Workflow, "run", agents.wrap_run)
    for step in _STEPS:
        yield replace(AgentWorkflow, step, agents.wrap_step)


class LlamaIndexAgents(Tracker):
    """Starts and ends spans around runs, and around agents' turns within a run."""

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._turns: dict[str, OpenSpan | None] = {}  # by the span of an agent workflow: the agent whose turn it is
        self._followed = WeakKeyDictionary[type, Undo]()  # by class of workflow: what unwraps its steps

    def wrap_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a run of a workflow. An agent is one too."""

        def run(workflow: Any, *args: Any, **kwargs: Any) -> Any:
            with self.guard():
                self._follow_steps(type(workflow))
            span = self._begin_run(workflow)
            if span is None:
                return original(workflow, *args, **kwargs)
            with self.start_inside(span):
                handler = original(workflow, *args, **kwargs)
            with self.guard(span):  # before llama-index-workflows 2.13 the handler itself was the future
                getattr(handler, "_result_task", handler).add_done_callback(functools.partial(self._end_run, span))
            return handler

        return run

    def _follow_steps(self, kind: type) -> None:
        """Wrap the steps of the user's own workflow before its first run."""
        if not self.live or issubclass(kind, (AgentWorkflow, BaseWorkflowAgent)):
            return
        for owner in set(kind.__mro__) - set(Workflow.__mro__) - set(self._followed):
            undo = self._followed[owner] = Undo()
            for name, step in list(vars(owner).items()):
                if inspect.isfunction(step) and not vars(step).keys().isdisjoint(_STEP_MARKS):
                    undo.add(replace(owner, name, functools.partial(self._wrap_own_step, name)))

    def undo(self) -> None:
        """Unwrap the steps of all workflows."""
        for undo in list(self._followed.values()):
            undo()

    def _wrap_own_step(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(original):

            async def astep(*args: Any, **kwargs: Any) -> Any:
                with following(self, name, _SIGNALS) if self.live else nullcontext():
                    return await original(*args, **kwargs)

            return astep

        def step(*args: Any, **kwargs: Any) -> Any:
            with following(self, name, _SIGNALS) if self.live else nullcontext():
                return original(*args, **kwargs)

        return step

    def _begin_run(self, workflow: Any) -> OpenSpan | None:
        if isinstance(workflow, BaseWorkflowAgent):
            return self.begin_agent(workflow.name, settle_context(), by_default=workflow.name == UNNAMED)
        span = self.begin(names.INVOKE_WORKFLOW, type(workflow).__name__, context=settle_context())
        if span is not None and isinstance(workflow, AgentWorkflow):
            self._turns[span.span_id] = None
        return span

    def _end_run(self, span: OpenSpan, done: Any) -> None:
        with self.guard(span):
            error = _error_of(done)
            self.end(self._turns.pop(span.span_id, None), error=error)
            self.end(span, error=error)

    def wrap_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a step of an agent workflow. Its event names the agent, unless the event is a tool's."""

        async def step(workflow: Any, ctx: Any, ev: Any) -> Any:
            turn = None
            with self.guard():
                turn = self._turn_of(getattr(ev, "current_agent_name", None))
            if turn is None:
                return await original(workflow, ctx, ev)
            with use_context(turn.context):
                return await original(workflow, ctx, ev)

        return step

    def _turn_of(self, agent: str | None) -> OpenSpan | None:
        """Return the span of the agent whose turn it is. Its first step ends the previous agent's turn."""
        run = current_span()
        if run is None or run.span_id not in self._turns:
            return None
        turn = self._turns[run.span_id]
        if agent is not None and (turn is None or turn.name != agent):
            self.end(turn)
            self._turns[run.span_id] = turn = self.begin_agent(agent)
        return turn


def _error_of(done: Any) -> BaseException | str | None:
    if done.cancelled():
        return "cancelled"
    error: BaseException | None = done.exception()
    return error
