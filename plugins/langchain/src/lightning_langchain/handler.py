"""The callback handler: LangChain reports every event to one object.

Chat spans normally come from the openai client. For models reached in another way, they are created here when the call
ends. Tool calls that never run, of unknown tools or with unreadable arguments, are reported by no event: the first kind
appears in the message with which a tool node answers, the second in the model's answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from copy import copy
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import AsyncCallbackManager, BaseCallbackHandler
from langchain_core.language_models import BaseChatModel, BaseLLM
from langchain_core.messages import ToolMessage
from langchain_core.tracers.context import _configure_hooks, register_configure_hook

from lightning_langchain import FRAMEWORK, tools
from lightning_langchain.agents import ChainRun, ChainRuns
from lightning_langchain.handoffs import handed_to
from lightning_langchain.models import OtherModels, follow_caches
from lightning_langchain.tools import (
    called_for,
    find_unknown_request,
    is_control_flow,
    requests_in,
    take_request,
    tool_result,
)
from lightning_openai.json_text import to_json
from lightning_spans.record.context import current, current_agent, entered_iteration, entered_steps
from lightning_spans.record.instrument.patches import replace
from lightning_spans.record.instrument.tool_requests import ToolRequest
from lightning_spans.record.instrument.tracker import begins, ends
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from uuid import UUID

    from langchain_core.messages import BaseMessage
    from langchain_core.outputs import LLMResult

    from lightning_spans.hooks import Recorder


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Add a handler to every callback manager of the process; what is yielded removes it."""
    handler = Handler(recorder, FRAMEWORK)
    yield handler.stop
    yield from follow_caches()
    yield from tools.bind(handler)
    yield replace(BaseChatModel, "_agenerate_with_cache", handler.wrap_ask)
    yield replace(AsyncCallbackManager, "on_llm_start", handler.wrap_llm_start)
    for kind in (BaseChatModel, BaseLLM):
        yield replace(kind, "stream", handler.wrap_stream)
        yield replace(kind, "astream", handler.wrap_astream)
    variable: ContextVar[BaseCallbackHandler | None] = ContextVar(handler.plugin, default=handler)
    before = len(_configure_hooks)
    register_configure_hook(variable, inheritable=True)
    hook = _configure_hooks[before]

    def undo() -> None:
        if hook in _configure_hooks:
            _configure_hooks.remove(hook)

    yield undo


class Handler(ChainRuns, BaseCallbackHandler):
    """Runs in the thread and context of the reported work, so that model calls see the context that it enters."""

    run_inline = True  # otherwise async events run in their own thread and lose their context
    ignore_retriever = True
    ignore_retry = True
    ignore_custom_event = True

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._models = OtherModels(self)

    # Chains

    @begins
    def on_chain_start(  # noqa: D102
        self,
        serialized: Mapping[str, Any] | None,
        inputs: Any,  # noqa: ARG002
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        name: str | None = None,
        tags: Sequence[str] | None = None,
        **_: Any,
    ) -> None:
        run = self.begin_run(run_id, parent_run_id, "chain", name or _name_of(serialized, "chain"), metadata or {})
        run.tags = tags or ()
        if self.is_node(run):
            self.begin_node(run)

    @ends
    def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:  # noqa: D102
        open_run = self.scopes.get(run_id)
        if open_run is not None and open_run.unknown and self.live:
            self._answered(open_run, outputs)
        run = self.end_run(run_id)
        if run is not None:
            self.end(run.span)

    def _answered(self, run: ChainRun, outputs: Any) -> None:
        """Record the answers to calls of unknown tools.

        An answer without an error comes from the program's own handling.
        """
        for message in answers_in(outputs):
            request = run.unknown.pop(message.tool_call_id, None)
            if request is not None and message.status == "error":
                self.refuse(run, request, tool_result(message)[0])

    @ends
    def on_chain_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:  # noqa: D102
        run = self.end_run(run_id)
        if run is None:
            return
        if isinstance(error, GeneratorExit):
            self.end(run.span, attributes={names.ABANDONED: True})
        else:
            self.end(run.span, error=None if is_control_flow(error) else error)

    # Tools

    @begins
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
        run = self.begin_run(run_id, parent_run_id, "tool", _name_of(serialized, "tool"), metadata or {})
        tool_call_id = tool_call_id or called_for()
        context = self.place(run.parent)
        around = current_agent(context)
        run.refused = find_unknown_request(run, inputs, around)
        if run.refused is not None:
            return
        run.made = made = take_request(run.requests, run.name, tool_call_id, inputs, around)
        if run.unknown and made is not None and made.call_id is not None:
            run.unknown.pop(made.call_id, None)
        run.agent = around if made is None else made.agent
        call_id = tool_call_id or (None if made is None else made.call_id)
        text = to_json(input_str if inputs is None else inputs)
        run.span = self.begin_tool(run.name, call_id, text, context, agent=run.agent)
        run.enter(context if run.span is None else run.span.context)

    @ends
    def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:  # noqa: D102
        run = self.end_run(run_id)
        if run is not None and run.refused is not None and self.live:
            self.refuse(run, run.refused, tool_result(output)[0])
        if run is None or run.span is None:
            return
        text, message = tool_result(output)
        if message is not None and names.TOOL_CALL_ID not in run.span.attributes:
            run.span.set(**{names.TOOL_CALL_ID: message.tool_call_id})
        failed = run.error is not None if message is None else message.status == "error"
        told = {names.TOOL_RESULT: text, names.HANDOFF: handed_to(output)}
        self.end(run.span, error=text if failed else None, attributes=told)

    @ends
    def on_tool_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:  # noqa: D102
        run = self.end_run(run_id)
        if run is None:
            return
        if run.made is not None and is_control_flow(error):
            run.requests.append(run.made)  # the tool will be called again
        self.end(run.span, error=None if is_control_flow(error) else error)

    # Models

    @begins
    def on_chat_model_start(  # noqa: D102
        self, serialized: Mapping[str, Any] | None, messages: Sequence[Sequence[BaseMessage]], **told: Any
    ) -> None:
        self._begin_call(serialized, messages[0], **told)

    @begins
    def on_llm_start(  # noqa: D102
        self, serialized: Mapping[str, Any] | None, prompts: Sequence[str], **told: Any
    ) -> None:
        self._begin_call(serialized, prompts[0], **told)

    def _begin_call(
        self,
        serialized: Mapping[str, Any] | None,
        messages: Sequence[BaseMessage] | str,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        metadata: Mapping[str, Any] | None = None,
        invocation_params: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> None:
        run = self.begin_run(run_id, parent_run_id, "chat", _name_of(serialized, "model"), metadata or {})
        run.context = self.place(run.parent)
        run.offered = offered_tools(invocation_params or {})
        if self._models.begin(run, serialized, messages, invocation_params or {}) or run.context is not current():
            # otherwise nothing reads the call's context, and the surrounding node's is sufficient
            run.enter(run.context)

    @ends
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:  # noqa: D102
        run = self.scopes.get(run_id)
        if run is not None and self.live:
            self._asked_for(run, response)
        run = self.end_run(run_id)
        if run is not None and self.live:
            self._models.end(run, response, None)

    def _asked_for(self, run: ChainRun, response: LLMResult) -> None:
        """Keep the tool calls in an answer. Calls with unreadable arguments never run."""
        agent = current_agent(run.context)
        requests = list(requests_in(response, agent))
        run.requests.extend(requests)
        unknown = [request for request in requests if run.offered and request.name not in run.offered]
        run.unknown.update({request.call_id: request for request in unknown if request.call_id is not None})
        for request, why in unreadable_in(response, agent):
            self.refuse(run, request, why)

    @ends
    def on_llm_error(self, error: BaseException, *, run_id: UUID, **_: Any) -> None:  # noqa: D102
        run = self.end_run(run_id)
        if run is not None and self.live:
            self._models.end(run, None, error)

    def wrap_ask(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an asynchronous model call. LangChain reports no callback when nobody waits for the call any more."""

        async def ask(model: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return await original(model, *args, **kwargs)
            except asyncio.CancelledError as error:
                manager = kwargs.get("run_manager")
                if manager is not None:
                    self.on_llm_error(error, run_id=manager.run_id)
                raise

        return ask

    def wrap_llm_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Report the start of a completion model also where LangChain (1.4) reports it only to inline handlers.

        Other handlers are called as without this plugin, by a manager that does not contain it.
        """

        async def on_llm_start(
            manager: Any, serialized: Any, prompts: Sequence[str], run_id: UUID | None = None, **told: Any
        ) -> Any:
            others = [handler for handler in manager.handlers if handler is not self]
            if not self.live or len(others) == len(manager.handlers):
                return await original(manager, serialized, prompts, run_id=run_id, **told)
            without = copy(manager)
            without.handlers = others
            runs = await original(without, serialized, prompts, run_id=run_id, **told)
            for run, prompt in zip(runs, prompts, strict=True):
                run.handlers = manager.handlers
                about = {"run_id": run.run_id, "parent_run_id": manager.parent_run_id, "metadata": manager.metadata}
                self.on_llm_start(serialized, [prompt], **about, **told)
            return runs

        return on_llm_start

    def wrap_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a streamed answer. The run is entered only while the generator works, not while its reader does."""

        def stream(model: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            items = original(model, *args, **kwargs)
            yield from entered_iteration(current(), items) if self.live else items

        return stream

    def wrap_astream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a streamed answer that is read asynchronously; see `wrap_stream`."""

        async def astream(model: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            items = original(model, *args, **kwargs)
            async with aclosing(entered_steps(current(), items) if self.live else items) as steps:
                async for item in steps:
                    yield item

        return astream


def _name_of(serialized: Mapping[str, Any] | None, otherwise: str) -> str:
    known = serialized or {}
    return str(known.get("name") or (known.get("id") or [otherwise])[-1])


if TYPE_CHECKING:
    from langchain_core.outputs import LLMResult


def offered_tools(params: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the tools offered to a model, in any provider's format."""
    tools = params.get("tools") or params.get("functions") or ()
    known = [tool.get("function") or tool for tool in tools if isinstance(tool, Mapping)]
    return frozenset(str(tool["name"]) for tool in known if isinstance(tool, Mapping) and tool.get("name"))


def unreadable_in(response: LLMResult, agent: str | None) -> Iterator[tuple[ToolRequest, str]]:
    """Return an answer's tool calls with unreadable arguments, and the reason for each."""
    for generation in (generation for row in response.generations for generation in row):
        for call in getattr(getattr(generation, "message", None), "invalid_tool_calls", None) or ():
            name, arguments = call.get("name") or "unknown", call.get("args") or ""
            why = call.get("error") or f"the arguments of {name} can't be read"
            yield ToolRequest(call.get("id"), name, arguments, agent), str(why)


def answers_in(outputs: Any) -> Iterator[ToolMessage]:
    """Return the messages in a node's output that answer tool calls."""
    if isinstance(outputs, ToolMessage):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from (part for part in value if isinstance(part, ToolMessage)) if isinstance(value, list) else ()
    elif isinstance(outputs, list):
        for part in outputs:
            yield from answers_in(part)
    elif isinstance(update := getattr(outputs, "update", None), Mapping | list):
        yield from answers_in(update)
