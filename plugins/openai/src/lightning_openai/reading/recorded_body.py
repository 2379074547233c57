"""A response body that is recorded while the agent reads it, in any way."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple, Protocol


class BodyListener(Protocol):
    """Receives how the reading went."""

    def read_to_end(self) -> None:
        """Note that the body is complete."""

    def read_failed(self, error: BaseException) -> None:
        """Note that reading failed."""

    def closed(self) -> None:
        """Note that nobody reads the rest. May be called more than once, and after the other two."""


class _RecordedStream:
    """Replaces `response.stream`. The bytes that pass are kept as they arrived, perhaps compressed."""

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
    """Not a generator: closing an abandoned one costs its event loop a task and an iteration."""

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
        chunks: its bytes, perhaps compressed; more may arrive while it is read.
        response: class, status and headers for decompression; None if the bytes are not compressed.
    """

    chunks: list[bytes]
    response: Any = None


def record_body(response: Any, listener: BodyListener) -> RecordedBody:
    """Record the unread body of a response while it is read."""
    stream: Any = response.stream
    kind: Any = type(stream)
    put = response.stream = _class_for(kind)(stream, listener)
    if "content-encoding" not in response.headers:
        return RecordedBody(put.chunks)
    # Without the stream, which holds its listener, which holds this.
    return RecordedBody(put.chunks, type(response)(response.status_code, headers=response.headers))


def body_of(body: RecordedBody, chunks: int | None = None) -> str:
    """Return a body's text, decompressed: everything that was kept, or the first chunks."""
    response, content = body.response, b"".join(body.chunks[:chunks])
    if response is not None:
        content = type(response)(response.status_code, headers=response.headers, content=content).content
    text: str = content.decode("utf-8", errors="replace")
    return text


@functools.cache
def _class_for(kind: type) -> type[_RecordedStream]:
    """Return a class that counts as a stream of httpx or httpx2, whichever this client uses."""
    bases = [base for base in kind.__mro__ if base.__name__ in {"SyncByteStream", "AsyncByteStream"}]
    return type("RecordedStream", (_RecordedStream, *bases), {})
