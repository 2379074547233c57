"""Chat spans for models that do not use the openai client (Anthropic, Bedrock, Gemini, ...), one per call.

Each call opens a scope. If the openai client creates a chat span within it, this module creates none. A model that
implements one kind of call by another counts as called once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.base import BaseLLM

from lightning_llama_index import FRAMEWORK
from lightning_openai.model_tracker import ModelTracker
from lightning_openai.other_clients import OtherCall
from lightning_spans.record.instrument.patches import replace_in_subclasses
from lightning_spans.record.instrument.scope import scopes_around

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.spans import Json


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch LlamaIndex to record every model call; what is yielded removes each patch."""
    models = LlamaIndexModels(recorder, FRAMEWORK)
    yield models.stop
    for name in ("chat", "complete"):
        yield replace_in_subclasses(BaseLLM, name, models.wrap)
        yield replace_in_subclasses(BaseLLM, f"a{name}", models.wrap_async)
        yield replace_in_subclasses(BaseLLM, f"stream_{name}", models.wrap_stream)
        yield replace_in_subclasses(BaseLLM, f"astream_{name}", models.wrap_stream_async)


class LlamaIndexModels(ModelTracker):
    """Reads requests and answers of LlamaIndex's models."""

    by_clients = ("llama_index.llms.openai",)  # and `openai_like`
    kept = 1  # each item of a streamed answer contains everything before it

    def records(self) -> bool:
        """Whether a call that starts now is recorded: it is not part of another."""
        return self.live and not any(isinstance(scope.call, OtherCall) for scope in scopes_around())

    def call_of(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, streamed: bool) -> OtherCall:
        """Return the call that starts with these arguments."""

        def ask() -> dict[str, Json]:
            return request_body(model, args, kwargs)

        provider = model.class_name().removesuffix("_llm")
        return OtherCall(self.recorder, self.plugin, self.framework, ask, provider=provider, streamed=streamed)

    def answer(self, model: Any, items: Sequence[Any]) -> Mapping[str, Json]:
        """Return what a model answered as a chat completion."""
        return response_body(model, items[-1])

    def wrap_stream_async(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an asynchronous call with a streamed answer, which is awaited before it is read."""
        if self.is_by_client(original):
            return original

        async def ask(model: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            call = self.begin_call(model, args, kwargs, streamed=True)
            if call is None:
                pieces: AsyncGenerator[Any, None] = await original(model, *args, **kwargs)
                return pieces
            with call.start_inside():
                pieces = await original(model, *args, **kwargs)
            return call.steps(pieces, lambda seen: self.answer(model, seen))

        return ask


def request_body(model: Any, asked: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Json]:
    """Return the request as the body of a chat completion."""
    given = asked[0] if asked else options.get("messages", options.get("prompt", ""))
    turns = [{"role": "user", "content": given}] if isinstance(given, str) else [_turn(message) for message in given]
    tools = options.get("tools")
    known = {"tools": tools} if isinstance(tools, list) and tools else {}
    return {"model": model.metadata.model_name, "messages": turns, **known}


def response_body(model: Any, answer: Any) -> dict[str, Json]:
    """Return the answer as a chat completion."""
    message = getattr(answer, "message", None)
    turn = {"role": "assistant", "content": answer.text} if message is None else _turn(message)
    choice = {"index": 0, "message": turn, "finish_reason": "tool_calls" if "tool_calls" in turn else "stop"}
    return {"object": "chat.completion", "model": model.metadata.model_name, "choices": [choice]}


def _turn(message: Any) -> dict[str, Json]:
    turn: dict[str, Json] = {"role": message.role.value, "content": message.content}
    if call_id := message.additional_kwargs.get("tool_call_id"):
        turn["tool_call_id"] = call_id
    calls = [
        {
            "id": block.tool_call_id,
            "type": "function",
            "function": {"name": block.tool_name, "arguments": block.tool_kwargs},
        }
        for block in getattr(message, "blocks", ())
        if getattr(block, "block_type", None) == "tool_call"
    ]
    calls = calls or message.additional_kwargs.get("tool_calls") or []
    return {**turn, "tool_calls": calls} if calls else turn
