"""Chat spans for models that do not use openai's or LiteLLM's client (Anthropic, Gemini, Bedrock).

Each call opens a scope. If a client creates a chat span within it, this module creates none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agno.models.base import Model

from lightning_agno import FRAMEWORK
from lightning_openai.completion import assistant_message, chat_completion, chat_request, finish_reason, token_usage
from lightning_openai.model_tracker import ModelTracker
from lightning_spans.record.instrument.patches import replace_in_subclasses

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.spans import Json


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

    parameters = ("messages", "assistant_message", "response_format", "tools", "tool_choice")
    by_clients = ("agno.models.openai", "agno.models.litellm", "agno.models.base")

    def request(self, model: Any, given: Mapping[str, Any]) -> dict[str, Json]:
        """Return what a model is asked as the body of a chat completion."""
        return chat_request(model.id, map(_turn, given.get("messages") or ()), given.get("tools") or ())

    def provider(self, model: Any) -> str | None:
        """Return the name of the model's provider."""
        return str(model.provider or "").lower() or None

    def answer(self, model: Any, items: Sequence[Any]) -> dict[str, Json]:
        """Return what a model answered, whole or in parts, as a chat completion."""
        text = "".join(piece.content for piece in items if isinstance(piece.content, str))
        parts = [part for piece in items for part in piece.tool_calls or ()]
        calls = model.parse_tool_calls(parts) if parts and not isinstance(parts[0], dict) else parts
        message = assistant_message(text or None, calls)
        usage = next((piece.response_usage for piece in reversed(items) if piece.response_usage is not None), None)
        tokens = token_usage(getattr(usage, "input_tokens", None), getattr(usage, "output_tokens", None))
        return chat_completion((message, finish_reason(message)), model=model.id, usage=tokens)


def _turn(message: Any) -> dict[str, Json]:
    turn: dict[str, Json] = {"role": message.role, "content": message.content}
    if message.tool_call_id:
        turn["tool_call_id"] = message.tool_call_id
    return {**turn, "tool_calls": message.tool_calls} if message.tool_calls else turn
