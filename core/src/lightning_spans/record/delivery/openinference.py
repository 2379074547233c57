"""Spans as viewers know them: OpenInference's attributes in addition to ours, for Phoenix and others that read them.

They are added when spans are sent to span processors and to the user's own collector; our own store does not keep them.
OpenInference's own builders write them. Imported when the first span is sent that way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, cast

from openinference.instrumentation import (
    Message,
    TokenCount,
    Tool,
    get_input_attributes,
    get_llm_attributes,
    get_output_attributes,
    get_session_attributes,
    get_span_kind_attributes,
)
from openinference.semconv.trace import OpenInferenceMimeTypeValues, OpenInferenceSpanKindValues, SpanAttributes

from lightning_spans.chat.body import messages_of
from lightning_spans.chat.response import read_answer
from lightning_spans.schema import spans as names
from lightning_spans.schema.json import dumps, read_json
from lightning_spans.schema.spans import Json, Span

_KINDS: Final = {
    names.CHAT: OpenInferenceSpanKindValues.LLM,
    names.EXECUTE_TOOL: OpenInferenceSpanKindValues.TOOL,
    names.INVOKE_AGENT: OpenInferenceSpanKindValues.AGENT,
}
_TOOL: Final = {names.TOOL_NAME: SpanAttributes.TOOL_NAME, names.TOOL_CALL_ID: SpanAttributes.TOOL_ID}
_INPUT: Final = {names.CHAT: names.REQUEST, names.EXECUTE_TOOL: names.TOOL_ARGUMENTS}
_OUTPUT: Final = {names.CHAT: names.RESPONSE, names.EXECUTE_TOOL: names.TOOL_RESULT}
# Not part of the parameters.
_SPELLED_OUT: Final = frozenset({"messages", "input", "prompt", "instructions", "tools", "model"})


def add_viewer_attributes(span: Span) -> Span:
    """Return a span with the attributes that viewers read."""
    given = span.attributes
    added: dict[str, Json] = {**get_span_kind_attributes(_KINDS.get(span.operation, OpenInferenceSpanKindValues.CHAIN))}
    added |= {theirs: given[ours] for ours, theirs in _TOOL.items() if ours in given}
    if span.agent is not None:
        added[SpanAttributes.AGENT_NAME] = span.agent
    if span.operation == names.INVOKE_AGENT:
        added[SpanAttributes.GRAPH_NODE_ID] = span.agent or span.name
    if names.CONVERSATION_ID in given:
        added |= get_session_attributes(session_id=given[names.CONVERSATION_ID])
    went_in, came_out = given.get(_INPUT.get(span.operation, "")), given.get(_OUTPUT.get(span.operation, ""))
    if isinstance(went_in, str):
        added |= get_input_attributes(went_in, mime_type=_kind(went_in))
    if isinstance(came_out, str):
        added |= get_output_attributes(came_out, mime_type=_kind(came_out))
    if span.operation == names.CHAT:
        added |= _model_call(given)
    return replace(span, attributes={**given, **added})


def _kind(text: str) -> OpenInferenceMimeTypeValues:
    return OpenInferenceMimeTypeValues.TEXT if _parse_text(text) is None else OpenInferenceMimeTypeValues.JSON


def _model_call(given: Mapping[str, Json]) -> Mapping[str, Json]:
    body, answer = _parse_text(given.get(names.REQUEST)), read_answer(given.get(names.RESPONSE))
    asked: Mapping[str, Any] = body if isinstance(body, dict) else {}
    counts = {"prompt": given.get(names.INPUT_TOKENS), "completion": given.get(names.OUTPUT_TOKENS)}
    return get_llm_attributes(
        provider=given.get(names.PROVIDER),
        model_name=given.get(names.REQUEST_MODEL),
        invocation_parameters=_parameters(asked) if asked else None,
        input_messages=list(_messages(messages_of(asked) or ())),
        output_messages=list(_messages(choice.message for choice in answer.choices)),
        token_count=cast(TokenCount, counts),
        tools=[Tool(json_schema=dumps(tool).decode()) for tool in asked.get("tools") or ()],
    )


def _parameters(body: Mapping[str, Any]) -> str:
    return dumps({name: value for name, value in body.items() if name not in _SPELLED_OUT}).decode()


def _messages(given: Iterable[Any]) -> Iterator[Message]:
    for message in given:
        if not isinstance(message, Mapping):
            continue
        made = Message(role=str(message.get("role") or message.get("type") or ""))
        content = message.get("content", message.get("output"))
        if content is not None:
            made["content"] = content if isinstance(content, str) else dumps(content).decode()
        if message.get("tool_call_id"):
            made["tool_call_id"] = message["tool_call_id"]
        if message.get("tool_calls"):
            made["tool_calls"] = message["tool_calls"]  # of the same shape
        yield made


def _parse_text(text: Json) -> Json:
    try:
        return read_json(text) if isinstance(text, str) else None
    except ValueError:
        return None
