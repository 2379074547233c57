"""Changes the weights of policies behind upstreams: ``/api/policies``, with an admin's key."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from starlette.types import Receive, Scope, Send

from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.auth.access import Access
from lightning_trainer.gateway.calls.models import ServedModels
from lightning_trainer.gateway.http.asgi import send_json
from lightning_trainer.gateway.http.errors import Refusal, bad_request
from lightning_trainer.gateway.http.masking import masking_logger
from lightning_trainer.gateway.intake.intake import Intake
from lightning_trainer.gateway.request.fields import number, whole, wrong
from lightning_trainer.gateway.upstream.adapters import AdapterServers, SavedAdapter, adapters_in, load_saved
from lightning_trainer.gateway.upstream.upstream import UpstreamPolicy

logger = masking_logger(__name__)
_BODY_BYTES: Final = 65_536
_LONGEST_S: Final = 3600.0


class UpstreamControl:
    """Pauses, drains and resumes; loads adapters.

    To update the weights of a server: pause its policy, which waits until no call is in progress, load the weights
    there, and resume with the new number: every later call is recorded with it. Adapters need no pause: those of
    another checkpoint are loaded next to the ones in use, which are unloaded after their last call.
    """

    def __init__(self, models: ServedModels, access: Access, intake: Intake) -> None:
        self._models = models
        self._access = access
        self._intake = intake
        self._loading = asyncio.Lock()
        self._unloading: set[asyncio.Task[None]] = set()

    @property
    def _policies(self) -> dict[str, UpstreamPolicy]:
        served = self._models.by_name()
        return {name: model for name, model in served.items() if isinstance(model, UpstreamPolicy)}

    async def page(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI signature
        """Answer ``GET /api/policies``: the state of every upstream."""
        await self._access.admit(scope, "admin")
        await send_json(send, {"policies": [policy.describe() for policy in self._policies.values()]})

    async def pause(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /api/policies/pause {"model", "drain_s"}`` with the number of calls still in progress.

        Raises:
            Refusal: not an admin's key, a malformed body, or no such upstream.
        """
        body = await self._body(scope, receive, "model", "drain_s")
        policy = self._policy(body)
        policy.replicas.pause()
        left = await policy.replicas.drained(number(body, "drain_s", 60.0, low=0.0, high=_LONGEST_S) or 0.0)
        await send_json(send, {**policy.describe(), "in_flight": left})

    async def resume(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /api/policies/resume {"model", "version"}``.

        Raises:
            Refusal: not an admin's key, a malformed body, or no such upstream.
        """
        body = await self._body(scope, receive, "model", "version")
        policy = self._policy(body)
        version = whole(body, "version", None, low=0)
        policy.version = policy.version if version is None else version
        policy.replicas.resume()
        await send_json(send, policy.describe())

    async def adapters(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer ``POST /api/policies/adapters {"checkpoint", "version"}``: these adapters answer the next calls.

        Raises:
            Refusal: not an admin's key, a malformed body, or adapters that are not served here or cannot be loaded.
        """
        body = await self._body(scope, receive, "checkpoint", "version")
        version = whole(body, "version", None, low=0)
        checkpoint = body.get("checkpoint")
        if not isinstance(checkpoint, str) or not checkpoint:
            raise wrong("checkpoint", checkpoint, "the folder of a checkpoint with adapters")
        async with self._loading:
            try:
                saved = await asyncio.to_thread(adapters_in, Path(checkpoint))
                policies = [self._adapter_policy(each) for each in saved]
                upstream = policies[0].upstream
                urls = (upstream.url, *upstream.replicas)
                await asyncio.to_thread(load_saved, saved, urls, upstream.key, replaces=False)
            except ConfigError as error:
                raise bad_request(str(error), "adapters_not_loaded") from None
            for policy, each in zip(policies, saved, strict=True):
                self._switch(policy, each, version)
        await send_json(send, {"policies": [policy.describe() for policy in policies]})

    def _adapter_policy(self, saved: SavedAdapter) -> UpstreamPolicy:
        """Return the policy that an adapter belongs to."""
        policy = self._policies.get(saved.name)
        if policy is None or policy.upstream.served is None:
            adapters = ", ".join(name for name, each in self._policies.items() if each.upstream.served) or "none"
            message = f"no adapter {saved.name!r} is served here. Adapters: {adapters}; they are set by --adapters"
            raise Refusal(404, message, code="model_not_found")
        return policy

    def _switch(self, policy: UpstreamPolicy, saved: SavedAdapter, version: int | None) -> None:
        """Send a policy's next calls to other weights, and unload the previous ones after their last call."""
        before = policy.names.newest.name
        policy.version = policy.version if version is None else version

        def unused() -> None:
            task = asyncio.get_running_loop().create_task(self._unload(policy, before))
            self._unloading.add(task)
            task.add_done_callback(self._unloading.discard)

        policy.names.switch(saved.served, policy.version, unused)

    async def _unload(self, policy: UpstreamPolicy, served: str) -> None:
        async with self._loading:
            if served in policy.names.in_use:  # it answers again by now
                return
            upstream = policy.upstream
            try:
                with AdapterServers((upstream.url, *upstream.replicas), upstream.key) as servers:
                    await asyncio.to_thread(servers.unload, served)
            except ConfigError as error:
                logger.warning("the adapter %s, which no longer answers, was not unloaded: %s", served, error)

    async def _body(self, scope: Scope, receive: Receive, *names: str) -> dict[str, Any]:
        grant = await self._access.admit(scope, "admin")
        body = await self._intake.object(scope, receive, grant, _BODY_BYTES)
        if unknown := body.keys() - set(names):
            raise wrong(min(unknown), body[min(unknown)], f"left out: there are {' and '.join(names)}")
        return body

    def _policy(self, body: Mapping[str, Any]) -> UpstreamPolicy:
        policy = self._policies.get(str(body.get("model")))
        if policy is None:
            known = ", ".join(self._policies) or "none"
            raise Refusal(404, f"no upstream {body.get('model')!r}. Upstreams: {known}", code="model_not_found")
        return policy
