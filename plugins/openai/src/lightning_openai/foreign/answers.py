"""Convert the gateway's answers to httpx responses in a vendor's format; split recorded answers into objects."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import orjson

from lightning_openai.events import read_events
from lightning_openai.foreign.dialect import ForeignDialect, without_thoughts
from lightning_spans.chat.stream import EventReader
from lightning_spans.schema.json import dumps, read_json
from lightning_spans.schema.spans import Json


def parts_of(text: str, content_type: str) -> list[dict[str, Json]]:
    """Return the JSON objects of a recorded answer, which may be cut anywhere.

    Incomplete objects of a stream are left out.

    Args:
        text: server-sent events, lines of JSON, or one JSON text: an object or a list of objects.
        content_type: which of these it is.
    """
    if content_type.startswith("text/event-stream"):
        return read_events(text).found
    found: list[dict[str, Json]] = []
    for piece in text.splitlines() if "ndjson" in content_type else [text]:
        try:
            parsed = read_json(piece)
        except ValueError:
            continue
        found += [item for item in (parsed if isinstance(parsed, list) else [parsed]) if isinstance(item, dict)]
    return found


class Answers:
    """Creates responses.

    Args:
        dialect: the vendor's format.
        library: httpx or httpx2.
        request: the program's request; it has just been sent.
        shows_reasoning: see `ForeignRequest`.
    """

    def __init__(self, dialect: ForeignDialect, library: ModuleType, request: Any, *, shows_reasoning: bool) -> None:
        self._dialect, self._library, self._request = dialect, library, request
        self._shown: Callable[[Mapping[str, Json]], Mapping[str, Json]] = dict if shows_reasoning else without_thoughts
        self._since_ns = time.perf_counter_ns()

    def refusal(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> Any:
        """Return an error response."""
        return self._of(status, dumps(self._dialect.error(status, message)), "application/json", headers)

    def of(self, response: Any) -> Any:
        """Return the gateway's response in this format.

        Already read, or a stream that is translated while it is read.
        """
        status = response.status_code
        streamed = response.headers.get("content-type", "").startswith("text/event-stream")
        if status >= 400:
            kept = {name: response.headers[name] for name in ("retry-after",) if name in response.headers}
            return self.refusal(status, _message(response), kept)
        if not response.is_stream_consumed:
            stream = _class_for(self._library)(response, self._reader())
            return self._library.Response(status, headers=self._type(), stream=stream, request=self._request)
        if streamed:
            reader = self._reader()
            return self._of(status, reader.feed(response.content) + reader.end(), self._dialect.content_type)
        answer = self._dialect.answer(self._shown(response.json()), self._since_ns)
        return self._of(status, dumps(answer), "application/json")

    def _reader(self) -> _Reader:
        return _Reader(self._dialect, self._since_ns, self._shown)

    def _of(self, status: int, content: bytes, kind: str, headers: Mapping[str, str] | None = None) -> Any:
        told = {"content-type": kind, **(headers or {})}
        return self._library.Response(status, headers=told, content=content, request=self._request)

    def _type(self) -> dict[str, str]:
        return {"content-type": self._dialect.content_type}


def _message(response: Any) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return str(response.text)


class _Reader:
    """Converts the bytes of a streamed chat completion to those of the vendor's stream."""

    def __init__(
        self, dialect: ForeignDialect, since_ns: int, shown: Callable[[Mapping[str, Json]], Mapping[str, Json]]
    ) -> None:
        self._dialect, self._shown = dialect, shown
        self._cut = EventReader()
        self._said = dialect.stream(since_ns)

    def feed(self, piece: bytes) -> bytes:
        """Convert the next bytes."""
        made: list[bytes] = []
        for data in self._cut.feed(piece):
            chunk = orjson.loads(data)
            if chunk.get("error"):
                made.append(self._dialect.framed(self._dialect.error(500, str(chunk["error"].get("message")))))
            else:
                made += [self._dialect.framed(event) for event in self._said.feed(self._shown(chunk))]
        return b"".join(made)

    def end(self) -> bytes:
        """Return the bytes at the end of the stream."""
        return b"".join([self._dialect.framed(event) for event in self._said.end()])


class _TranslatedStream:
    """Replaces the stream of a response: reads the gateway's stream as it is read."""

    def __init__(self, response: Any, reader: _Reader) -> None:
        self._response, self._reader = response, reader

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._response.iter_bytes():
            if made := self._reader.feed(piece):
                yield made
        if made := self._reader.end():
            yield made

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._response.aiter_bytes():
            if made := self._reader.feed(piece):
                yield made
        if made := self._reader.end():
            yield made

    def close(self) -> None:
        self._response.close()

    async def aclose(self) -> None:
        await self._response.aclose()


@functools.cache
def _class_for(library: ModuleType) -> type[_TranslatedStream]:
    bases = (_TranslatedStream, library.SyncByteStream, library.AsyncByteStream)
    return type("TranslatedStream", bases, {})
