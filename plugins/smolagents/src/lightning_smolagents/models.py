"""Chat spans for models that do not use openai's or LiteLLM's client, one per call.

These are Hugging Face's inference client, Bedrock, and models that run in this process. Each call opens a scope. If a
client creates a chat span within it, this module creates none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from smolagents.models import ChatMessage, Model, agglomerate_stream_deltas, get_tool_json_schema

from lightning_openai.model_tracker import ModelTracker
from lightning_openai.other_clients import OtherCall
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

    def is_by_client(self, original: Callable[..., Any]) -> bool:
        """Whether a model's method always uses a patched client."""
        return original.__module__ == Model.__module__ and original.__qualname__.split(".")[0] in _BY_CLIENTS

    def call_of(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, streamed: bool) -> OtherCall:
        """Return the call that starts with these arguments."""
        messages = args[0] if args else kwargs["messages"]

        def ask() -> dict[str, Json]:
            return request_body(model, messages, kwargs.get("tools_to_call_from"))

        return OtherCall(self.recorder, self.plugin, self.framework, ask, streamed=streamed)

    def answer(self, model: Any, items: Sequence[Any]) -> Mapping[str, Json]:
        """Return what a model answered, whole or in parts, as a chat completion."""
        whole = items[0] if isinstance(items[0], ChatMessage) else agglomerate_stream_deltas(list(items))
        return response_body(model, whole)


def request_body(model: Any, messages: Sequence[Any], tools: Any) -> dict[str, Json]:
    """Return the request as the body of a chat completion."""
    body: dict[str, Json] = {"model": _name(model), "messages": [_turn(message) for message in messages]}
    return {**body, "tools": [get_tool_json_schema(tool) for tool in tools]} if tools else body


def response_body(model: Any, answer: Any) -> dict[str, Json]:
    """Return the answer as a chat completion."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.function.name, "arguments": call.function.arguments},
        }
        for call in answer.tool_calls or ()
    ]
    turn: dict[str, Json] = {"role": "assistant", "content": answer.content}
    usage = answer.token_usage
    return {
        "object": "chat.completion",
        "model": _name(model),
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


def _name(model: Any) -> str:
    return str(getattr(model, "model_id", None) or type(model).__name__)


def _turn(message: Any) -> dict[str, Json]:
    known = message if isinstance(message, dict) else {"role": message.role, "content": message.content}
    content, role = known["content"], known["role"]
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    role = str(getattr(role, "value", role))
    return {"role": {"tool-call": "assistant", "tool-response": "user"}.get(role, role), "content": content}
