"""Rejects requests before the app sees them: unknown host names, ambiguous headers, bodies that never end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightning_trainer.gateway.http.asgi import send_refusal
from lightning_trainer.gateway.http.errors import Refusal, bad_request

BODY_S: Final = 120.0  # seconds for a request's whole body
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]", "::1", ""})
# Requests are smuggled past a proxy if one reader takes the first and another the last of two such headers.
_ONCE: Final = frozenset({
    b"authorization", b"x-api-key", b"host", b"content-length", b"content-encoding", b"content-type",
    b"transfer-encoding", b"traceparent", b"x-lightning-traceparent", b"x-lightning-agent",
})  # fmt: skip


def is_loopback(host: str) -> bool:
    """Whether an address to listen on belongs to this machine alone."""
    return host != "" and (host in _LOOPBACK or host.startswith("127."))


class Guard:
    """An ASGI app in front of the app.

    Args:
        app: the app.
        names: host names under which it may be requested; None: any. A web page that makes its own name point to this
            machine (DNS rebinding) uses that name.
        body_s: seconds that a request's body may take.
    """

    def __init__(self, app: ASGIApp, *, names: Iterable[str] | None = None, body_s: float = BODY_S) -> None:
        self._app = app
        self._names = None if names is None else frozenset(name.lower() for name in names)
        self._body_s = body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or pass it to the app."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await send_refusal(send, refusal, scope["path"])
            return
        body = _Body(receive, send, self._body_s)
        try:
            await self._app(scope, body.receive, body.send)
        except Exception:
            if not body.late:
                raise
        if body.late and not body.answered:
            late = Refusal(408, f"the body did not arrive within {self._body_s:g} s")
            await send_refusal(send, late, scope["path"])

    def _refusal(self, scope: Scope) -> Refusal | None:
        seen: set[bytes] = set()
        for name, value in scope["headers"]:
            if name in _ONCE:
                if name in seen:
                    return bad_request(f"the header {name.decode()} appears twice: send it once")
                seen.add(name)
                if name == b"host" and self._names is not None:
                    asked = _name(value.decode("latin-1"))
                    if asked not in self._names:
                        return Refusal(421, "the header Host does not contain a name of this server", code="wrong_host")
        return None


class _Body:
    """One request's body, with a time limit, and its response."""

    def __init__(self, receive: Receive, send: Send, seconds: float) -> None:
        self._receive, self._send = receive, send
        self._seconds = seconds
        self._until: float | None = None
        self._whole = False
        self.late = self.answered = False

    async def receive(self) -> Message:
        """Return the next piece of the body; after its end, whatever comes."""
        if self._whole:
            return await self._receive()
        loop = asyncio.get_running_loop()
        self._until = self._until or loop.time() + self._seconds
        try:
            async with asyncio.timeout_at(self._until):
                message = await self._receive()
        except TimeoutError:
            self.late = True
            return {"type": "http.disconnect"}
        self._whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Pass a response on, unless the request was given up."""
        if not self.late or self.answered:
            self.answered = True
            await self._send(message)


def _name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower()


def loopback_names(more: Iterable[str] = ()) -> frozenset[str]:
    """Return the names of a server that only its own machine reaches, and others that the user gave it."""
    return frozenset({"localhost", "127.0.0.1", "[::1]", *more})
