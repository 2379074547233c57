"""Chat spans for models that do not use openai's or LiteLLM's client (Bedrock, Anthropic), one per call.

Each call opens a scope. If a client, or a nested model, creates a chat span within it, this module creates none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from strands.models.model import Model

from lightning_openai.completion import (
    assistant_message,
    chat_completion,
    chat_request,
    function_tool,
    token_usage,
    tool_call,
    tool_message,
)
from lightning_openai.json_text import to_json
from lightning_openai.model_tracker import ModelTracker
from lightning_spans.record.instrument.patches import replace_in_subclasses
from lightning_strands import FRAMEWORK

if TYPE_CHECKING:
    from lightning_spans.hooks import Recorder
    from lightning_spans.schema.spans import Json

_FINISH: Final = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


def bind(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Patch Strands to record every model call; what is yielded removes each patch."""
    models = StrandsModels(recorder, FRAMEWORK)
    yield models.stop
    yield replace_in_subclasses(Model, "stream", models.wrap_stream_async)


class StrandsModels(ModelTracker):
    """Reads requests and answers of Strands' models. Every model streams its answer."""

    parameters = ("messages", "tool_specs", "system_prompt")
    by_clients = ("strands.models.openai", "strands.models._openai", "strands.models.litellm")

    def request(self, model: Any, given: Mapping[str, Any]) -> dict[str, Json]:
        """Return what a model is asked as the body of a chat completion."""
        system = given.get("system_prompt")
        turns: list[dict[str, Json]] = [{"role": "system", "content": system}] if system else []
        turns += [turn for message in given.get("messages") or () for turn in _turns(message)]
        tools = [
            function_tool(tool["name"], tool.get("description"), tool.get("inputSchema", {}).get("json"))
            for tool in given.get("tool_specs") or ()
        ]
        return chat_request(_name(model), turns, tools)

    def answer(self, model: Any, items: Sequence[Any]) -> dict[str, Json]:
        """Return what a model answered, in events, as a chat completion."""
        return response_body(model, items)


def response_body(model: Any, events: Sequence[Any]) -> dict[str, Json]:
    """Return the answer, collected from its events, as a chat completion."""
    text, reason = "", None
    usage: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for event in events:
        if begun := event.get("contentBlockStart", {}).get("start", {}).get("toolUse"):
            calls.append(tool_call(begun.get("toolUseId"), begun["name"], ""))
        delta = event.get("contentBlockDelta", {}).get("delta", {})
        text += delta.get("text", "")
        if "toolUse" in delta and calls:
            calls[-1]["function"]["arguments"] += delta["toolUse"].get("input", "")
        reason = event.get("messageStop", {}).get("stopReason", reason)
        usage = event.get("metadata", {}).get("usage", usage)
    message = assistant_message(text or None, calls)
    tokens = token_usage(usage.get("inputTokens"), usage.get("outputTokens"))
    return chat_completion((message, _FINISH.get(str(reason), reason)), model=_name(model), usage=tokens)


def _name(model: Any) -> str:
    config = model.get_config()
    known = config.get("model_id") if isinstance(config, Mapping) else None
    return str(known or type(model).__name__)


def _turns(message: Mapping[str, Any]) -> Iterator[dict[str, Json]]:
    parts = message["content"]
    for part in parts:
        if result := part.get("toolResult"):
            text = "".join(str(one.get("text", to_json(one))) for one in result.get("content", ()))
            yield tool_message(result.get("toolUseId"), text)
    text = "".join(part["text"] for part in parts if "text" in part)
    calls = [
        tool_call(use.get("toolUseId"), use["name"], json.dumps(use.get("input")))
        for use in (part["toolUse"] for part in parts if "toolUse" in part)
    ]
    if text or calls:
        yield {**assistant_message(text or None, calls), "role": message["role"]}
