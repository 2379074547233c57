"""Chat spans for models that do not use the openai client (Anthropic, Google, Bedrock, ...), one per call.

Each call opens a scope. If the openai client, or a nested model, creates a chat span within it, this module creates
none.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from pydantic_ai.models import Model

from lightning_openai.json_text import to_json
from lightning_openai.model_tracker import ModelTracker
from lightning_openai.other_clients import OtherCall
from lightning_pydantic_ai import FRAMEWORK
from lightning_spans.record.context import attach, current, overlaid
from lightning_spans.record.instrument.patches import replace_in_subclasses
from lightning_spans.record.instrument.scope import scoped

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

    by_clients = ("pydantic_ai.models.openai",)

    def call_of(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, streamed: bool) -> OtherCall:
        """Return the call that starts with these arguments."""
        given = {**dict(zip(("messages", "model_settings", "model_request_parameters"), args, strict=False)), **kwargs}

        def ask() -> dict[str, Json]:
            return request_body(
                model, given["messages"], given.get("model_settings"), given.get("model_request_parameters")
            )

        provider = getattr(model, "system", None)
        return OtherCall(self.recorder, self.plugin, self.framework, ask, provider=provider, streamed=streamed)

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
    attach(scoped(call.scope))
    answer: Callable[[], dict[str, Json]] | None = None
    failed: BaseException | None = None
    try:
        async with stream as opened:
            attach(overlaid(outer))  # the reader's own calls are not part of it
            yield opened
            answer = functools.partial(_read, opened)
    except GeneratorExit:
        raise
    except BaseException as error:
        failed = error
        raise
    finally:
        attach(overlaid(outer))
        call.end(answer, error=failed)


def _read(opened: Any) -> dict[str, Json]:
    return response_body(opened.get())


def request_body(model: Any, messages: Sequence[Any], settings: Any = None, parameters: Any = None) -> dict[str, Json]:
    """Return the request as the body of a chat completion."""
    known = {key: value for key, value in (settings or {}).items() if isinstance(value, str | int | float | list)}
    tools = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters_json_schema},
        }
        for tool in [*getattr(parameters, "function_tools", ()), *getattr(parameters, "output_tools", ())]
    ]
    told = [given.instructions for given in messages if getattr(given, "instructions", None)]
    # every request repeats them; only the last counts
    turns = [{"role": "system", "content": told[-1]}] if told else []
    body = {**known, "model": model.model_name, "messages": [*turns, *(t for given in messages for t in _turns(given))]}
    return {**body, "tools": tools} if tools else body


def response_body(answer: Any) -> dict[str, Json]:
    """Return the answer as a chat completion."""
    details: Mapping[str, Any] = getattr(answer, "provider_details", None) or {}
    reason = getattr(answer, "finish_reason", None) or details.get("finish_reason")
    return {
        "id": getattr(answer, "provider_response_id", None),
        "object": "chat.completion",
        "model": answer.model_name,
        "choices": [{"index": 0, "message": _assistant(answer), "finish_reason": _FINISH.get(str(reason), reason)}],
        "usage": {"prompt_tokens": answer.usage.input_tokens, "completion_tokens": answer.usage.output_tokens},
    }


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
            yield {"role": "tool", "tool_call_id": part.tool_call_id, "content": text}


def _assistant(message: Any) -> dict[str, Json]:
    text = "".join(part.content for part in message.parts if part.part_kind == "text")
    calls = [
        {
            "id": part.tool_call_id,
            "type": "function",
            "function": {"name": part.tool_name, "arguments": part.args_as_json_str()},
        }
        for part in message.parts
        if part.part_kind == "tool-call"
    ]
    turn: dict[str, Json] = {"role": "assistant", "content": text or None}
    return {**turn, "tool_calls": calls} if calls else turn
