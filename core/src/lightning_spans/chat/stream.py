"""Streams of model servers: split into events, and assembled into the equivalent response without streaming."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from lightning_spans.schema.spans import Json

DONE: Final = b"[DONE]"
MOST_BYTES: Final = 8 * 2**20  # of one event
TEXTS: Final = frozenset({  # fields whose deltas are concatenated
    "content", "text", "refusal", "reasoning", "reasoning_content", "arguments", "input", "data", "transcript",
})  # fmt: skip
_WHOLE: Final = frozenset({"prompt_token_ids"})  # some servers send it with every chunk
_ARGUMENTS: Final = "response.function_call_arguments.delta"


class EventReader:
    """Splits bytes into server-sent events, in whatever pieces they come; comments and other fields are ignored.

    Attributes:
        done: whether the end mark of a stream of completions came; anything after it is not read.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.done = False
        self._rest, self._most_bytes = bytearray(), most_bytes

    def feed(self, piece: bytes) -> list[bytes]:
        """Add a piece, and return the data of the events that are now complete.

        Raises:
            ValueError: an event is larger than any that a model server sends.
        """
        found = [] if self.done else self._cut(piece)
        if DONE in found:
            self.done = True
            del found[found.index(DONE) :]
        return found

    def _cut(self, piece: bytes) -> list[bytes]:
        if not self._rest and piece.startswith(b"data: ") and piece.endswith(b"\n\n"):
            found = piece[6:-2].split(b"\n\ndata: ")
            if piece.count(b"\n") == 2 * len(found) and b"" not in found:
                return found  # only data, each in one line, as most servers write it
        begin = max(len(self._rest) - 3, 0)  # an end may be split across two pieces
        self._rest += piece
        if any(self._rest.find(end, begin) >= 0 for end in (b"\n\n", b"\n\r\n")):
            *whole, rest = bytes(self._rest).replace(b"\r\n", b"\n").split(b"\n\n")
            self._rest = bytearray(rest)
        else:  # earlier bytes are not searched again
            whole = []
        if len(self._rest) > self._most_bytes:
            raise ValueError(f"an event of more than {self._most_bytes} bytes")
        return [data for event in whole if (data := _data(event))]


def _data(event: bytes) -> bytes:
    return b"\n".join([line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")])


class _Text(list[str]):
    """A growing text: joined once, because appending to a long string piece by piece copies it each time."""


class _List(list[Any]):
    """A growing list; parts with an index grow in place."""

    def __init__(self) -> None:
        self.places: dict[int, dict[str, Json]] = {}


class Growing:
    """A message or choice that grows by deltas; a complete one is one delta.

    Texts and lists grow, parts of a list with an index grow in place, and the rest keeps its last value.
    """

    def __init__(self) -> None:
        self._fields: dict[str, Json] = {}

    def add(self, delta: Mapping[str, Json]) -> None:
        """Add a delta."""
        _merge(self._fields, delta)

    def add_text(self, name: str, text: str) -> None:
        """Append to a text."""
        known = self._fields.get(name)
        if isinstance(known, _Text):
            known.append(text)
        else:
            self._fields[name] = _Text([text])

    def whole(self) -> dict[str, Any]:
        """Return the message or choice as far as it was received."""
        whole: dict[str, Any] = _join_texts(self._fields)
        return whole


def _merge(into: dict[str, Json], delta: Mapping[str, Json]) -> None:
    for key, value in delta.items():
        known = into.get(key)
        if value is None:
            into.setdefault(key, None)
        elif isinstance(value, str):
            if key not in TEXTS:
                into[key] = value or known or value  # some servers send an empty id with every delta but the first
            elif isinstance(known, _Text):
                known.append(value)
            else:
                into[key] = _Text([value])
        elif isinstance(value, list) and key not in _WHOLE:
            if not isinstance(known, _List):
                known = into[key] = _List()
            _extend(known, value)
        elif isinstance(value, dict):
            if not isinstance(known, dict):
                known = into[key] = {}
            _merge(known, value)
        else:
            into[key] = value


def _extend(known: _List, parts: Sequence[Json]) -> None:
    for part in parts:
        index = part.get("index") if isinstance(part, dict) else None
        if not isinstance(index, int):
            known.append(part)
            continue
        if index not in known.places or begins_another(known.places[index], part):
            known.places[index] = {}
            known.append(known.places[index])
        _merge(known.places[index], part)


def begins_another(known: Mapping[str, Json], part: Mapping[str, Json]) -> bool:
    """Whether a part with the index of a known one is a separate tool call: it has a name and another id.

    Some servers send index 0 with every call. Others send a new id with every delta of one call, but its name once.
    """
    named = (part.get("function") or part.get("custom") or {}).get("name")
    return bool(named and part.get("id") and known.get("id") and part["id"] != known["id"])


def _join_texts(value: Json) -> Json:
    if isinstance(value, _Text):
        return "".join(value)
    if isinstance(value, dict):
        return {key: _join_texts(item) for key, item in value.items()}
    return [_join_texts(item) for item in value] if isinstance(value, list) else value


def put_together(endpoint: str, events: Sequence[Mapping[str, Json]]) -> dict[str, Json] | None:
    """Return the response that a stream adds up to, complete or as far as received; None if nothing was received.

    Args:
        endpoint: ``/chat/completions``, ``/completions`` or ``/responses``.
        events: the data of its events, in order.
    """
    if not events:
        return None
    return _response(events) if endpoint == "/responses" else _completion(events, text=endpoint == "/completions")


def _completion(chunks: Iterable[Mapping[str, Json]], *, text: bool) -> dict[str, Json]:
    """Assemble a chat completion, or a text completion, whose choices are text without a message."""
    head: dict[str, Json] = {}
    choices: dict[int, tuple[Growing, Growing]] = {}
    for chunk in chunks:
        # A null does not replace a value.
        head.update({key: value for key, value in chunk.items() if value is not None or key not in head})
        for part in chunk.get("choices") or ():
            index = part.get("index", 0)
            if index not in choices:
                choices[index] = Growing(), Growing()
            choice, message = choices[index]
            message.add(part.get("delta") or {})
            choice.add({key: value for key, value in part.items() if key != "delta"})
    if head.get("object") == "chat.completion.chunk":
        head["object"] = "chat.completion"
    head["choices"] = [
        {"index": index, **({} if text else {"message": message_of(message)}), **choice.whole()}
        for index, (choice, message) in sorted(choices.items())
    ]
    return head


def message_of(growing: Growing) -> dict[str, Json]:
    """Return a message received by deltas in the format of one that is sent whole."""
    message = growing.whole()
    message.setdefault("content", None)
    for call in message.get("tool_calls") or ():
        call.pop("index", None)
    return message


def _response(events: Iterable[Mapping[str, Json]]) -> dict[str, Json]:
    """Return the response that the last event carries; without that event, what arrived of each output item."""
    response: dict[str, Json] = {}
    items: dict[int, dict[str, Json]] = {}
    for event in events:
        kind, index = str(event.get("type")), event.get("output_index", 0)
        if isinstance(event.get("response"), dict):
            response = dict(event["response"])
        elif kind in {"response.output_item.added", "response.output_item.done"}:
            items[index] = dict(event.get("item") or {})
        elif kind in {"response.output_text.delta", _ARGUMENTS}:
            _grow(items.setdefault(index, {}), event, kind)
    if items and not response.get("output"):
        response["output"] = [items[index] for index in sorted(items)]
    return response


def _grow(item: dict[str, Json], event: Mapping[str, Json], kind: str) -> None:
    delta = event.get("delta") or ""
    if kind == _ARGUMENTS:
        item["arguments"] = item.get("arguments", "") + delta
        return
    index = event.get("content_index", 0)
    content = item["content"] = list(item.get("content") or ())
    while len(content) <= index:
        content.append({"type": "output_text", "text": ""})
    content[index] = {**content[index], "text": content[index].get("text", "") + delta}
