"""Tool spans for functions that models call: the arguments the model requested and the result it got."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from semantic_kernel import Kernel
from semantic_kernel.contents import FunctionResultContent
from semantic_kernel.filters.filter_types import FilterTypes
from semantic_kernel.filters.kernel_filters_extension import KernelFilterExtension
from semantic_kernel.functions import FunctionResult, KernelFunction

from lightning_openai.json_text import to_json
from lightning_semantic_kernel import FRAMEWORK
from lightning_spans.record.instrument.patches import replace, replace_in_subclasses
from lightning_spans.record.instrument.tracker import Tracker
from lightning_spans.record.replay import arun_or_replay, tool_around
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from lightning_spans.hooks import OpenSpan, Recorder

_FAILED: Final = "An error occurred while invoking the function"  # so the model gets the text of a function's exception


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Semantic Kernel to record every function call of a model; what is yielded removes each patch."""
    tools = KernelTools(recorder, FRAMEWORK)
    yield tools.stop
    yield replace(Kernel, "invoke_function_call", tools.wrap_call)
    yield replace(KernelFilterExtension, "construct_call_stack", tools.wrap_call_stack)
    yield replace_in_subclasses(KernelFunction, "_invoke_internal", tools.wrap_own_code)


class KernelTools(Tracker):
    """Starts and ends tool spans around the functions that models call."""

    def __init__(self, recorder: Recorder, framework: str) -> None:
        super().__init__(recorder, framework)
        self._accepted: set[str] = set()  # spans of known functions with valid arguments
        self._raised: dict[str, Exception] = {}  # exceptions of functions, by span

    def wrap_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a model's function call. It runs or is rejected, and the result is added to the history."""

        async def invoke_function_call(kernel: Any, function_call: Any, chat_history: Any, **options: Any) -> Any:
            span = self._begin(function_call)
            with self.inside(span):
                outcome = await original(kernel, function_call, chat_history, **options)
                with self.guard(span):
                    self._end(span, _result_of(function_call, chat_history))
                return outcome

        return invoke_function_call

    def _begin(self, call: Any) -> OpenSpan | None:
        with self.guard():
            arguments = call.arguments if isinstance(call.arguments, str) else to_json(call.arguments or {})
            return self.begin_tool(call.name or "", call.id, arguments)
        return None

    def _end(self, span: OpenSpan | None, text: str) -> None:
        if span is None:
            return
        refused = span.span_id not in self._accepted
        self._accepted.discard(span.span_id)
        raised = self._raised.pop(span.span_id, None)
        error = text if refused else raised if text.startswith(_FAILED) else None
        self.end(span, error=error, attributes={names.TOOL_RESULT: text})

    def wrap_call_stack(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the assembly of the filters around a call, which happens only for a valid call."""

        def construct_call_stack(kernel: Any, filter_type: Any, *args: Any, **kwargs: Any) -> Any:
            span = tool_around() if filter_type == FilterTypes.AUTO_FUNCTION_INVOCATION else None
            if span is not None:
                self._accepted.add(span.span_id)
            return original(kernel, filter_type, *args, **kwargs)

        return construct_call_stack

    def wrap_own_code(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function's own code: a method or a prompt."""

        async def invoke(function: Any, context: Any) -> None:
            span = tool_around() if self.live else None
            if span is None:
                await original(function, context)
                return

            async def run() -> Any:
                await original(function, context)
                return None if context.result is None else context.result.value

            try:
                value = await arun_or_replay(run)
            except Exception as error:
                self._raised[span.span_id] = error
                raise
            if context.result is None:  # it did not run, because this is a replay
                context.result = FunctionResult(function=function.metadata, value=value)

        return invoke


def _result_of(call: Any, history: Any) -> str:
    """Return the model's message. Parallel calls end in any order."""
    for message in reversed(history.messages):
        for item in message.items:
            if isinstance(item, FunctionResultContent) and item.id == (call.id or "unknown"):
                return str(item.result)
    return ""
