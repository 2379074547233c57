"""Chat spans for models that do not use openai's or LiteLLM's client (Bedrock, Anthropic), one per call.

Each call opens a scope. If a client, or a nested model, creates a chat span within it, this module creates none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from strands.models.model import Model

from lightning_openai.json_text import to_json
from lightning_openai.model_tracker import ModelTracker
from lightning_openai.other_clients import OtherCall
from lightning_spans.record.instrument.patches import replace_in_subclasses
from lightning_strands import FRAMEWORK

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.spans import Json

_PARAMETERS: Final = ("messages", "tool_specs", "system_prompt")
_FINISH: Final = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Strands to record every model call; what is yielded removes each patch."""
    models = StrandsModels(recorder, FRAMEWORK)
    yield models.stop
    yield replace_in_subclasses(Model, "stream", models.wrap_stream_async)


class StrandsModels(ModelTracker):
    """Reads requests and answers of Strands' models. Every model streams its answer."""

    by_clients = ("strands.models.openai", "strands.models._openai", "strands.models.litellm")

    def call_of(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, streamed: bool) -> OtherCall:
        """Return the call that starts with these arguments."""
        given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}

        def ask() -> dict[str, Json]:
            messages = given.get("messages") or ()
            return request_body(model, messages, given.get("tool_specs"), given.get("system_prompt"))

        return OtherCall(self.recorder, self.plugin, self.framework, ask, streamed=streamed)

    def answer(self, model: Any, items: Sequence[Any]) -> Mapping[str, Json]:
        """Return what a model answered, in events, as a chat completion."""
        return response_body(model, items)


def request_body(model: Any, messages: Sequence[Any], tools: Any, system: Any) -> dict[str, Json]:
    """Return the request as the body of a chat completion."""
    turns: list[dict[str, Json]] = [{"role": "system", "content": system}] if system else []
    turns += [turn for message in messages for turn in _turns(message)]
    declared = [
        {
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool.get("description"),
                "parameters": tool.get("inputSchema", {}).get("json"),
            },
        }
        for tool in tools or ()
    ]
    body: dict[str, Json] = {"model": _name(model), "messages": turns}
    return {**body, "tools": declared} if declared else body


def response_body(model: Any, events: Sequence[Any]) -> dict[str, Json]:
    """Return the answer, collected from its events, as a chat completion."""
    text, reason = "", None
    usage: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for event in events:
        if begun := event.get("contentBlockStart", {}).get("start", {}).get("toolUse"):
            function = {"name": begun["name"], "arguments": ""}
            calls.append({"id": begun.get("toolUseId"), "type": "function", "function": function})
        delta = event.get("contentBlockDelta", {}).get("delta", {})
        text += delta.get("text", "")
        if "toolUse" in delta and calls:
            calls[-1]["function"]["arguments"] += delta["toolUse"].get("input", "")
        reason = event.get("messageStop", {}).get("stopReason", reason)
        usage = event.get("metadata", {}).get("usage", usage)
    turn: dict[str, Json] = {"role": "assistant", "content": text or None}
    message = {**turn, "tool_calls": calls} if calls else turn
    return {
        "object": "chat.completion",
        "model": _name(model),
        "choices": [{"index": 0, "message": message, "finish_reason": _FINISH.get(str(reason), reason)}],
        "usage": {"prompt_tokens": usage.get("inputTokens"), "completion_tokens": usage.get("outputTokens")},
    }


def _name(model: Any) -> str:
    config = model.get_config()
    known = config.get("model_id") if isinstance(config, Mapping) else None
    return str(known or type(model).__name__)


def _turns(message: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    parts = message["content"]
    for part in parts:
        if result := part.get("toolResult"):
            text = "".join(str(one.get("text", to_json(one))) for one in result.get("content", ()))
            yield {"role": "tool", "tool_call_id": result.get("toolUseId"), "content": text}
    text = "".join(part["text"] for part in parts if "text" in part)
    calls = [
        {
            "id": part["toolUse"].get("toolUseId"),
            "type": "function",
            "function": {"name": part["toolUse"]["name"], "arguments": json.dumps(part["toolUse"].get("input"))},
        }
        for part in parts
        if "toolUse" in part
    ]
    if text or calls:
        turn: dict[str, Json] = {"role": message["role"], "content": text or None}
        yield {**turn, "tool_calls": calls} if calls else turn
