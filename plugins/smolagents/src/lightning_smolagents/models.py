"""Chat spans for models that do not use openai's or LiteLLM's client, one per call.

These are Hugging Face's inference client, Bedrock, and models that run in this process. Each call opens a scope. If a
client creates a chat span within it, this module creates none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from smolagents.models import ChatMessage, Model, agglomerate_stream_deltas, get_tool_json_schema

from lightning_openai.completion import (
    assistant_message,
    chat_completion,
    chat_request,
    finish_reason,
    token_usage,
    tool_call,
)
from lightning_openai.model_tracker import ModelTracker
from lightning_smolagents import FRAMEWORK
from lightning_spans.record.instrument.patches import replace_in_subclasses

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.spans import Json

_BY_CLIENTS: Final = frozenset({"OpenAIModel", "OpenAIServerModel", "LiteLLMModel", "Model"})


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch smolagents to record every model call; what is yielded removes each patch."""
    models = SmolModels(recorder, FRAMEWORK)
    yield models.stop
    yield replace_in_subclasses(Model, "generate", models.wrap)
    yield replace_in_subclasses(Model, "generate_stream", models.wrap_stream)


class SmolModels(ModelTracker):
    """Reads requests and answers of smolagents' models."""

    parameters = ("messages",)

    def is_by_client(self, original: Callable[..., Any]) -> bool:
        """Whether a model's method always uses a patched client."""
        return original.__module__ == Model.__module__ and original.__qualname__.split(".")[0] in _BY_CLIENTS

    def request(self, model: Any, given: Mapping[str, Any]) -> dict[str, Json]:
        """Return what a model is asked as the body of a chat completion."""
        tools = [get_tool_json_schema(tool) for tool in given.get("tools_to_call_from") or ()]
        return chat_request(_name(model), map(_turn, given["messages"]), tools)

    def answer(self, model: Any, items: Sequence[Any]) -> dict[str, Json]:
        """Return what a model answered, whole or in parts, as a chat completion."""
        whole = items[0] if isinstance(items[0], ChatMessage) else agglomerate_stream_deltas(list(items))
        calls = [tool_call(call.id, call.function.name, call.function.arguments) for call in whole.tool_calls or ()]
        message = assistant_message(whole.content, calls)
        usage = whole.token_usage
        tokens = token_usage(getattr(usage, "input_tokens", None), getattr(usage, "output_tokens", None))
        return chat_completion((message, finish_reason(message)), model=_name(model), usage=tokens)


def _name(model: Any) -> str:
    return str(getattr(model, "model_id", None) or type(model).__name__)


def _turn(message: Any) -> dict[str, Json]:
    known = message if isinstance(message, dict) else {"role": message.role, "content": message.content}
    content, role = known["content"], known["role"]
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    role = str(getattr(role, "value", role))
    return {"role": {"tool-call": "assistant", "tool-response": "user"}.get(role, role), "content": content}
