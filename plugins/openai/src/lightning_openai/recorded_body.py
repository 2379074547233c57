"""A response body that is kept as the agent reads it, in whatever way it does."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple, Protocol


class BodyListener(Protocol):
    """Who wants to know how the reading went."""

    def read_to_end(self) -> None:
        """The body is complete."""

    def read_failed(self, error: BaseException) -> None:
        """Reading raised."""

    def closed(self) -> None:
        """Nobody will read any further; may come more than once, and after the other two."""


class _RecordedStream:
    """Stands in for `response.stream`; the bytes that pass are kept as they came, so perhaps compressed."""

    def __init__(self, stream: Any, listener: BodyListener) -> None:
        self._stream = stream
        self._listener = listener
        self.chunks: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        try:
            for chunk in self._stream:
                self.chunks.append(chunk)
                yield chunk
        except GeneratorExit:
            raise
        except BaseException as error:
            self._listener.read_failed(error)
            raise
        self._listener.read_to_end()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return _Reading(self._stream.__aiter__(), self._listener, self.chunks)

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._listener.closed()

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            self._listener.closed()

    def __del__(self) -> None:
        self._listener.closed()  # nobody read or closed it


class _Reading:
    """No generator: one that is left before its end costs its event loop a task and a round to close it."""

    def __init__(self, stream: AsyncIterator[bytes], listener: BodyListener, chunks: list[bytes]) -> None:
        self._stream = stream
        self._listener = listener
        self._chunks = chunks

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk = await self._stream.__anext__()
        except StopAsyncIteration:
            self._listener.read_to_end()
            raise
        except GeneratorExit:
            raise
        except BaseException as error:
            self._listener.read_failed(error)
            raise
        self._chunks.append(chunk)
        return chunk


class RecordedBody(NamedTuple):
    """A body, as far as it was read.

    Attributes:
        chunks: its bytes; of one that is still read more may come, perhaps compressed.
        response: gives the class, status and headers that say how to decompress them; None where they are plain.
    """

    chunks: list[bytes]
    response: Any = None


def record_body(response: Any, listener: BodyListener) -> RecordedBody:
    """Record the body of a response, which has not been read yet, while it is read."""
    stream: Any = response.stream
    kind: Any = type(stream)
    put = response.stream = _class_for(kind)(stream, listener)
    if "content-encoding" not in response.headers:
        return RecordedBody(put.chunks)
    # Without the stream, which holds its listener, who holds this.
    return RecordedBody(put.chunks, type(response)(response.status_code, headers=response.headers))


def body_of(body: RecordedBody, chunks: int | None = None) -> str:
    """Return the text of a body, decompressed: all that was kept, or the first so many chunks."""
    response, content = body.response, b"".join(body.chunks[:chunks])
    if response is not None:
        content = type(response)(response.status_code, headers=response.headers, content=content).content
    text: str = content.decode("utf-8", errors="replace")
    return text


@functools.cache
def _class_for(kind: type) -> type[_RecordedStream]:
    """Return a class that passes as a stream of httpx or httpx2, whichever this client uses."""
    bases = [base for base in kind.__mro__ if base.__name__ in {"SyncByteStream", "AsyncByteStream"}]
    return type("RecordedStream", (_RecordedStream, *bases), {})
