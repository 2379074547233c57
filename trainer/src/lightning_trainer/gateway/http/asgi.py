"""HTTP at the level of ASGI: answer, and notice that the client has gone. `intake` reads bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Final, TypeVar

from starlette.types import Receive, Scope, Send

from lightning_spans.schema.json import dumps
from lightning_trainer.gateway.http.errors import Refusal

T = TypeVar("T")
_JSON_HEADERS: Final = [(b"content-type", b"application/json")]


class ClientGoneError(Exception):
    """The client closed the connection before it had its answer."""


def headers(scope: Scope) -> dict[bytes, bytes]:
    """Return the request's headers by lower-case name; of repeated ones the last."""
    return dict(scope["headers"])


async def send_bytes(
    send: Send, body: bytes, *, status: int = 200, extra: Mapping[str, str] | None = None, kind: bytes | None = None
) -> None:
    """Send a whole response, JSON unless `kind` names another content type."""
    lines = _JSON_HEADERS.copy() if kind is None else [(b"content-type", kind)]
    lines.append((b"content-length", b"%d" % len(body)))
    lines.extend((name.encode("latin-1"), value.encode("latin-1")) for name, value in (extra or {}).items())
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, data: Any, *, status: int = 200) -> None:
    """Send a JSON answer."""
    await send_bytes(send, dumps(data), status=status)


async def send_refusal(send: Send, refusal: Refusal, path: str) -> None:
    """Send an error in the format of the requested surface."""
    await send_bytes(send, refusal.body_for(path), status=refusal.status, extra=refusal.headers)


async def run_unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, but cancel it as soon as the client closes the connection.

    Raises:
        ClientGoneError: the client closed the connection before the work was done.
    """
    worker = asyncio.current_task()
    if worker is None:
        raise RuntimeError("there is no task to cancel")
    left = False

    async def watch() -> None:
        nonlocal left
        await _wait_for_disconnect(receive)
        left = True
        worker.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        result = await work
    except asyncio.CancelledError:
        if left and worker.uncancel() == 0:  # more than 0: the server is stopping too
            raise ClientGoneError from None
        raise
    finally:
        watcher.cancel()
    if left:
        worker.uncancel()  # the work ended anyway
    return result


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
