"""Streams put together: the events of a stream become the one response that the server would have sent without it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from lightning_spans.spans import Json

DONE: Final = "[DONE]"
_TEXT: Final = frozenset({"content", "refusal", "reasoning", "reasoning_content", "arguments", "data", "transcript"})
_WHOLE: Final = frozenset({"prompt_token_ids"})  # some servers send it with every chunk


def read_events(body: str) -> tuple[list[dict[str, Json]], bool]:
    """Read a server-sent event stream, which may be cut anywhere.

    Returns:
        The JSON objects of its events in order, and whether its end mark was there.
    """
    events: list[dict[str, Json]] = []
    for block in body.replace("\r\n", "\n").split("\n\n"):
        lines = [line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
        data = "\n".join(lines)
        if data.startswith(DONE):
            return events, True
        if data:
            try:
                event = orjson.loads(data)
            except orjson.JSONDecodeError:
                break  # the connection was cut inside this event
            if isinstance(event, dict):
                events.append(event)
    return events, False


def put_together(endpoint: str, events: Sequence[Mapping[str, Json]]) -> dict[str, Json] | None:
    """Give the response that a stream amounts to; None when nothing came."""
    if not events:
        return None
    return _responses(events) if endpoint == "/responses" else _chat(events)


def is_whole(endpoint: str, response: Mapping[str, Json] | None) -> bool:
    """Whether a message put together is finished, even where the stream's own end was not seen."""
    if response is None:
        return False
    if endpoint == "/responses":
        return response.get("status") in {"completed", "incomplete", "failed", "cancelled"}
    choices = response.get("choices") or []
    return bool(choices) and all(choice.get("finish_reason") for choice in choices)


def _chat(events: Iterable[Mapping[str, Json]]) -> dict[str, Json]:
    response: dict[str, Json] = {}
    choices: dict[int, dict[str, Json]] = {}
    for event in events:
        for key, value in event.items():
            if key != "choices" and (value is not None or key not in response):
                response[key] = value
        for part in event.get("choices") or ():
            choice = choices.setdefault(part.get("index", 0), {"index": part.get("index", 0), "message": {}})
            _merge(choice["message"], part.get("delta") or {})
            _merge(choice, {key: value for key, value in part.items() if key not in {"index", "delta"}})
    for choice in choices.values():
        choice["message"].setdefault("content", None)
        for call in choice["message"].get("tool_calls") or ():
            call.pop("index", None)
    if response.get("object") == "chat.completion.chunk":
        response["object"] = "chat.completion"
    response["choices"] = [choices[index] for index in sorted(choices)]
    return response


def _merge(into: dict[str, Json], part: Mapping[str, Json]) -> None:
    """Add one delta: text and lists grow, parts of a list with an index grow in place, the rest is as last sent."""
    for key, value in part.items():
        known = into.get(key)
        if value is None:
            into.setdefault(key, None)
        elif known is None and not isinstance(value, (list, dict)):
            into[key] = value
        elif isinstance(value, str) and isinstance(known, str):
            into[key] = known + value if key in _TEXT else value or known
        elif isinstance(value, list) and key not in _WHOLE:
            _extend(into, key, value)
        elif isinstance(value, dict):
            if not isinstance(known, dict):
                into[key] = {}
            _merge(into[key], value)
        else:
            into[key] = value


def _extend(into: dict[str, Json], key: str, parts: list[Json]) -> None:
    if not isinstance(into.get(key), list):
        into[key] = []
    known: list[Any] = into[key]
    for part in parts:
        if not (isinstance(part, dict) and "index" in part):
            known.append(part)
            continue
        same = next((item for item in known if item.get("index") == part["index"]), None)
        if same is None:
            known.append(same := {})
        _merge(same, part)


def _responses(events: Iterable[Mapping[str, Json]]) -> dict[str, Json]:
    """Take the response that the last event carries whole; before that event, what had arrived of each output item."""
    response: dict[str, Json] = {}
    items: dict[int, dict[str, Json]] = {}
    for event in events:
        kind = str(event.get("type"))
        if isinstance(event.get("response"), dict):
            response = dict(event["response"])
        elif kind in {"response.output_item.added", "response.output_item.done"}:
            items[event.get("output_index", 0)] = dict(event.get("item") or {})
        elif kind in {"response.output_text.delta", "response.function_call_arguments.delta"}:
            _grow(items.setdefault(event.get("output_index", 0), {}), event, kind)
    if items and not response.get("output"):
        response["output"] = [items[index] for index in sorted(items)]
    return response


def _grow(item: dict[str, Json], event: Mapping[str, Json], kind: str) -> None:
    delta = event.get("delta") or ""
    if kind == "response.function_call_arguments.delta":
        item["arguments"] = item.get("arguments", "") + delta
        return
    index = event.get("content_index", 0)
    content = item["content"] = list(item.get("content") or ())
    while len(content) <= index:
        content.append({"type": "output_text", "text": ""})
    content[index] = {**content[index], "text": content[index].get("text", "") + delta}
