"""Bodies of requests: their memory is bounded before they are read, unpacked and parsed.

A request has shown a valid key before any of this. Large bodies are unpacked and parsed in one thread, one after the
other, so that neither the event loop nor the memory has to handle several at once.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from starlette.types import Message, Receive, Scope

from lightning_spans.record.stalls import waiting
from lightning_spans.schema.json import loads, read_json
from lightning_trainer.gateway.auth.keys import Grant
from lightning_trainer.gateway.auth.quotas import Quotas
from lightning_trainer.gateway.http import weight
from lightning_trainer.gateway.http.asgi import ClientGoneError, headers
from lightning_trainer.gateway.http.errors import Refusal, bad_request, too_large
from lightning_trainer.gateway.settings import Limits
from lightning_trainer.reasons.call_errors import TOO_MUCH_AT_ONCE

T = TypeVar("T")
MAX_DEPTH: Final = 100  # levels of JSON; a chat request with tools has about ten
INLINE_BYTES: Final = 32 * 1024  # larger bodies are parsed outside the event loop
_RATIO: Final = 200  # repetitive spans compress to a hundredth; anything smaller is an attack
_UNPACKED_FREE: Final = 1 << 20  # bytes that any body may unpack to
_LISTS: Final = ("messages", "input", "tools")  # of a model call


class Intake:
    """Reads bodies. All requests of an app use one object, so that the memory of all together has a bound."""

    def __init__(self, limits: Limits, quotas: Quotas) -> None:
        self._limits = limits
        self.quotas = quotas
        self._parsed_bytes = limits.parsed_bytes
        self._held = 0
        self._held_by: Counter[str] = Counter()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lightning-parse")

    async def parsed(
        self, scope: Scope, receive: Receive, grant: Grant, parse: Callable[[bytes], T], most: int | None = None
    ) -> T:
        """Read a body, and parse it, outside the event loop if it is large.

        Args:
            scope: of the request.
            receive: of the request.
            grant: what its key permits.
            parse: runs in a thread if the body is large; bounds what it creates from the body.
            most: bytes, as sent and as unpacked; the server's limit by default.

        Raises:
            Refusal: the body is too large (413), its encoding is not gzip (415) or is broken (400), it stops arriving
                (408), or the key (429) or the server (503) has too many requests in progress.
            ClientGoneError: the client closed the connection.
        """
        limit = self._limits.body_bytes if most is None else min(most, self._limits.body_bytes)
        given = headers(scope)
        encoding = _check_encoding(given.get(b"content-encoding", b"identity"))
        with self._hold(grant) as more:
            body = await _read(given, receive, limit, more)
            self.quotas.take(grant, "bytes", len(body))

            def unpack_and_parse() -> T:
                return parse(_unpack_gzip(body, limit) if encoding == b"gzip" else body)

            if len(body) <= INLINE_BYTES and encoding != b"gzip":
                return unpack_and_parse()
            with waiting("request body", lambda: f"{len(body)} bytes to be parsed"):
                return await asyncio.get_running_loop().run_in_executor(self._thread, unpack_and_parse)

    async def object(self, scope: Scope, receive: Receive, grant: Grant, most: int | None = None) -> dict[str, Any]:
        """Read a JSON object; see `parsed`.

        Raises:
            Refusal: also if it is not a JSON object, or too large or nested too deeply when parsed.
            ClientGoneError: the client closed the connection.
        """
        return await self.parsed(scope, receive, grant, self._object, most)

    async def records(self, scope: Scope, receive: Receive, grant: Grant) -> dict[str, Any]:
        """Read a JSON object as our own clients write it, including what orjson rejects; see `object` and `json.dumps`.

        Raises:
            Refusal: see `object`.
            ClientGoneError: the client closed the connection.
        """
        return await self.parsed(scope, receive, grant, lambda body: parse_object(body, self._parsed_bytes, loads))

    async def model_call(self, scope: Scope, receive: Receive, grant: Grant) -> dict[str, Any]:
        """Read the body of a model call, and count it; see `object`.

        Raises:
            Refusal: also if it has more messages or parts than any conversation.
            ClientGoneError: the client closed the connection.
        """
        self.quotas.take(grant, "model calls")
        return await self.parsed(scope, receive, grant, self._model_call)

    def _object(self, body: bytes) -> dict[str, Any]:
        return parse_object(body, self._parsed_bytes)

    def _model_call(self, body: bytes) -> dict[str, Any]:
        if weight.has_more_containers(body, self._limits.parts):
            most = self._limits.parts
            raise Refusal(413, f"the request has more than {most} objects and lists", code="request_too_large")
        data = self._object(body)
        for name, value in data.items():
            if type(value) is float and not math.isfinite(value):
                raise bad_request(f"{name}={value}: must be a finite number", "invalid_value")
        for name in _LISTS:
            items = data.get(name)
            if isinstance(items, list) and len(items) > self._limits.messages:
                message = f"{name} has {len(items)} entries; at most {self._limits.messages} are taken"
                raise Refusal(413, message, code="request_too_large")
        return data

    @contextmanager
    def _hold(self, grant: Grant) -> Iterator[Callable[[int], None]]:
        """Return what counts the bytes of a body in progress; they are released at the end."""
        name, held = f"{grant.scope} {grant.attempt_id or grant.key_id}", 0
        own = self._limits.held_bytes // (4 if grant.scope == "attempt" or grant.is_live else 1)

        def more(size: int) -> None:
            nonlocal held
            if self._held_by[name] + size > own:
                message = f"requests of this key that are under way hold {own} bytes: wait for their answers"
                raise Refusal(429, message, "rate_limit_error", TOO_MUCH_AT_ONCE, {"retry-after": "1"})
            if self._held + size > self._limits.held_bytes:
                message = "requests that are under way hold all the memory that there is for them: send this again"
                raise Refusal(503, message, "server_error", "overloaded", {"retry-after": "1"})
            held += size
            self._held += size
            self._held_by[name] += size

        try:
            yield more
        finally:
            self._held -= held
            self._held_by[name] -= held
            if not self._held_by[name]:
                del self._held_by[name]


async def _read(given: dict[bytes, bytes], receive: Receive, limit: int, more: Callable[[int], None]) -> bytes:
    """Read a whole body as it was sent."""
    declared = given.get(b"content-length", b"0")
    if not declared.isdigit() or int(declared) > limit:
        raise too_large(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await _soon(receive, size)
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise too_large(limit)
        more(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _soon(receive: Receive, size: int) -> Message:
    """Return the next part of a body. `Guard` limits its time."""
    with waiting("request body", lambda: f"a client to continue after {size} bytes"):
        return await receive()


def _check_encoding(name: bytes) -> bytes:
    name = name.strip().lower()
    if name not in {b"identity", b"", b"gzip"}:
        raise Refusal(415, f"content-encoding {name.decode('latin-1')!r} is not supported; send gzip or none")
    return name


def _unpack_gzip(body: bytes, limit: int) -> bytes:
    """Gunzip a body, up to a size and to a multiple of its own, so that a bomb is never unpacked."""
    most = min(limit, max(_UNPACKED_FREE, _RATIO * len(body)))
    unpacker = zlib.decompressobj(wbits=31)  # 31: gzip with its header
    try:
        out = unpacker.decompress(body, most + 1)
    except zlib.error as error:
        raise bad_request(f"the body is not gzip: {error}") from None
    if len(out) > most:
        raise too_large(limit) if most == limit else _bursts(len(body), most)
    if not unpacker.eof:
        raise bad_request("the gzip body is cut off")
    if unpacker.unused_data:  # a second member, which some readers read and others do not
        raise bad_request("there is data after the gzip body")
    return out


def _bursts(size: int, most: int) -> Refusal:
    message = f"the gzip body of {size} bytes unpacks to more than {most}: send it in parts, or not compressed"
    return Refusal(413, message, code="request_too_large")


def parse_object(body: bytes, most: int, read: Callable[[bytes], Any] = read_json) -> dict[str, Any]:
    """Parse a JSON object of at most `MAX_DEPTH` levels.

    Args:
        body: the JSON.
        most: bytes of memory that it may take, not counting its texts.
        read: parses it.

    Raises:
        Refusal: it is not JSON, not an object, nested deeper, or would take more.
    """
    if weight.too_heavy(body, most):  # before it is parsed
        message = f"the body's objects, lists and texts would take more than {most} bytes of memory: send less at once"
        raise Refusal(413, message, code="request_too_large")
    try:
        data = read(body)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise bad_request("the body must be a JSON object")
    if weight.deeper_than(body, data, MAX_DEPTH):
        raise bad_request(f"the body is nested deeper than {MAX_DEPTH} levels")
    return data
