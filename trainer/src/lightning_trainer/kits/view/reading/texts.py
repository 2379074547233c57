"""Messages of any API as text, in one form, and cut to the length that a page shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from lightning_spans.adapter.nodes import Node
from lightning_spans.chat.body import ToolCall, messages_of, tool_calls
from lightning_spans.schema.json import loads
from lightning_spans.schema.spans import REQUEST, Json
from lightning_trainer.kits.view.answers.rollouts import MessageView, ToolUse

LIMIT: Final = 4000  # characters of a message that a page shows before it is opened
WHOLE: Final = 2_000_000
_EXACT: Final = 2**53  # largest integer up to which JavaScript is exact


def request_of(node: Node) -> Mapping[str, Json]:
    """Return the request of a model call as the program sent it, otherwise as the gateway recorded it."""
    text = node.span.attributes.get(REQUEST)
    if isinstance(text, str):
        try:
            body = loads(text)
        except ValueError:
            body = None
        if isinstance(body, dict):
            return body
    return node.call.request if node.call is not None else {}


def messages(node: Node) -> list[Json]:
    """Return the messages of a model call's prompt."""
    return messages_of(request_of(node)) or []


def legible(value: Json) -> Json:
    """Return a value in a form that a browser can show.

    Half a character, which HTTP answers cannot contain, becomes its escape. An integer beyond 53 bits, such as a seed,
    becomes text, because JavaScript would round it.
    """
    if isinstance(value, int) and abs(value) > _EXACT:
        return str(value)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode(errors="backslashreplace").decode()
        return value
    if isinstance(value, Mapping):
        return {legible(name): legible(inner) for name, inner in value.items()}
    return [legible(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def view_message(message: Json, limit: int = LIMIT) -> MessageView:
    """Return a message in the form of the pages."""
    message = legible(message)
    if not isinstance(message, Mapping):
        return MessageView(role="", **_cut(_text(message), limit))
    kind = message.get("type")
    if kind in ("function_call", "function_call_output", "reasoning") and "role" not in message:
        return _item(message, limit)
    calls = [ToolUse(name=each.name, arguments=_json_text(each.arguments)) for each in tool_calls(message)]
    text = "\n".join(_parts(message.get("content"))) if "output" not in message else "\n".join(_outputs(message))
    reasoning = message.get("reasoning_content") or message.get("reasoning") or _thinking(message)
    name = message.get("name") or message.get("tool_call_id")
    return MessageView(
        role=str(message.get("role") or ""),
        reasoning=reasoning[:limit] if isinstance(reasoning, str) else "",
        calls=calls,
        name=str(name) if name else None,
        **_cut(text, limit),
    )


def conversation(asked: Sequence[Json], limit: int = LIMIT) -> list[MessageView]:
    """Return the messages of a prompt. A tool's result gets the tool's name, because call ids differ each time."""
    tools: dict[str, str] = {}
    found: list[MessageView] = []
    for message in asked:
        read = view_message(message, limit)
        if isinstance(message, Mapping):
            tools.update((each.call_id, each.name) for each in _uses(message) if each.call_id)
            if not message.get("name"):
                read = replace(read, name=tools.get(read.name or "", read.name))
        found.append(read)
    return found


def _uses(message: Mapping[str, Json]) -> Iterator[ToolCall]:
    item = message.get("type") == "function_call" and "role" not in message
    return tool_calls({"output": [message]} if item else message)


def plain(role: str, value: Json, limit: int = LIMIT) -> MessageView:
    """Return a text that is not a message: a tool's arguments, a result."""
    return MessageView(role=role, **_cut(legible(_text(value)), limit))


def _item(item: Mapping[str, Json], limit: int) -> MessageView:
    if item.get("type") == "function_call":
        use = ToolUse(name=str(item.get("name") or ""), arguments=_json_text(item.get("arguments")))
        return MessageView(role="assistant", text="", calls=[use])
    if item.get("type") == "reasoning":
        return MessageView(role="assistant", text="", reasoning="\n".join(_parts(item.get("summary")))[:limit])
    return MessageView(
        role="tool", name=str(item.get("call_id") or "") or None, **_cut(_text(item.get("output")), limit)
    )


def _outputs(message: Mapping[str, Json]) -> Iterator[str]:
    for item in message.get("output") or []:
        if isinstance(item, Mapping) and item.get("type") == "message":
            yield from _parts(item.get("content"))


def _thinking(message: Mapping[str, Json]) -> str:
    content = message.get("content")
    blocks = [b for b in content if isinstance(b, Mapping)] if isinstance(content, list) else []
    return "\n".join(str(block.get("thinking")) for block in blocks if block.get("type") == "thinking")


def _parts(content: Json) -> Iterator[str]:
    if content is None:
        return
    if not isinstance(content, list):
        yield _text(content)
        return
    for part in content:
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield part["text"]
        elif isinstance(part, Mapping) and part.get("type") == "tool_result":
            yield from _parts(part.get("content"))
        elif isinstance(part, Mapping) and part.get("type") in ("tool_use", "thinking"):
            continue
        elif isinstance(part, Mapping):
            yield f"[{part.get('type') or 'part'}]"  # an image or a sound: nothing is downloaded
        else:
            yield _text(part)


def _text(value: Json) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def _json_text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str, limit: int) -> dict[str, Json]:
    return {"text": text[:limit], "cut": max(0, len(text) - limit)}
