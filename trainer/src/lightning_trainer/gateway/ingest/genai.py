"""Chat spans of the OTel GenAI conventions: builds request and response from messages, and updates old names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from lightning_spans.schema import spans as names
from lightning_spans.schema.json import dumps, read_json
from lightning_spans.schema.spans import Json, Span
from lightning_trainer.gateway.http.weight import too_heavy

_SMALL: Final = 4096  # characters; so few cannot become anything large
_MOST_BYTES: Final = 32 << 20  # of memory, for an attribute that is JSON
_INPUT: Final = "gen_ai.input.messages"
_OUTPUT: Final = "gen_ai.output.messages"
_SYSTEM: Final = "gen_ai.system_instructions"
_TOOLS: Final = "gen_ai.tool.definitions"
_OLD: Final = {  # names before version 1.37 of the conventions
    "gen_ai.system": names.PROVIDER,
    "gen_ai.usage.prompt_tokens": names.INPUT_TOKENS,
    "gen_ai.usage.completion_tokens": names.OUTPUT_TOKENS,
}
_CALLS: Final = frozenset({"chat", "generate_content", "text_completion"})  # the conventions' name for a model call
_PARAMETERS: Final = {
    names.REQUEST_MODEL: "model",
    names.REQUEST_TEMPERATURE: "temperature",
    names.REQUEST_TOP_P: "top_p",
    names.REQUEST_MAX_TOKENS: "max_tokens",
    names.REQUEST_CHOICE_COUNT: "n",
}


def complete_span(span: Span) -> Span:
    """Return a span with our attributes, filled from its messages if it lacks them."""
    given = span.attributes
    added = {ours: given[old] for old, ours in _OLD.items() if old in given and ours not in given}
    operation = names.CHAT if span.operation in _CALLS else span.operation
    if operation == names.CHAT and names.REQUEST not in given and _INPUT in given:
        added[names.REQUEST] = dumps(_request(given)).decode()
    if operation == names.CHAT and names.RESPONSE not in given and _OUTPUT in given:
        added[names.RESPONSE] = dumps(_response(given)).decode()
    if not added and operation == span.operation:
        return span
    return replace(span, operation=operation, attributes={**given, **added})


def parse_if_json(value: Json) -> Json:
    """Parse text that may be JSON. Other text, and text that would take too much memory, is returned as it is."""
    if not isinstance(value, str) or (len(value) > _SMALL and too_heavy(value.encode(errors="replace"), _MOST_BYTES)):
        return value
    try:
        return read_json(value)
    except ValueError:
        return value


def tool_call(call_id: Json, name: Json, arguments: Json) -> dict[str, Json]:
    """Return a tool call in OpenAI's format."""
    text = arguments if isinstance(arguments, str) else dumps(arguments).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _objects(value: Json) -> list[dict[str, Any]]:
    data = parse_if_json(value)
    return [one for one in data if isinstance(one, dict)] if isinstance(data, list) else []


def _request(given: Mapping[str, Json]) -> dict[str, Json]:
    request = {theirs: given[name] for name, theirs in _PARAMETERS.items() if name in given}
    system = _texts(_objects(given.get(_SYSTEM)))
    messages: list[dict[str, Json]] = [{"role": "system", "content": system}] if system is not None else []
    for one in _objects(given[_INPUT]):
        messages.extend(_messages(one))
    request["messages"] = messages
    if tools := _objects(given.get(_TOOLS)):
        request["tools"] = [_tool(tool) for tool in tools]
    return request


def _tool(tool: dict[str, Any]) -> dict[str, Json]:
    if "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _response(given: Mapping[str, Json]) -> dict[str, Json]:
    choices = [
        {"index": at, "message": _answer(one), "finish_reason": one.get("finish_reason")}
        for at, one in enumerate(_objects(given[_OUTPUT]))
    ]
    return {"id": given.get(names.RESPONSE_ID), "model": given.get(names.RESPONSE_MODEL), "choices": choices}


def _answer(one: Mapping[str, Json]) -> dict[str, Json]:
    """Return an answer as one message. Results of tools that ran at the provider are left out."""
    parts = [part for part in _objects(one.get("parts")) if not _is_result(part)]
    return _message(one.get("role", "assistant"), parts)


def _messages(one: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    """Yield a message's content in OpenAI's format, in the order of its parts.

    Each tool result is a separate message.
    """
    role, parts = one.get("role", "assistant"), _objects(one.get("parts"))
    if not any(_is_result(part) for part in parts):
        yield _message(role, parts)
        return
    for is_result, run in groupby(parts, _is_result):
        if is_result:
            yield from (_result(part) for part in run)
            continue
        said = _message("user" if role == "tool" else role, list(run))
        if said["content"] is not None or "tool_calls" in said:
            yield said


def _is_result(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "tool_call_response"


def _result(part: Mapping[str, Any]) -> dict[str, Json]:
    return {"role": "tool", "tool_call_id": part.get("id"), "content": _text(part.get("response", part.get("result")))}


def _message(role: Json, parts: list[dict[str, Any]]) -> dict[str, Json]:
    message: dict[str, Json] = {"role": role, "content": _texts(parts)}
    calls = [part for part in parts if part.get("type") == "tool_call"]
    if calls:
        message["tool_calls"] = [tool_call(call.get("id"), call.get("name"), call.get("arguments")) for call in calls]
    return message


def _texts(parts: list[dict[str, Any]]) -> str | None:
    texts = [str(part.get("content", "")) for part in parts if part.get("type") == "text"]
    return "\n".join(texts) if texts else None


def _text(value: Json) -> str:
    return value if isinstance(value, str) else dumps(value).decode()
