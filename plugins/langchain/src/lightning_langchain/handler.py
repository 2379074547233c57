"""The callback handler: LangChain's events become agent and tool spans, and tell the wire who is at work.

The chat span is the wire's. Only where a model was reached without the openai client is it made here, at its end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.context import _configure_hooks, register_configure_hook

from lightning_langchain.asked import remember, who_asked
from lightning_langchain.elsewhere import PLUGIN, Elsewhere, follow_caches
from lightning_langchain.runs import Runs
from lightning_langchain.words import tool_result
from lightning_openai.elsewhere import to_json
from lightning_spans import spans as names
from lightning_spans.context import current, current_agent
from lightning_spans.recorder import log_failure

if TYPE_CHECKING:
    from uuid import UUID

    from langchain_core.messages import BaseMessage
    from langchain_core.outputs import LLMResult

    from lightning_langchain.runs import Run
    from lightning_spans.recorder import Recorder


def bind(recorder: Recorder) -> Callable[[], None]:
    """Have every callback manager of the process call a handler, until the callable that is given back is called."""
    handler = Handler(recorder)
    variable: ContextVar[BaseCallbackHandler | None] = ContextVar(PLUGIN, default=handler)
    before = len(_configure_hooks)
    register_configure_hook(variable, inheritable=True)
    hook = _configure_hooks[before]
    undo_caches = follow_caches()

    def undo() -> None:
        if hook in _configure_hooks:
            _configure_hooks.remove(hook)
        undo_caches()
        handler.stop()

    return undo


def _start(method: Callable[..., None]) -> Any:
    """Guard an event that begins something, and ignore it once recording has stopped: graphs that run keep handlers."""

    @functools.wraps(method)
    def handle(self: Handler, *args: Any, **kwargs: Any) -> None:
        if self.live:
            try:
                method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - logged
                log_failure(PLUGIN, error)

    return handle


def _end(method: Callable[..., None]) -> Any:
    """Guard an event that ends something: always heard, so that the contexts that were entered are left."""

    @functools.wraps(method)
    def handle(self: Handler, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - logged
            log_failure(PLUGIN, error)

    return handle


class Handler(BaseCallbackHandler):
    """Called in the thread and the context of what it reports, so that the wire finds what it enters."""

    run_inline = True  # else async events run in a thread of their own, and their context is lost
    ignore_retriever = True
    ignore_retry = True
    ignore_custom_event = True

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.live = True
        self._runs = Runs(recorder)
        self._elsewhere = Elsewhere(recorder)

    def stop(self) -> None:
        """End the spans that are open, and begin no more."""
        self.live = False
        with self.recorder.guard(PLUGIN):
            self._runs.end_spans()

    # Chains

    @_start
    def on_chain_start(  # noqa: D102
        self,
        serialized: Mapping[str, Any] | None,
        inputs: Any,  # noqa: ARG002
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        name: str | None = None,
        **_: Any,
    ) -> None:
        run = self._runs.begin(run_id, parent_run_id, "chain", name or _name_of(serialized, "chain"), metadata or {})
        if self._runs.is_node(run):
            self._runs.begin_node(run)

    @_end
    def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:  # noqa: ARG002, D102
        run = self._runs.end(run_id)
        if run is not None and run.span is not None:
            run.span.end()

    @_end
    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:  # noqa: D102
        run = self._runs.end(run_id)
        if run is None or run.span is None:
            return
        if isinstance(error, GeneratorExit):
            run.span.end(attributes={names.ABANDONED: True})
        else:
            run.span.end(error=None if _is_control_flow(error) else error)

    # Tools

    @_start
    def on_tool_start(  # noqa: D102
        self,
        serialized: Mapping[str, Any] | None,
        input_str: str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
        tool_call_id: str | None = None,
        **_: Any,
    ) -> None:
        run = self._runs.begin(run_id, parent_run_id, "tool", _name_of(serialized, "tool"), metadata or {})
        arguments: Any = input_str if inputs is None else inputs
        context = self._runs.place(run.parent)
        at_work = current_agent(context)
        asked = run.made = who_asked(run, tool_call_id, inputs, at_work)
        run.agent = at_work if asked is None else asked.agent
        run.span = self.recorder.start(
            names.EXECUTE_TOOL,
            run.name,
            agent=run.agent,
            context=context,
            attributes={
                names.FRAMEWORK: "langchain",
                names.TOOL_NAME: run.name,
                names.TOOL_CALL_ID: tool_call_id or (asked.call_id if asked is not None else None),
                names.TOOL_ARGUMENTS: to_json(arguments),
            },
        )
        run.enter(run.span.context)

    @_end
    def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:  # noqa: D102
        run = self._runs.end(run_id)
        if run is None or run.span is None:
            return
        text, message = tool_result(output)
        if message is not None and names.TOOL_CALL_ID not in run.span.attributes:
            run.span.set(**{names.TOOL_CALL_ID: message.tool_call_id})
        failed = message is not None and message.status == "error"
        run.span.end(error=text if failed else None, attributes={names.TOOL_RESULT: text})

    @_end
    def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:  # noqa: D102
        run = self._runs.end(run_id)
        if run is not None and run.made is not None and _is_control_flow(error):
            run.asked.append(run.made)  # it will be called again
        if run is not None and run.span is not None:
            run.span.end(error=None if _is_control_flow(error) else error)

    # Models

    @_start
    def on_chat_model_start(  # noqa: D102
        self,
        serialized: Mapping[str, Any] | None,
        messages: Sequence[Sequence[BaseMessage]],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **details: Any,
    ) -> None:
        run = self._runs.begin(run_id, parent_run_id, "chat", _name_of(serialized, "model"), metadata or {})
        self._begin_call(run, serialized, messages[0], details.get("invocation_params") or {})

    @_start
    def on_llm_start(  # noqa: D102
        self,
        serialized: Mapping[str, Any] | None,
        prompts: Sequence[str],
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        **details: Any,
    ) -> None:
        run = self._runs.begin(run_id, parent_run_id, "chat", _name_of(serialized, "model"), metadata or {})
        self._begin_call(run, serialized, prompts[0], details.get("invocation_params") or {})

    def _begin_call(
        self,
        run: Run,
        serialized: Mapping[str, Any] | None,
        asked: Sequence[BaseMessage] | str,
        params: Mapping[str, Any],
    ) -> None:
        run.context = self._runs.place(run.parent)
        if self._elsewhere.begin(run, serialized, asked, params) or run.context is not current():
            run.enter(run.context)  # else nobody asks in whose context the call is: that of the node around it will do

    @_end
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:  # noqa: D102
        run = self._runs.end(run_id)
        if run is not None and self.live:
            self._elsewhere.end(run, response, None)
            remember(run, response)

    @_end
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:  # noqa: D102
        run = self._runs.end(run_id)
        if run is not None and self.live:
            self._elsewhere.end(run, None, error)


def _name_of(serialized: Mapping[str, Any] | None, otherwise: str) -> str:
    known = serialized or {}
    return str(known.get("name") or (known.get("id") or [otherwise])[-1])


def _is_control_flow(error: BaseException) -> bool:
    """Whether it is LangGraph's way to pause or to go elsewhere, and no failure."""
    return any(kind.__name__ == "GraphBubbleUp" for kind in type(error).__mro__)
