"""Translation of a vendor's own format: requests to chat completions, and answers back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

from lightning_openai.json_text import to_json
from lightning_spans.chat.body import tool_call
from lightning_spans.schema.json import read_json
from lightning_spans.schema.spans import Json

CHAT: Final = "/chat/completions"  # the endpoint of translated requests
EFFORT: Final = "medium"  # of reasoning that is only switched on, or has a budget, which no chat template supports
_THOUGHTS: Final = ("reasoning_content", "reasoning")  # in a message or a delta
Changed: TypeAlias = Callable[[Mapping[str, Json]], Mapping[str, Json] | None]


@dataclass(frozen=True, slots=True)
class ForeignRequest:
    """A request in a vendor's format, as a chat completion.

    Attributes:
        body: of the chat completion.
        untranslated: fields that a chat completion cannot express, by name.
        left_out: fields for the vendor's own server or bookkeeping, which do not change an answer elsewhere, by name.
        shows_reasoning: whether the answer may have the model's reasoning. A program that did not request it may read
            the first part as the answer.
    """

    body: dict[str, Json]
    untranslated: Mapping[str, Json] = field(default_factory=dict)
    left_out: Mapping[str, Json] = field(default_factory=dict)
    shows_reasoning: bool = True

    @property
    def recorded(self) -> dict[str, Json]:
        """The body together with what it does not express."""
        return {**self.body, **self.untranslated, **self.left_out}


class AnswerStream(Protocol):
    """Translates a streamed chat completion to a vendor's format."""

    def feed(self, chunk: Mapping[str, Json]) -> Iterable[Mapping[str, Json]]:
        """Translate a chunk; return its events."""

    def end(self) -> Iterable[Mapping[str, Json]]:
        """Return the events at the end."""


class ForeignDialect(Protocol):
    """A vendor's format.

    Attributes:
        provider: its name, as in OpenTelemetry's conventions if they have one.
        content_type: of a streamed answer.
    """

    provider: str
    content_type: str

    def knows(self, path: str, body: Mapping[str, Json]) -> bool:
        """Whether a request is in this format."""

    def read(self, path: str, body: Mapping[str, Json]) -> ForeignRequest:
        """Translate a request."""

    def prompted(self, body: Mapping[str, Json], changed: Changed) -> Mapping[str, Json] | None:
        """Return a request with another system prompt; None if there is none. `changed` works on chat completions."""

    def completion(self, parts: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
        """Return a recorded answer as a chat completion.

        One complete answer, or the events of a stream as far as read.
        """

    def answer(self, completion: Mapping[str, Json], since_ns: int) -> Mapping[str, Json]:
        """Translate a chat completion that was requested at `since_ns` of `time.perf_counter_ns()`."""

    def stream(self, since_ns: int) -> AnswerStream:
        """Start to translate the chunks of a chat completion; see `answer`."""

    def framed(self, event: Mapping[str, Json]) -> bytes:
        """Return an event of a stream as it is sent."""

    def error(self, status: int, message: str) -> Mapping[str, Json]:
        """Return the body of an error."""


class Fields:
    """The fields of an object, taken one by one. Fields that remain at the end were not translated.

    Args:
        given: the object. Anything else has no fields and remains as a whole.
        where: its own name; "" for the body.
        spelt: returns the usual spelling of a field's name.
    """

    def __init__(self, given: Any, where: str = "", spelt: Callable[[str], str] = str) -> None:
        self._whole = None if given is None or isinstance(given, Mapping) else given
        self._given = {spelt(name): value for name, value in given.items()} if isinstance(given, Mapping) else {}
        self._where = where

    def take(self, name: str) -> Any:
        """Take a field; None if it is missing."""
        return self._given.pop(name, None)

    def renamed(self, names: Mapping[str, str]) -> dict[str, Json]:
        """Take the given fields, under other names."""
        return {new: value for old, new in names.items() if (value := self.take(old)) is not None}

    def drop(self, names: Iterable[str]) -> dict[str, Json]:
        """Take the given fields that are not empty, under the names they have in the request."""
        return {self.name(name): value for name in names if not _is_empty(value := self.take(name))}

    def rest(self) -> dict[str, Json]:
        """Return the remaining fields that are not empty."""
        if self._whole is not None:
            return {self._where: self._whole}
        if not self._given:
            return {}
        return {self.name(name): value for name, value in self._given.items() if not _is_empty(value)}

    def name(self, name: str) -> str:
        """Return a field's name as seen from the whole request."""
        return f"{self._where}.{name}" if self._where else name


def _is_empty(value: Json) -> bool:
    return value is None or value is False or value in ("", [], {})


def objects(value: Any) -> list[Mapping[str, Json]]:
    """Return the objects of a list; empty if it is not a list."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


class CallIds:
    """Ids for tool calls in formats without ids. A result answers the first open call of its name."""

    def __init__(self) -> None:
        self._open: list[tuple[str, str]] = []
        self._count = 0

    def called(self, name: str, given: Json = None) -> str:
        """Return a call's id: the given one, otherwise a new one."""
        self._count += 1
        call_id = given if isinstance(given, str) and given else f"call_{self._count}"
        self._open.append((name, call_id))
        return call_id

    def answered(self, name: Json, given: Json = None) -> str:
        """Return the id of the call that a result answers."""
        fits = [
            pair for pair in self._open if (pair[1] == given if given else pair[0] == name or not isinstance(name, str))
        ]
        if not fits:
            return given if isinstance(given, str) and given else f"call_of_{name}"
        self._open.remove(fits[0])
        return fits[0][1]


def as_call(call_id: Json, name: Json, arguments: Any) -> dict[str, Json]:
    """Return a tool call of a chat completion. Arguments given as data become JSON text."""
    text = arguments if isinstance(arguments, str) else to_json(arguments or {})
    return tool_call(call_id, name, text)


def arguments_of(call: Mapping[str, Json]) -> dict[str, Json]:
    """Return a tool call's arguments as an object. Anything else is put into one under ``arguments``."""
    text = (call.get("function") or {}).get("arguments") or "{}"
    try:
        data = read_json(text)
    except ValueError:
        return {"arguments": text}
    return data if isinstance(data, dict) else {"arguments": data}


def user_message(parts: Sequence[str]) -> dict[str, Json]:
    """Return a user's message: one text, or several parts."""
    if len(parts) == 1:
        return {"role": "user", "content": parts[0]}
    return {"role": "user", "content": [{"type": "text", "text": text} for text in parts]}


def assistant_message(text: str, thought: str, calls: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Return a model's message."""
    message: dict[str, Json] = {"role": "assistant", "content": text or (None if calls else "")}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = list(calls)
    return message


def thought_of(message: Mapping[str, Json]) -> str:
    """Return the reasoning in a message or a delta, under either of its names."""
    return next((message[name] for name in _THOUGHTS if message.get(name)), "")


def without_thoughts(completion: Mapping[str, Json]) -> dict[str, Json]:
    """Return a chat completion, or a chunk of one, without the reasoning of its choices."""
    choices = []
    for choice in completion.get("choices") or ():
        said = {key: choice[key] for key in ("message", "delta") if isinstance(choice.get(key), Mapping)}
        kept = {
            key: {name: value for name, value in message.items() if name not in _THOUGHTS}
            for key, message in said.items()
        }
        choices.append({**choice, **kept})
    return {**completion, "choices": choices}


def schema_format(schema: Json) -> dict[str, Json]:
    """Return the `response_format` for a JSON schema; for None, the one for any JSON."""
    if schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}


def usage_of(prompt: Json, answered: Json) -> dict[str, Json]:
    """Return the token counts of a chat completion; {} if unknown."""
    counts = {"prompt_tokens": prompt, "completion_tokens": answered}
    known = {name: int(count) for name, count in counts.items() if isinstance(count, (int, float))}
    return {**known, "total_tokens": sum(known.values())} if known else {}


def choices_of(completion: Mapping[str, Json]) -> Iterator[tuple[Mapping[str, Json], Json]]:
    """Return the messages of a chat completion, each with its finish reason."""
    for choice in objects(completion.get("choices")):
        yield choice.get("message") or {}, choice.get("finish_reason")
