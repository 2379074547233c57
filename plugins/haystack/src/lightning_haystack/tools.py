"""Tool spans, also for tool calls that Haystack rejects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, Final

from haystack.components.generators.chat import openai as completions
from haystack.dataclasses import ChatMessage, ToolCall
from haystack.tools import Tool
from haystack.tools.errors import ToolInvocationError
from haystack.tracing.utils import coerce_tag_value

from lightning_haystack import FRAMEWORK
from lightning_openai.json_text import to_json
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import (
    RecordedOutcome,
    aoutcome_for,
    keep_raised,
    keep_returned,
    outcome_for,
    tool_around,
)
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder

_running: Final[ContextVar[Any]] = ContextVar("lightning_haystack_tool", default=None)


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Haystack to record every tool call; what is yielded removes each patch."""
    tools = HaystackTools(recorder, FRAMEWORK)
    yield tools.stop
    for owner, name, wrap in tools.places():
        yield replace(owner, name, wrap)
    yield replace_in_subclasses(Tool, "invoke", tools.wrap_own_code)
    yield replace_in_subclasses(Tool, "invoke_async", tools.wrap_own_async_code)
    yield replace(completions, "_convert_chat_completion_to_chat_message", tools.wrap_message)
    yield replace(completions, "_convert_streaming_chunks_to_chat_message", tools.wrap_streamed_message)


def tool_of(component: Any) -> Any:
    """Return the tool that runs as this component; None if the component is not a tool."""
    tool = _running.get()
    return tool if tool is not None and getattr(tool, "_component", None) is component else None


class _Arguments(dict[str, Any]):
    """A tool's arguments, linked to the model's call. Before Haystack 3 nothing else links them."""

    call: ToolCall


class HaystackTools(Tracker):
    """Starts and ends tool spans around Haystack's tool calls."""

    def places(self) -> Iterator[tuple[Any, str, Callable[[Callable[..., Any]], Callable[..., Any]]]]:
        """Return where tool calls pass in this version of Haystack: owner, attribute, and wrapper."""
        try:
            from haystack.components.agents import tool_calling
        except ImportError:  # before Haystack 3
            from haystack.components.tools import ToolInvoker

            yield ToolInvoker, "_prepare_tool_call_params", self.wrap_prepared
            yield ToolInvoker, "_make_context_bound_invoke", self.wrap_bound
            return
        yield tool_calling, "_resolve_tool_calls", self.wrap_resolved
        yield tool_calling, "_make_context_bound_invoke", self.wrap_bound
        yield tool_calling, "_make_bounded_invoke_async", self.wrap_bound_async

    def wrap_bound(self, original: Callable[..., Callable[[], Any]]) -> Callable[..., Callable[[], Any]]:
        """Wrap the preparation of a call. It returns a function for another thread, which returns a tool's error."""

        def bound(*args: Any, **kwargs: Any) -> Callable[[], Any]:
            tool, call = _call_in(args, kwargs)
            context = copy_context()  # as the original does: the span is in the copy of the context

            def carry_out() -> Any:
                _running.set(tool)
                span = self._begin(call)
                with self.inside(span):
                    result = original(*args, **kwargs)()
                    self._end(span, result)
                    return result

            return (lambda: context.run(carry_out)) if self.live else original(*args, **kwargs)

        return bound

    def wrap_bound_async(self, original: Callable[..., Callable[[], Any]]) -> Callable[..., Callable[[], Any]]:
        """Wrap the preparation of an asynchronous call, which is awaited in its own task."""

        def bound(*args: Any, **kwargs: Any) -> Callable[[], Any]:
            run = original(*args, **kwargs)
            tool, call = _call_in(args, kwargs)

            async def carry_out() -> Any:
                _running.set(tool)
                span = self._begin(call)
                with self.inside(span):
                    result = await run()
                    self._end(span, result)
                    return result

            return carry_out if self.live else run

        return bound

    def _begin(self, call: ToolCall) -> OpenSpan | None:
        return self.begin_tool(call.tool_name, call.id, to_json(call.arguments))

    def _end(self, span: OpenSpan | None, result: Any) -> None:
        with self.guard(span):
            if isinstance(result, ToolInvocationError):
                self.end(span, error=result.__cause__ or result, attributes={names.TOOL_RESULT: str(result)})
            else:
                self.end(span, attributes={names.TOOL_RESULT: _text(result)})

    def wrap_resolved(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the lookup of an answer's tool calls. Calls of unknown tools are rejected."""

        def resolve(messages: Sequence[ChatMessage], tools: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                found = original(messages, tools, *args, **kwargs)
            except Exception as error:
                self._refuse_unknown(messages, tools, str(error))
                raise
            self._refuse(found[2])
            return found

        return resolve

    def wrap_prepared(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the lookup before Haystack 3, where the arguments are prepared too."""

        def prepare(invoker: Any, **kwargs: Any) -> Any:
            messages, tools = kwargs["messages_with_tool_calls"], kwargs["tools_with_names"]
            try:
                calls, parameters, refusals = original(invoker, **kwargs)
            except Exception as error:
                self._refuse_unknown(messages, tools, str(error))
                raise
            self._refuse(refusals)
            return calls, [_with_call(*one) for one in zip(parameters, calls, strict=True)], refusals

        return prepare

    def _refuse_unknown(self, messages: Sequence[ChatMessage], tools: Any, why: str) -> None:
        with self.guard():
            unknown = [call for message in messages for call in message.tool_calls if call.tool_name not in tools]
            for call in unknown[:1]:  # a rejected call ends the run
                self.end(self._begin(call), error=why)

    def _refuse(self, refusals: Sequence[ChatMessage]) -> None:
        with self.guard():
            for told in (result for message in refusals for result in message.tool_call_results):
                why = str(told.result)
                self.end(self._begin(told.origin), error=why, attributes={names.TOOL_RESULT: why})

    def wrap_own_code(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tool's own code. In a replay it runs only if there is no recorded result."""

        def invoke(tool: Any, *args: Any, **kwargs: Any) -> Any:
            span = tool_around() if self.live else None
            if span is None:
                return original(tool, *args, **kwargs)
            given = outcome_for(span)
            if given is not None:
                return original(_giving(tool, given), *args, **kwargs)
            with _Outcome(span) as kept:
                return kept.whole(original(tool, *args, **kwargs))

        return invoke

    def wrap_own_async_code(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a tool's own coroutine. A tool without one uses `invoke`, in a thread."""

        async def invoke(tool: Any, *args: Any, **kwargs: Any) -> Any:
            span = tool_around() if self.live and tool.async_function is not None else None
            if span is None:
                return await original(tool, *args, **kwargs)
            given = await aoutcome_for(span)
            if given is not None:
                return await original(_giving(tool, given), *args, **kwargs)
            with _Outcome(span) as kept:
                return kept.whole(await original(tool, *args, **kwargs))

        return invoke

    # A generator drops calls whose arguments are not valid JSON, and only logs it.

    def wrap_message(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the reading of an answer."""

        def convert(completion: Any, choice: Any) -> Any:
            message = original(completion, choice)
            with self.guard():
                functions = [call for call in choice.message.tool_calls or () if hasattr(call, "function")]
                asked = [(call.id, call.function.name, call.function.arguments) for call in functions]
                self._refuse_unread(asked, message)
            return message

        return convert

    def wrap_streamed_message(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the reading of a streamed answer."""

        def convert(chunks: Any) -> Any:
            message = original(chunks=chunks)
            with self.guard():
                asked: dict[int, list[str]] = {}
                for delta in (delta for chunk in chunks for delta in chunk.tool_calls or ()):
                    parts = asked.setdefault(delta.index, ["", "", ""])
                    parts[0] = delta.id or parts[0]
                    parts[1] += delta.tool_name or ""
                    parts[2] += delta.arguments or ""
                self._refuse_unread(asked.values(), message)
            return message

        return convert

    def _refuse_unread(self, asked: Any, message: ChatMessage) -> None:
        read = {call.id for call in message.tool_calls}
        for call_id, name, arguments in asked:
            if call_id not in read:
                span = self.begin_tool(name, call_id, arguments)
                self.end(span, error=f"the arguments of {name} are no JSON, so Haystack leaves the call out")


class _Outcome:
    """Records on a tool span what the tool's own code returned or raised."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def __enter__(self) -> _Outcome:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            keep_raised(self._span, error.__cause__ or error)

    def whole(self, answer: Any) -> Any:
        keep_returned(self._span, answer)
        return answer


def _giving(tool: Any, given: RecordedOutcome) -> Any:
    """Return a tool that gives the recorded result, so that errors get Haystack's own message."""

    async def awaited(**_: Any) -> Any:
        return given.outcome()

    own = copy.copy(tool)
    own.function = lambda **_: given.outcome()
    if getattr(tool, "async_function", None) is not None:
        own.async_function = awaited
    return own


def _with_call(parameters: dict[str, Any], call: ToolCall) -> dict[str, Any]:
    arguments = _Arguments(parameters["final_args"])
    arguments.call = call
    return {**parameters, "final_args": arguments}


def _call_in(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ToolCall]:
    """Return the tool and the model's call from the arguments of a preparation; their order depends on the version.

    Raises:
        LookupError: neither is there.
    """
    values = [*args, *kwargs.values()]
    tools = [value for value in values if isinstance(value, Tool)]
    calls = [value for value in values if isinstance(value, ToolCall)]
    calls += [value.call for value in values if isinstance(value, _Arguments)]
    if not (tools and calls):
        raise LookupError("Haystack prepares a tool call without its name")
    return tools[0], calls[0]


def _text(result: Any) -> str:
    """Return a tool's result as text; for an agent, its last message."""
    if isinstance(result, str):
        return result
    last = result.get("last_message") if isinstance(result, dict) else None
    return str(last.text) if isinstance(last, ChatMessage) else str(coerce_tag_value(result))
