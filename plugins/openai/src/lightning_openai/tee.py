"""A response body that is kept as the agent reads it, in whatever way it does."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple, Protocol


class Listener(Protocol):
    """Who wants to know how the reading went."""

    def read_to_end(self) -> None:
        """The body is complete."""

    def read_failed(self, error: BaseException) -> None:
        """Reading raised."""

    def closed(self) -> None:
        """Nobody will read any further; may come more than once, and after the other two."""


class _Tee:
    """Stands in for `response.stream`; the bytes that pass are kept as they came, so perhaps compressed."""

    def __init__(self, stream: Any, listener: Listener) -> None:
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

    def __init__(self, stream: AsyncIterator[bytes], listener: Listener, chunks: list[bytes]) -> None:
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


class Kept(NamedTuple):
    """A body, as far as it was read.

    Attributes:
        chunks: its bytes; of one that is teed more may come, perhaps compressed.
        response: gives the class, status and headers that say how to decompress them; None where they are plain.
    """

    chunks: list[bytes]
    response: Any = None


def tee(response: Any, listener: Listener) -> Kept:
    """Put a tee into a response whose body has not been read yet; gives what it keeps."""
    stream: Any = response.stream
    kind: Any = type(stream)
    put = response.stream = _class_for(kind)(stream, listener)
    if "content-encoding" not in response.headers:
        return Kept(put.chunks)
    # Without the stream: the tee holds its listener, who holds this.
    return Kept(put.chunks, type(response)(response.status_code, headers=response.headers))


def body_of(kept: Kept, chunks: int | None = None) -> str:
    """Give the text of a body, decompressed: all that was kept, or the first so many chunks."""
    response, content = kept.response, b"".join(kept.chunks[:chunks])
    if response is not None:
        content = type(response)(response.status_code, headers=response.headers, content=content).content
    text: str = content.decode("utf-8", errors="replace")
    return text


@functools.cache
def _class_for(kind: type) -> type[_Tee]:
    """Give a tee that passes as a stream of httpx or httpx2, whichever this client uses."""
    bases = [base for base in kind.__mro__ if base.__name__ in {"SyncByteStream", "AsyncByteStream"}]
    return type("Tee", (_Tee, *bases), {})
