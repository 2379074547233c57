"""Streams put together: the events of a stream become the one response that the server would have sent without it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import orjson

from lightning_spans.spans import Json

DONE: Final = "[DONE]"
_BEGIN: Final = "data: "
_BETWEEN: Final = f"\n\n{_BEGIN}"  # in JSON there is no such thing, since a text has no line breaks there
_END: Final = f"{_BETWEEN}{DONE}\n\n"
_ADDS: Final = re.compile('"content": ?"')
_TEXT: Final = frozenset(
    {"content", "text", "refusal", "reasoning", "reasoning_content", "arguments", "data", "transcript"}
)
_WHOLE: Final = frozenset({"prompt_token_ids"})  # some servers send it with every chunk


class Events(NamedTuple):
    """What was read of a stream.

    Attributes:
        found: the JSON objects of its events, in order. Of a chat completion, those are one that only add to its text.
        done: the stream's end mark was there.
        more: it has events beyond those that were asked for.
    """

    found: list[dict[str, Json]]
    done: bool
    more: bool


def read_events(body: str, taken: int | None = None) -> Events:
    """Read a server-sent event stream, which may be cut anywhere.

    Args:
        body: the stream.
        taken: how many of its events to give; None: all.
    """
    if body.startswith(_BEGIN) and body.endswith(_END):
        try:  # as most servers write it: data alone, each in a line
            return _read(body[len(_BEGIN) : -len(_END)].split(_BETWEEN), taken, done=True)
        except orjson.JSONDecodeError:
            pass  # it has more than data, or in more lines
    texts, done = _texts(body)
    try:
        return _read(texts, taken, done=done)
    except orjson.JSONDecodeError:
        return _first(_whole(texts), taken, done=False)


def _read(texts: Sequence[str], taken: int | None, *, done: bool) -> Events:
    if taken is None or taken >= len(texts):
        texts, taken = _fewer(texts), None
    events = orjson.loads(f"[{','.join(texts)}]")  # at once, which takes half the time
    return _first([event for event in events if isinstance(event, dict)], taken, done=done)


def _first(found: list[dict[str, Json]], taken: int | None, *, done: bool) -> Events:
    return Events(found[:taken], done, more=taken is not None and taken < len(found))


def _texts(body: str) -> tuple[list[str], bool]:
    """Give the data of the events, and whether the end mark was there."""
    texts: list[str] = []
    for block in (body.replace("\r\n", "\n") if "\r" in body else body).split("\n\n"):
        data = block[6:] if block.startswith("data: ") and "\n" not in block else _data_of(block)
        if data.startswith(DONE):
            return texts, True
        if data:
            texts.append(data)
    return texts, False


def _fewer(texts: Sequence[str]) -> Sequence[str]:
    """Make one event of those that differ in the text they add and in nothing else: to read each takes its time."""
    around = _around(texts[len(texts) // 2]) if texts else None
    if around is None:
        return texts
    before, after = around
    start, end = len(before), -len(after)
    made: list[str] = []
    adds: list[str] = []
    for text in texts:
        if text.startswith(before) and text.endswith(after):
            add = text[start:end]
            if '"' not in add and add[-1:] != "\\":  # else it may be more than a text
                adds.append(add)
                continue
        if adds:
            made.append(f"{before}{''.join(adds)}{after}")
            adds.clear()
        made.append(text)
    if adds:
        made.append(f"{before}{''.join(adds)}{after}")
    return made


def _around(event: str) -> tuple[str, str] | None:
    """Give what stands before and after the text that an event adds to a chat completion; None if it says more."""
    begins = _ADDS.search(event)
    if begins is None or _ADDS.search(event, begins.end()):
        return None
    try:
        told = orjson.loads(event)
        (part,) = told["choices"]
        delta = part["delta"]
        end = event.index('"', begins.end())
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError):
        return None
    nested = [value for value in (*told.values(), *part.values()) if isinstance(value, (dict, list))]
    if list(delta) != ["content"] or nested != [told["choices"], delta] or not _TEXT.isdisjoint(part):
        return None
    return event[: begins.end()], event[end:]


def _whole(texts: Iterable[str]) -> list[dict[str, Json]]:
    """Read events up to the one inside of which the connection was cut."""
    events: list[dict[str, Json]] = []
    for text in texts:
        try:
            event = orjson.loads(text)
        except orjson.JSONDecodeError:
            break
        if isinstance(event, dict):
            events.append(event)
    return events


def _data_of(block: str) -> str:
    lines = [line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
    return "\n".join(lines)


def put_together(endpoint: str, events: Sequence[Mapping[str, Json]]) -> dict[str, Json] | None:
    """Give the response that a stream amounts to; None when nothing came."""
    if not events:
        return None
    if endpoint == "/responses":
        return _responses(events)
    return _choices(events, text=endpoint == "/completions")


def is_whole(endpoint: str, response: Mapping[str, Json] | None) -> bool:
    """Whether a message put together is finished, even where the stream's own end was not seen."""
    if response is None:
        return False
    if endpoint == "/responses":
        return response.get("status") in {"completed", "incomplete", "failed", "cancelled"}
    choices = response.get("choices") or []
    return bool(choices) and all(choice.get("finish_reason") for choice in choices)


def _choices(events: Iterable[Mapping[str, Json]], *, text: bool) -> dict[str, Json]:
    """Put together the choices of a chat completion, or of a completion, whose choices are text without a message."""
    response: dict[str, Json] = {}
    choices: dict[int, dict[str, Json]] = {}
    for event in events:
        response.update(event if None not in event.values() else _known(event, response))
        for part in event.get("choices") or ():
            index = part.get("index", 0)
            choice = choices.get(index)
            if choice is None:
                choice = choices[index] = {"index": index} if text else {"index": index, "message": {}}
            if delta := part.get("delta"):
                _merge(choice["message"], delta)
            _merge(choice, part, but="delta")
    for choice in choices.values():
        choice.update({key: "".join(value) for key, value in choice.items() if isinstance(value, _Pieces)})
        if text:
            continue
        choice["message"] = _joined(choice["message"])
        choice["message"].setdefault("content", None)
        for call in choice["message"].get("tool_calls") or ():
            call.pop("index", None)
    if response.get("object") == "chat.completion.chunk":
        response["object"] = "chat.completion"
    response["choices"] = [choices[index] for index in sorted(choices)]
    return response


def _known(event: Mapping[str, Json], response: Mapping[str, Json]) -> dict[str, Json]:
    """Give what an event tells: null says nothing, where something was said."""
    return {key: value for key, value in event.items() if value is not None or key not in response}


class _Pieces(list[str]):
    """A text that grows: joined once, since adding to a long string piece by piece copies it each time."""


def _joined(value: Json) -> Json:
    if isinstance(value, _Pieces):
        return "".join(value)
    if isinstance(value, dict):
        return {key: _joined(item) for key, item in value.items()}
    return [_joined(item) for item in value] if isinstance(value, list) else value


def _merge(into: dict[str, Json], part: Mapping[str, Json], but: str | None = None) -> None:
    """Add one delta: text and lists grow, parts of a list with an index grow in place, the rest is as last sent."""
    for key, value in part.items():
        if key == but:
            continue
        if value is None:
            into.setdefault(key, None)
        elif isinstance(value, str):
            _write(into, key, value)
        elif isinstance(value, list) and key not in _WHOLE:
            _extend(into, key, value)
        elif isinstance(value, dict):
            if not isinstance(into.get(key), dict):
                into[key] = {}
            _merge(into[key], value)
        else:
            into[key] = value


def _write(into: dict[str, Json], key: str, value: str) -> None:
    known = into.get(key)
    if key not in _TEXT:
        into[key] = value or known or value  # some servers send an empty id with every delta but the first
    elif isinstance(known, _Pieces):
        known.append(value)
    else:
        into[key] = _Pieces([value])


def _extend(into: dict[str, Json], key: str, parts: list[Json]) -> None:
    if not isinstance(into.get(key), list):
        into[key] = []
    known: list[Any] = into[key]
    for part in parts:
        if not (isinstance(part, dict) and isinstance(part.get("index"), int)):
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
