"""Finds what the bearer key of a request permits."""

from __future__ import annotations

import time
from typing import Final

from starlette.requests import Request
from starlette.types import Scope as HttpScope

from lightning_trainer.gateway.auth.ended_attempts import EndedAttempts
from lightning_trainer.gateway.auth.keys import Grant, KeyRefusedError, Keys, Scope
from lightning_trainer.gateway.http.errors import forbidden, unauthorized

_KNOWN: Final = 1000  # keys; more attempts rarely run at once


class Access:
    """Checks the keys of requests."""

    def __init__(self, keys: Keys, attempts: EndedAttempts) -> None:
        self._keys = keys
        self._attempts = attempts
        self._known: dict[str, Grant] = {}  # of keys that were checked before, because a check costs 0.1 ms

    async def admit(self, request: HttpScope, *scopes: Scope, late_s: float = 0.0) -> Grant:
        """Check the key of a request.

        Args:
            request: its ASGI scope.
            scopes: the permitted kinds of key.
            late_s: seconds after its attempt's end during which an attempt's key is still permitted.

        Raises:
            Refusal: no key, an invalid one (401), or one that does not permit this (403).
            StoreError: the store cannot say whether the attempt is still running.
        """
        token = _token(request)
        if not token:
            raise unauthorized("no key: send the header 'Authorization: Bearer KEY'")
        grant = self._grant(token)
        if grant.scope not in scopes:
            raise forbidden(f"a key of scope {grant.scope!r} may not do this; use one of scope {' or '.join(scopes)}")
        if grant.attempt_id is not None and grant.fence is not None:
            ended_s = await self._attempts.ended_at(grant.attempt_id, grant.fence)
            if ended_s is not None and time.time() >= ended_s + late_s:
                raise unauthorized("this key's attempt has ended")
        return grant

    def _grant(self, token: str) -> Grant:
        known = self._known.get(token)
        try:
            if known is not None:
                self._keys.check_grant(known)
                return known
            grant = self._keys.check(token)
        except KeyRefusedError as error:
            raise unauthorized(str(error)) from None
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known[token] = grant
        return grant


class Needs:
    """A FastAPI dependency: requires a key of one of these scopes, and returns what the key permits.

    Args:
        scopes: the permitted kinds of key.
    """

    def __init__(self, *scopes: Scope) -> None:
        self.scopes = scopes

    async def __call__(self, request: Request) -> Grant:
        """Check the key of a request; see `Access.admit`."""
        access: Access = request.app.state.access
        return await access.admit(request.scope, *self.scopes)


def _token(request: HttpScope) -> str:
    """Return the one key of a request. Anthropic's clients send it as ``x-api-key``."""
    headers: dict[bytes, bytes] = dict(request["headers"])
    kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    bearer = token.strip() if kind.lower() == "bearer" else ""
    other = headers.get(b"x-api-key", b"").decode("latin-1").strip()
    if bearer and other and bearer != other:
        raise unauthorized("Authorization and x-api-key contain two different keys: send one of them")
    return bearer or other
