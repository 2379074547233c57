"""HTTP at the level of ASGI: read a body within limits, answer, notice that the client has gone."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any, Final, TypeVar

import orjson
from starlette.types import Message, Receive, Scope, Send

from lightning_spans.watch import waiting
from lightning_trainer.server.refusals import Refusal, bad_request, too_large

T = TypeVar("T")
BODY_S: Final = 120.0  # between two parts of a body
MAX_DEPTH: Final = 100  # levels of JSON; a chat request with tools has about ten
_JSON_HEADERS: Final = [(b"content-type", b"application/json")]


class ClientGoneError(Exception):
    """The client closed the connection before it had its answer."""


def headers(scope: Scope) -> dict[bytes, bytes]:
    """Give the request's headers by lower-case name; of repeated ones the last."""
    return dict(scope["headers"])


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Read the whole body, gunzipped where its header says so.

    Args:
        scope: of the request.
        receive: of the request.
        limit: most bytes, both as sent and unpacked.

    Raises:
        Refusal: it is larger than that (413), its encoding is not gzip (415) or is broken (400), or it does not come
            on (408).
        ClientGoneError: the client closed the connection.
    """
    given = headers(scope)
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
        parts.append(part)
        if not message.get("more_body", False):
            break
    body = parts[0] if len(parts) == 1 else b"".join(parts)
    return _unpacked(body, given.get(b"content-encoding", b"identity").strip().lower(), limit)


async def _soon(receive: Receive, size: int) -> Message:
    """Give the next part of a body. `Guard` sees to it that it does not take for ever."""
    with waiting("request body", lambda: f"a client to go on after {size} bytes"):
        return await receive()


def _unpacked(body: bytes, encoding: bytes, limit: int) -> bytes:
    if encoding in {b"identity", b""}:
        return body
    if encoding != b"gzip":
        raise Refusal(415, f"content-encoding {encoding.decode('latin-1')!r} is not taken; send gzip or none")
    unpacker = zlib.decompressobj(wbits=31)  # 31: gzip with its header
    try:
        out = unpacker.decompress(body, limit + 1)  # stops there: a bomb is never unpacked
    except zlib.error as error:
        raise bad_request(f"the body is not gzip: {error}") from None
    if len(out) > limit:
        raise too_large(limit)
    if not unpacker.eof:
        raise bad_request("the gzip body is cut off")
    if unpacker.unused_data:  # another member, which some read on and others don't
        raise bad_request("something stands behind the gzip body")
    return out


def parse_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object of at most `MAX_DEPTH` levels.

    Raises:
        Refusal: it is not JSON, not an object, or nested deeper.
    """
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise bad_request("the body must be a JSON object")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and deeper_than(data, MAX_DEPTH):
        raise bad_request(f"the body is nested deeper than {MAX_DEPTH} levels")
    return data


def deeper_than(data: Any, levels: int) -> bool:
    """Whether lists and objects lie in each other more than so many levels deep. Never recurses."""
    layer: Iterable[Any] = [data]
    for _ in range(levels + 1):
        held = [item for item in layer if isinstance(item, (dict, list))]
        if not held:
            return False
        layer = [inner for item in held for inner in (item.values() if isinstance(item, dict) else item)]
    return True


async def send_bytes(
    send: Send, body: bytes, *, status: int = 200, extra: Mapping[str, str] | None = None, kind: bytes | None = None
) -> None:
    """Send a whole answer, JSON unless `kind` names another content type."""
    lines = _JSON_HEADERS.copy() if kind is None else [(b"content-type", kind)]
    lines.append((b"content-length", b"%d" % len(body)))
    lines.extend((name.encode("latin-1"), value.encode("latin-1")) for name, value in (extra or {}).items())
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, data: Any, *, status: int = 200) -> None:
    """Send a JSON answer."""
    await send_bytes(send, orjson.dumps(data), status=status)


async def send_refusal(send: Send, refusal: Refusal, path: str) -> None:
    """Send a refusal in the shape of the surface that was asked."""
    await send_bytes(send, refusal.body_for(path), status=refusal.status, extra=refusal.headers)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, but cancel it as soon as the client closes the connection.

    Raises:
        ClientGoneError: the client closed the connection before the work was done.
    """
    worker = asyncio.current_task()
    if worker is None:
        raise RuntimeError("there is no task that could be cancelled")
    left = False

    async def watch() -> None:
        nonlocal left
        await _gone(receive)
        left = True
        worker.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        result = await work
    except asyncio.CancelledError:
        if left and worker.uncancel() == 0:  # more than 0: the server stops too
            raise ClientGoneError from None
        raise
    finally:
        watcher.cancel()
    if left:
        worker.uncancel()  # the work ended all the same
    return result


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
