"""Chat spans for models that do not use the openai client (Anthropic, Google, Bedrock, ...), one per call.

Each call opens a scope. If the openai client, or a nested model, creates a chat span within it, this module creates
none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from pydantic_ai.models import Model

from lightning_openai.completion import (
    assistant_message,
    chat_completion,
    chat_request,
    function_tool,
    token_usage,
    tool_call,
    tool_message,
)
from lightning_openai.json_text import to_json
from lightning_openai.model_tracker import ModelTracker
from lightning_openai.other_clients import OtherCall
from lightning_pydantic_ai import FRAMEWORK
from lightning_spans.record.context import attach, current, overlaid
from lightning_spans.record.instrument.patches import replace_in_subclasses
from lightning_spans.record.instrument.scope import with_scope

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.spans import Json

_FINISH: Final = {"tool_call": "tool_calls"}


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Pydantic AI to record every model call; what is yielded removes each patch."""
    models = PydanticModels(recorder, FRAMEWORK)
    yield models.stop
    yield replace_in_subclasses(Model, "request", models.wrap_async)
    yield replace_in_subclasses(Model, "request_stream", models.wrap_request_stream)


class PydanticModels(ModelTracker):
    """Reads requests and answers of Pydantic AI's models."""

    parameters = ("messages", "model_settings", "model_request_parameters")
    by_clients = ("pydantic_ai.models.openai",)

    def request(self, model: Any, given: Mapping[str, Any]) -> dict[str, Json]:
        """Return what a model is asked as the body of a chat completion."""
        settings, messages = given.get("model_settings") or {}, given["messages"]
        known = {key: value for key, value in settings.items() if isinstance(value, str | int | float | list)}
        offered = given.get("model_request_parameters")
        tools = [
            function_tool(tool.name, tool.description, tool.parameters_json_schema)
            for tool in [*getattr(offered, "function_tools", ()), *getattr(offered, "output_tools", ())]
        ]
        told = [message.instructions for message in messages if getattr(message, "instructions", None)]
        # every request repeats them; only the last counts
        turns = [{"role": "system", "content": told[-1]}] if told else []
        turns += [turn for message in messages for turn in _turns(message)]
        return {**known, **chat_request(model.model_name, turns, tools)}

    def provider(self, model: Any) -> str | None:
        """Return the name of the model's provider."""
        return getattr(model, "system", None)

    def answer(self, model: Any, items: Sequence[Any]) -> dict[str, Json]:  # noqa: ARG002 - the answer names it
        """Return what a model answered as a chat completion."""
        return response_body(items[0])

    def wrap_request_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call with a streamed answer, which is a block."""
        if self.is_by_client(original):
            return original

        def request_stream(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = self.begin_call(model, args, kwargs, streamed=True)
            stream = original(model, *args, **kwargs)
            return stream if call is None else _streaming(stream, call)

        return request_stream


@asynccontextmanager
async def _streaming(stream: AbstractAsyncContextManager[Any], call: OtherCall) -> AsyncIterator[Any]:
    outer = current()
    attach(with_scope(call.scope))
    read: Any = None
    with call.end_after(lambda: None if read is None else response_body(read.get())):
        try:
            async with stream as opened:
                attach(overlaid(outer))  # the reader's own calls are not part of it
                yield opened
                read = opened
        finally:
            attach(overlaid(outer))


def response_body(answer: Any) -> dict[str, Json]:
    """Return the answer as a chat completion."""
    details: Mapping[str, Any] = getattr(answer, "provider_details", None) or {}
    reason = getattr(answer, "finish_reason", None) or details.get("finish_reason")
    return chat_completion(
        (_assistant(answer), _FINISH.get(str(reason), reason)),
        id=getattr(answer, "provider_response_id", None),
        model=answer.model_name,
        usage=token_usage(answer.usage.input_tokens, answer.usage.output_tokens),
    )


def _turns(message: Any) -> Iterator[dict[str, Json]]:
    if message.kind == "response":
        yield _assistant(message)
        return
    for part in message.parts:
        if part.part_kind == "system-prompt":
            yield {"role": "system", "content": part.content}
        elif part.part_kind == "user-prompt":
            yield {"role": "user", "content": part.content if isinstance(part.content, str) else to_json(part.content)}
        elif part.part_kind in {"tool-return", "retry-prompt"}:
            text = part.model_response() if part.part_kind == "retry-prompt" else part.model_response_str()
            yield tool_message(part.tool_call_id, text)


def _assistant(message: Any) -> dict[str, Json]:
    text = "".join(part.content for part in message.parts if part.part_kind == "text")
    calls = [
        tool_call(part.tool_call_id, part.tool_name, part.args_as_json_str())
        for part in message.parts
        if part.part_kind == "tool-call"
    ]
    return assistant_message(text or None, calls)
