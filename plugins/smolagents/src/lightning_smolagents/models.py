"""Chat spans for models that do not use openai's or LiteLLM's client, one per call.

These are Hugging Face's inference client, Bedrock, and models that run in this process. Each call opens a scope. If a
client creates a chat span within it, this module creates none.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from smolagents.models import Model, agglomerate_stream_deltas, get_tool_json_schema

from lightning_openai.other_clients import OtherCall
from lightning_smolagents import FRAMEWORK
from lightning_spans.record.instrument.patches import replace_in_subclasses
from lightning_spans.record.instrument.tracker import Tracker

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


class SmolModels(Tracker):
    """Creates the chat spans of calls for which no client creates one."""

    def _call(self, model: Any, messages: Any, tools: Any, *, streamed: bool) -> OtherCall | None:
        if not self.live:
            return None

        def ask() -> dict[str, Json]:
            return request_body(model, messages, tools)

        return OtherCall(self.recorder, self.plugin, self.framework, ask, streamed=streamed)

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call."""
        if _is_by_client(original):
            return original

        def generate(model: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._call(model, messages, kwargs.get("tools_to_call_from"), streamed=False)
            if call is None:
                return original(model, messages, *args, **kwargs)
            return call.called(
                lambda: original(model, messages, *args, **kwargs), lambda answer: response_body(model, answer)
            )

        return generate

    def wrap_stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call with a streamed answer."""
        if _is_by_client(original):
            return original

        def generate(model: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
            call = self._call(model, messages, kwargs.get("tools_to_call_from"), streamed=True)
            pieces = original(model, messages, *args, **kwargs)
            if call is None or not isinstance(pieces, Generator):
                return pieces
            seen: list[Any] = []
            return call.iterate(_kept(pieces, seen), lambda _: response_body(model, agglomerate_stream_deltas(seen)))

        return generate


def _is_by_client(original: Callable[..., Any]) -> bool:
    return original.__module__ == Model.__module__ and original.__qualname__.split(".")[0] in _BY_CLIENTS


def _kept(pieces: Generator[Any, None, None], seen: list[Any]) -> Generator[Any, None, None]:
    try:
        for piece in pieces:
            seen.append(piece)
            yield piece
    finally:
        pieces.close()


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
