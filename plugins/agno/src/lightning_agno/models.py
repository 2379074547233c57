"""Chat spans for models that do not use openai's or LiteLLM's client (Anthropic, Gemini, Bedrock).

Each call opens a scope. If a client creates a chat span within it, this module creates none.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from agno.models.base import Model

from lightning_agno import FRAMEWORK
from lightning_openai.other_clients import OtherCall
from lightning_spans.record.instrument.patches import replace_in_subclasses
from lightning_spans.record.instrument.tracker import Tracker

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.spans import Json

_BY_CLIENTS: Final = ("agno.models.openai", "agno.models.litellm", "agno.models.base")


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Agno to record every model call; what is yielded removes each patch."""
    models = AgnoModels(recorder, FRAMEWORK)
    yield models.stop
    yield replace_in_subclasses(Model, "invoke", models.wrap)
    yield replace_in_subclasses(Model, "ainvoke", models.wrap_async)
    yield replace_in_subclasses(Model, "invoke_stream", models.wrap_stream)
    yield replace_in_subclasses(Model, "ainvoke_stream", models.wrap_stream_async)


class AgnoModels(Tracker):
    """Creates the chat spans of calls for which no client creates one."""

    def _call(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, streamed: bool) -> OtherCall | None:
        if not self.live:
            return None
        given = dict(zip(_PARAMETERS, args, strict=False)) | kwargs

        def ask() -> dict[str, Json]:
            return request_body(model, given.get("messages") or (), given.get("tools"))

        provider = str(model.provider or "").lower() or None
        return OtherCall(self.recorder, self.plugin, self.framework, ask, provider=provider, streamed=streamed)

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a synchronous call."""
        if original.__module__.startswith(_BY_CLIENTS):
            return original

        def invoke(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._call(model, args, kwargs, streamed=False)
            if call is None:
                return original(model, *args, **kwargs)
            return call.called(lambda: original(model, *args, **kwargs), lambda answer: response_body(model, [answer]))

        return invoke

    def wrap_async(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an asynchronous call."""
        if original.__module__.startswith(_BY_CLIENTS):
            return original

        async def ainvoke(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._call(model, args, kwargs, streamed=False)
            work = original(model, *args, **kwargs)
            return await (work if call is None else call.asked(work, lambda answer: response_body(model, [answer])))

        return ainvoke

    def wrap_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a synchronous call with a streamed answer."""
        if original.__module__.startswith(_BY_CLIENTS):
            return original

        def invoke(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._call(model, args, kwargs, streamed=True)
            pieces = original(model, *args, **kwargs)
            if call is None or not isinstance(pieces, Generator):
                return pieces
            seen: list[Any] = []
            return call.iterate(_kept(pieces, seen), lambda _: response_body(model, seen))

        return invoke

    def wrap_stream_async(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an asynchronous call with a streamed answer."""
        if original.__module__.startswith(_BY_CLIENTS):
            return original

        def ainvoke(model: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._call(model, args, kwargs, streamed=True)
            pieces = original(model, *args, **kwargs)
            if call is None or not isinstance(pieces, AsyncGenerator):
                return pieces
            seen: list[Any] = []
            return call.steps(_akept(pieces, seen), lambda _: response_body(model, seen))

        return ainvoke


_PARAMETERS: Final = ("messages", "assistant_message", "response_format", "tools", "tool_choice")


def _kept(pieces: Generator[Any, None, None], seen: list[Any]) -> Generator[Any, None, None]:
    try:
        for piece in pieces:
            seen.append(piece)
            yield piece
    finally:
        pieces.close()


async def _akept(pieces: AsyncGenerator[Any, None], seen: list[Any]) -> AsyncGenerator[Any, None]:
    try:
        async for piece in pieces:
            seen.append(piece)
            yield piece
    finally:
        await pieces.aclose()


def request_body(model: Any, messages: Sequence[Any], tools: Any) -> dict[str, Json]:
    """Return the request as the body of a chat completion."""
    body: dict[str, Json] = {"model": model.id, "messages": [_turn(message) for message in messages]}
    return {**body, "tools": list(tools)} if tools else body


def response_body(model: Any, pieces: Sequence[Any]) -> dict[str, Json]:
    """Return the answer, collected from its parts, as a chat completion."""
    text = "".join(piece.content for piece in pieces if isinstance(piece.content, str))
    parts = [part for piece in pieces for part in piece.tool_calls or ()]
    calls = model.parse_tool_calls(parts) if parts and not isinstance(parts[0], dict) else parts
    turn: dict[str, Json] = {"role": "assistant", "content": text or None}
    usage = next((piece.response_usage for piece in reversed(pieces) if piece.response_usage is not None), None)
    return {
        "object": "chat.completion",
        "model": model.id,
        "choices": [
            {
                "index": 0,
                "message": {**turn, "tool_calls": calls} if calls else turn,
                "finish_reason": "tool_calls" if calls else "stop",
            }
        ],
        "usage": {
            "prompt_tokens": getattr(usage, "input_tokens", None),
            "completion_tokens": getattr(usage, "output_tokens", None),
        },
    }


def _turn(message: Any) -> dict[str, Json]:
    turn: dict[str, Json] = {"role": message.role, "content": message.content}
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return {**turn, "tool_calls": message.tool_calls} if message.tool_calls else turn
