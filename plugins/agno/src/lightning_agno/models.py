"""Chat spans for models that do not use openai's or LiteLLM's client (Anthropic, Gemini, Bedrock).

Each call opens a scope. If a client creates a chat span within it, this module creates none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from agno.models.base import Model

from lightning_agno import FRAMEWORK
from lightning_openai.model_tracker import ModelTracker
from lightning_openai.other_clients import OtherCall
from lightning_spans.record.instrument.patches import replace_in_subclasses

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.spans import Json

_PARAMETERS: Final = ("messages", "assistant_message", "response_format", "tools", "tool_choice")


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Agno to record every model call; what is yielded removes each patch."""
    models = AgnoModels(recorder, FRAMEWORK)
    yield models.stop
    yield replace_in_subclasses(Model, "invoke", models.wrap)
    yield replace_in_subclasses(Model, "ainvoke", models.wrap_async)
    yield replace_in_subclasses(Model, "invoke_stream", models.wrap_stream)
    yield replace_in_subclasses(Model, "ainvoke_stream", models.wrap_stream_async)


class AgnoModels(ModelTracker):
    """Reads requests and answers of Agno's models."""

    by_clients = ("agno.models.openai", "agno.models.litellm", "agno.models.base")

    def call_of(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, streamed: bool) -> OtherCall:
        """Return the call that starts with these arguments."""
        given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}

        def ask() -> dict[str, Json]:
            return request_body(model, given.get("messages") or (), given.get("tools"))

        provider = str(model.provider or "").lower() or None
        return OtherCall(self.recorder, self.plugin, self.framework, ask, provider=provider, streamed=streamed)

    def answer(self, model: Any, items: Sequence[Any]) -> Mapping[str, Json]:
        """Return what a model answered, whole or in parts, as a chat completion."""
        return response_body(model, items)


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
