"""Policies behind upstreams held still while their weights change: ``/api/policies``, with an admin's key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from lightning_trainer.gateway.auth.access import Access
from lightning_trainer.gateway.http.asgi import send_json
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.intake.intake import Intake
from lightning_trainer.gateway.request.fields import number, whole, wrong
from lightning_trainer.gateway.upstream.upstream import UpstreamPolicy

_BODY_BYTES: Final = 65_536
_LONGEST_S: Final = 3600.0


class UpstreamControl:
    """Pauses, drains and resumes.

    Whoever updates the weights of a server pauses its policy, which waits until no call is under way, loads the weights
    there, and resumes with the number of the new ones: every later call is recorded with it.
    """

    def __init__(self, policies: Sequence[UpstreamPolicy], access: Access, intake: Intake) -> None:
        self._policies = {policy.upstream.model: policy for policy in policies}
        self._access = access
        self._intake = intake

    async def page(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI signature
        """Answer ``GET /api/policies``: how every upstream is."""
        await self._access.admit(scope, "admin")
        await send_json(send, {"policies": [policy.describe() for policy in self._policies.values()]})

    async def pause(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /api/policies/pause {"model", "drain_s"}`` with the number of calls still under way.

        Raises:
            Refusal: no admin's key, a malformed body, or no such upstream.
        """
        body = await self._body(scope, receive)
        policy = self._policy(body)
        policy.replicas.pause()
        left = await policy.replicas.drained(number(body, "drain_s", 60.0, low=0.0, high=_LONGEST_S) or 0.0)
        await send_json(send, {**policy.describe(), "in_flight": left})

    async def resume(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /api/policies/resume {"model", "version"}``.

        Raises:
            Refusal: no admin's key, a malformed body, or no such upstream.
        """
        body = await self._body(scope, receive)
        policy = self._policy(body)
        version = whole(body, "version", None, low=0)
        policy.version = policy.version if version is None else version
        policy.replicas.resume()
        await send_json(send, policy.describe())

    async def _body(self, scope: Scope, receive: Receive) -> dict[str, Any]:
        grant = await self._access.admit(scope, "admin")
        body = await self._intake.object(scope, receive, grant, _BODY_BYTES)
        if unknown := body.keys() - {"model", "drain_s", "version"}:
            raise wrong(min(unknown), body[min(unknown)], "left out: there are model, drain_s and version")
        return body

    def _policy(self, body: Mapping[str, Any]) -> UpstreamPolicy:
        policy = self._policies.get(str(body.get("model")))
        if policy is None:
            known = ", ".join(self._policies) or "none"
            raise Refusal(404, f"no upstream {body.get('model')!r}. Upstreams: {known}", code="model_not_found")
        return policy
