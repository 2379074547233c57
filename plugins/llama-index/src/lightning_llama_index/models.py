"""Models that LlamaIndex reaches without the openai client (Anthropic, Bedrock, Gemini, ...): one chat span a call.

Every call is a scope while it lasts. If the openai client makes a chat span in it, nothing is made here. A model that
answers one kind of call by another of its own is asked once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from llama_index.core.base.llms.base import BaseLLM

from lightning_llama_index import FRAMEWORK
from lightning_openai.other_clients import OtherCall
from lightning_spans.record.context import entered
from lightning_spans.record.instrument.patches import replace_in_subclasses
from lightning_spans.record.instrument.scope import scoped, scopes_around
from lightning_spans.record.instrument.tracker import Tracker

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.spans import Json

_BY_OPENAI: Final = "llama_index.llms.openai"  # and `openai_like`: their models always use the openai client


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Follow every call of a model, until what is yielded is called."""
    models = LlamaIndexModels(recorder, FRAMEWORK)
    yield models.stop
    for name in ("chat", "complete"):
        yield replace_in_subclasses(BaseLLM, name, models.wrap)
        yield replace_in_subclasses(BaseLLM, f"a{name}", models.wrap_async)
        yield replace_in_subclasses(BaseLLM, f"stream_{name}", models.wrap_stream)
        yield replace_in_subclasses(BaseLLM, f"astream_{name}", models.wrap_stream_async)


class LlamaIndexModels(Tracker):
    """Makes the chat spans of calls that the openai client does not make."""

    def _call(self, model: Any, asked: tuple[Any, ...], options: dict[str, Any], *, streamed: bool) -> OtherCall | None:
        if not self.live or any(isinstance(scope.call, OtherCall) for scope in scopes_around()):
            return None

        def ask() -> dict[str, Json]:
            return request_body(model, asked, options)

        provider = model.class_name().removesuffix("_llm")
        return OtherCall(self.recorder, self.plugin, self.framework, ask, provider=provider, streamed=streamed)

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A model is asked."""
        if original.__module__.startswith(_BY_OPENAI):
            return original

        def ask(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._call(model, args, kwargs, streamed=False)
            if call is None:
                return original(model, *args, **kwargs)
            return call.called(lambda: original(model, *args, **kwargs), lambda answer: response_body(model, answer))

        return ask

    def wrap_async(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A model is asked, and its answer awaited."""
        if original.__module__.startswith(_BY_OPENAI):
            return original

        async def ask(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._call(model, args, kwargs, streamed=False)
            work = original(model, *args, **kwargs)
            return await (work if call is None else call.asked(work, lambda answer: response_body(model, answer)))

        return ask

    def wrap_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A model is asked, and its answer streamed: each piece has all that came before."""
        if original.__module__.startswith(_BY_OPENAI):
            return original

        def ask(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._call(model, args, kwargs, streamed=True)
            if call is None:
                return original(model, *args, **kwargs)
            try:
                with entered(scoped(call.scope)):
                    pieces = original(model, *args, **kwargs)
            except BaseException as error:
                call.end(error=error)
                raise
            return call.iterate(pieces, lambda answer: response_body(model, answer))

        return ask

    def wrap_stream_async(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The same, awaited."""
        if original.__module__.startswith(_BY_OPENAI):
            return original

        async def ask(model: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            call = self._call(model, args, kwargs, streamed=True)
            if call is None:
                pieces: AsyncGenerator[Any, None] = await original(model, *args, **kwargs)
                return pieces
            try:
                with entered(scoped(call.scope)):
                    pieces = await original(model, *args, **kwargs)
            except BaseException as error:
                call.end(error=error)
                raise
            return call.steps(pieces, lambda answer: response_body(model, answer))

        return ask


def request_body(model: Any, asked: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Json]:
    """Return what was asked as the body of a chat completion."""
    given = asked[0] if asked else options.get("messages", options.get("prompt", ""))
    turns = [{"role": "user", "content": given}] if isinstance(given, str) else [_turn(message) for message in given]
    tools = options.get("tools")
    known = {"tools": tools} if isinstance(tools, list) and tools else {}
    return {"model": model.metadata.model_name, "messages": turns, **known}


def response_body(model: Any, answer: Any) -> dict[str, Json]:
    """Return what was answered as a chat completion."""
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
