"""Chat spans for models that do not use the openai client (Anthropic, Bedrock, Gemini, ...), one per call.

Each call opens a scope. If the openai client creates a chat span within it, this module creates none. A model that
implements one kind of call by another counts as called once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.base import BaseLLM

from lightning_llama_index import FRAMEWORK
from lightning_openai.completion import assistant_message, chat_completion, chat_request, finish_reason, tool_call
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

    parameters = ("messages",)  # or a prompt, which is a text
    by_clients = ("llama_index.llms.openai",)  # and `openai_like`
    kept = 1  # each item of a streamed answer contains everything before it

    def records(self) -> bool:
        """Whether a call that starts now is recorded: it is not part of another."""
        return self.live and not any(isinstance(scope.call, OtherCall) for scope in scopes_around())

    def request(self, model: Any, given: Mapping[str, Any]) -> dict[str, Json]:
        """Return what a model is asked as the body of a chat completion."""
        asked = given.get("messages", given.get("prompt", ""))
        turns = (
            [{"role": "user", "content": asked}] if isinstance(asked, str) else [_turn(message) for message in asked]
        )
        tools = given.get("tools")
        return chat_request(model.metadata.model_name, turns, tools if isinstance(tools, list) else ())

    def provider(self, model: Any) -> str | None:
        """Return the name of the model's provider."""
        return str(model.class_name()).removesuffix("_llm")

    def answer(self, model: Any, items: Sequence[Any]) -> dict[str, Json]:
        """Return what a model answered as a chat completion."""
        message = getattr(items[-1], "message", None)
        turn = assistant_message(items[-1].text) if message is None else _turn(message)
        return chat_completion((turn, finish_reason(turn)), model=model.metadata.model_name)

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


def _turn(message: Any) -> dict[str, Json]:
    turn: dict[str, Json] = {"role": message.role.value, "content": message.content}
    if call_id := message.additional_kwargs.get("tool_call_id"):
        turn["tool_call_id"] = call_id
    calls = [
        tool_call(block.tool_call_id, block.tool_name, block.tool_kwargs)
        for block in getattr(message, "blocks", ())
        if getattr(block, "block_type", None) == "tool_call"
    ]
    calls = calls or message.additional_kwargs.get("tool_calls") or []
    return {**turn, "tool_calls": calls} if calls else turn
