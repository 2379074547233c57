"""A response body that is kept as the agent reads it, in whatever way it does."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any, Protocol


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


def tee(response: Any, listener: Listener) -> None:
    """Put a tee into a response whose body has not been read yet."""
    stream: Any = response.stream
    kind: Any = type(stream)
    response.stream = _class_for(kind)(stream, listener)


def chunks_of(response: Any) -> int | None:
    """Give how many chunks of a body were read so far; None where it was not teed."""
    return len(response.stream.chunks) if isinstance(response.stream, _Tee) else None


def body_of(response: Any, chunks: int | None = None) -> str:
    """Give the text of a body as far as it was read, decompressed; of a teed one, the first so many chunks."""
    stream = response.stream
    if not isinstance(stream, _Tee):
        content = response.content  # not `.text`, which is slow to guess the encoding: JSON is UTF-8
    else:
        content = b"".join(stream.chunks[:chunks])
        if "content-encoding" in response.headers:
            content = type(response)(response.status_code, headers=response.headers, content=content).content
    text: str = content.decode("utf-8", errors="replace")
    return text


@functools.cache
def _class_for(kind: type) -> type[_Tee]:
    """Give a tee that passes as a stream of httpx or httpx2, whichever this client uses."""
    bases = [base for base in kind.__mro__ if base.__name__ in {"SyncByteStream", "AsyncByteStream"}]
    return type("Tee", (_Tee, *bases), {})
