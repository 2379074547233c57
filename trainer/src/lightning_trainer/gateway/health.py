"""The server's health at this moment.

``GET /livez``: the process answers. ``GET /readyz``: the store accepts writes and every policy has a server that
answers. ``GET /healthz``: everything that is known, for people; it fails if any part fails.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

import orjson
from starlette.types import Receive, Scope, Send

from lightning_spans.record.stalls import stalls
from lightning_spans.store import Store
from lightning_trainer.gateway.calls.embedded import EmbeddedEngine
from lightning_trainer.gateway.http.asgi import send_bytes
from lightning_trainer.gateway.http.masking import mask_secrets
from lightning_trainer.gateway.ingest.writer import RecordWriter
from lightning_trainer.gateway.upstream.upstream import UpstreamPolicy

_FRESH_S: Final = 1.0  # one check serves everybody who asks within this time, because it needs no key
_ANSWER_S: Final = 5.0


class Health:
    """Checks store and engine on request."""

    def __init__(
        self,
        store: Store,
        writer: RecordWriter,
        engines: Sequence[EmbeddedEngine],
        upstreams: Sequence[UpstreamPolicy],
        keys: Callable[[], dict[str, Any] | None] = lambda: None,
    ) -> None:
        self._keys = keys
        self._store = store
        self._writer = writer
        self._engines = engines
        self._upstreams = upstreams
        self._checked_s = float("-inf")
        self._answer: dict[str, Any] = {}
        self._lock = asyncio.Lock()

    async def page(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI signature
        """Answer 200 if everything works, otherwise 503; the body says which part does not and why."""
        await _send(send, await self._check_state())

    async def live(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Answer 200: only a process that does not answer must be restarted."""
        await _send(send, {"status": "ok"})

    async def ready(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Answer 200 if the store accepts writes and every policy has a server that answers, otherwise 503.

        An engine whose last call failed is ready: only its next call can show that it works again.
        """
        found = await self._check_state()
        parts = {"store": found["store"], **found["upstreams"]}
        if found["engine"] is not None and not all(map(_can_be_asked, self._engines)):
            parts["engine"] = found["engine"]
        down = sorted(name for name, part in parts.items() if part["status"] != "ok")
        await _send(send, {"status": "error" if down else "ok", "not_ready": down})

    async def _check_state(self) -> dict[str, Any]:
        async with self._lock:
            if time.monotonic() - self._checked_s >= _FRESH_S:
                self._answer = await self._check()
                self._checked_s = time.monotonic()
        return self._answer

    async def _check(self) -> dict[str, Any]:
        store = await self._check_store()
        engine = self._check_engine()
        stalled = [asdict(stall) for stall in stalls()]
        upstreams = {policy.upstream.model: _upstream_state(policy) for policy in self._upstreams}
        keys = self._keys()
        parts = [store, *(part for part in (engine, keys) if part is not None), *upstreams.values()]
        well = all(part["status"] == "ok" for part in parts) and not stalled
        found = {"store": store, "engine": engine, "upstreams": upstreams, "keys": keys, "stalled": stalled}
        return {"status": "ok" if well else "error", **found}

    async def _check_store(self) -> dict[str, Any]:
        try:
            await asyncio.wait_for(asyncio.to_thread(self._try_store), _ANSWER_S)
        except TimeoutError:
            return {"status": "error", "error": f"no answer within {_ANSWER_S:g} s"}
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            return {"status": "error", "error": f"{type(error).__name__}: {error}"}
        if (failed := self._writer.last_error) is not None:
            return {"status": "error", "error": f"the last write failed: {type(failed).__name__}: {failed}"}
        return {"status": "ok"}

    def _try_store(self) -> None:
        self._store.rollouts(rollout_ids=["healthz"])
        self._store.heartbeat([])  # uses the path of every write, and changes nothing visible

    def _check_engine(self) -> dict[str, Any] | None:
        """Return the engine's state: the first policy's; of several, the first that failed."""
        states = [_state(engine) for engine in self._engines]
        shown = next((state for state in states if state["status"] != "ok"), states[0] if states else None)
        if shown is not None and len(states) > 1:
            shown = {**shown, "policies": {state.get("model"): state.get("version") for state in states}}
        return shown


async def _send(send: Send, answer: dict[str, Any]) -> None:
    body = mask_secrets(orjson.dumps(answer).decode()).encode()  # the request needs no key
    await send_bytes(send, body, status=200 if answer["status"] == "ok" else 503)


def _can_be_asked(engine: EmbeddedEngine) -> bool:
    return "version" in _state(engine)


def _upstream_state(policy: UpstreamPolicy) -> dict[str, Any]:
    """Return an upstream's state, but not its address, because this page needs no key."""
    replicas = policy.replicas
    well = sum(replica.failure is None for replica in replicas.all)
    counts = {"replicas": len(replicas.all), "well": well, "paused": replicas.paused}
    return {"status": "ok" if well else "error", **counts}


def _state(engine: EmbeddedEngine) -> dict[str, Any]:
    try:
        state: dict[str, Any] = {"model": engine.engine.model, "version": engine.engine.version}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        return {"status": "error", "error": f"{type(error).__name__}: {error}"}
    if engine.failure is not None:
        return {**state, "status": "error", "error": f"the last call failed: {engine.failure}"}
    return {**state, "status": "ok"}
