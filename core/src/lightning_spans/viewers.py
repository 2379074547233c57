"""Spans as viewers know them: OpenInference's attributes beside ours, for Phoenix and others that read those.

They are added on the way out to a collector of the user's own; what our own store keeps has them not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from openinference.semconv.trace import (
    MessageAttributes,
    OpenInferenceMimeTypeValues,
    OpenInferenceSpanKindValues,
    SpanAttributes,
    ToolAttributes,
    ToolCallAttributes,
)

from lightning_spans import spans as names
from lightning_spans.answers import read_answer
from lightning_spans.records import dumps, loads
from lightning_spans.spans import Json, Span

_KINDS: Final = {
    names.CHAT: OpenInferenceSpanKindValues.LLM,
    names.EXECUTE_TOOL: OpenInferenceSpanKindValues.TOOL,
    names.INVOKE_AGENT: OpenInferenceSpanKindValues.AGENT,
}
_SAME: Final = {
    names.PROVIDER: SpanAttributes.LLM_PROVIDER,
    names.REQUEST_MODEL: SpanAttributes.LLM_MODEL_NAME,
    names.INPUT_TOKENS: SpanAttributes.LLM_TOKEN_COUNT_PROMPT,
    names.OUTPUT_TOKENS: SpanAttributes.LLM_TOKEN_COUNT_COMPLETION,
    names.CONVERSATION_ID: SpanAttributes.SESSION_ID,
    names.TOOL_NAME: SpanAttributes.TOOL_NAME,
    names.TOOL_CALL_ID: SpanAttributes.TOOL_ID,
}
_INPUT: Final = {names.CHAT: names.REQUEST, names.EXECUTE_TOOL: names.TOOL_ARGUMENTS}
_OUTPUT: Final = {names.CHAT: names.RESPONSE, names.EXECUTE_TOOL: names.TOOL_RESULT}
# Not among the parameters.
_SPELLED_OUT: Final = frozenset({"messages", "input", "prompt", "instructions", "tools", "model"})


def shown(span: Span) -> Span:
    """Give a span with what viewers read."""
    given = span.attributes
    kind = _KINDS.get(span.operation, OpenInferenceSpanKindValues.CHAIN)
    added: dict[str, Json] = {SpanAttributes.OPENINFERENCE_SPAN_KIND: kind.value}
    added |= {theirs: given[ours] for ours, theirs in _SAME.items() if ours in given}
    if span.agent is not None:
        added[SpanAttributes.AGENT_NAME] = span.agent
    if span.operation == names.INVOKE_AGENT:
        added[SpanAttributes.GRAPH_NODE_ID] = span.agent or span.name
    added |= _value(given.get(_INPUT.get(span.operation, "")), SpanAttributes.INPUT_VALUE)
    added |= _value(given.get(_OUTPUT.get(span.operation, "")), SpanAttributes.OUTPUT_VALUE)
    if span.operation == names.CHAT:
        added |= dict(_asked(given.get(names.REQUEST)))
        answers = [choice.message for choice in read_answer(given.get(names.RESPONSE)).choices]
        added |= dict(_messages(SpanAttributes.LLM_OUTPUT_MESSAGES, answers))
    return replace(span, attributes={**given, **added})


def _value(text: Json, name: str) -> dict[str, Json]:
    if not isinstance(text, str):
        return {}
    structured = _parsed(text) is not None
    kind = OpenInferenceMimeTypeValues.JSON if structured else OpenInferenceMimeTypeValues.TEXT
    return {name: text, name.replace(".value", ".mime_type"): kind.value}


def _asked(text: Json) -> Iterator[tuple[str, Json]]:
    body = _parsed(text)
    if not isinstance(body, dict):
        return
    parameters = {name: value for name, value in body.items() if name not in _SPELLED_OUT}
    yield SpanAttributes.LLM_INVOCATION_PARAMETERS, dumps(parameters).decode()
    given = body.get("messages", body.get("input", body.get("prompt")))
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    if isinstance(body.get("instructions"), str):
        messages = [{"role": "system", "content": body["instructions"]}, *messages]
    yield from _messages(SpanAttributes.LLM_INPUT_MESSAGES, messages)
    for at, tool in enumerate(body.get("tools") or ()):
        yield f"{SpanAttributes.LLM_TOOLS}.{at}.{ToolAttributes.TOOL_JSON_SCHEMA}", dumps(tool).decode()


def _messages(prefix: str, messages: Sequence[Any]) -> Iterator[tuple[str, Json]]:
    """Spell messages out as ``prefix.0.message.role`` and so on, as OTel's attributes hold no objects."""
    for at, message in enumerate(message for message in messages if isinstance(message, Mapping)):
        start = f"{prefix}.{at}"
        yield f"{start}.{MessageAttributes.MESSAGE_ROLE}", str(message.get("role") or message.get("type") or "")
        content = message.get("content", message.get("output"))
        if content is not None:
            text = content if isinstance(content, str) else dumps(content).decode()
            yield f"{start}.{MessageAttributes.MESSAGE_CONTENT}", text
        if message.get("tool_call_id"):
            yield f"{start}.{MessageAttributes.MESSAGE_TOOL_CALL_ID}", message["tool_call_id"]
        for number, call in enumerate(message.get("tool_calls") or ()):
            place = f"{start}.{MessageAttributes.MESSAGE_TOOL_CALLS}.{number}"
            function = call.get("function") or {}
            yield f"{place}.{ToolCallAttributes.TOOL_CALL_ID}", call.get("id")
            yield f"{place}.{ToolCallAttributes.TOOL_CALL_FUNCTION_NAME}", function.get("name")
            yield f"{place}.{ToolCallAttributes.TOOL_CALL_FUNCTION_ARGUMENTS_JSON}", function.get("arguments")


def _parsed(text: Json) -> Json:
    try:
        return loads(text) if isinstance(text, str) else None
    except ValueError:
        return None
