"""Calls whose server is down: the outcome of their attempts says nothing about the policy, and others wait for it."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from lightning_spans.record.stalls import waiting
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.request.pending import PendingCall
from lightning_trainer.gateway.upstream.connection import Connection
from lightning_trainer.gateway.upstream.errors import BrokenError
from lightning_trainer.gateway.upstream.replicas import Replica, Replicas
from lightning_trainer.reasons.call_errors import ENGINE_ENDED, ENGINE_WAIT, LONG_WAIT_S

_SERVER_ERRORS: Final = 500
_LOOKS: Final = 2
_LOOK_S: Final = 1.0
_DOWN_S: Final = 180.0  # in which rollouts wait for servers that are down: vLLM starts within two minutes


async def wait_until_healthy(replicas: Replicas, pending: PendingCall, waits_for: str) -> dict[str, Any]:
    """Let a rollout's call wait while its servers are down: its tries would be used up before they are back.

    Returns:
        What the call's record says of the wait.
    """
    noted: dict[str, Any] = {}
    if pending.requested.grant.attempt_id is None or not replicas.all_down:
        return noted
    began = time.monotonic()
    try:
        with waiting("upstream", waits_for):
            await replicas.some_healthy(_DOWN_S)
    finally:
        waited_s = time.monotonic() - began
        if waited_s >= LONG_WAIT_S:
            noted[ENGINE_WAIT] = round(waited_s, 3)
            pending.note(**noted)
    return noted


async def down_note(
    error: BrokenError | Refusal, http: Connection, replica: Replica, pending: PendingCall
) -> dict[str, Any]:
    """Return what a failed call's record says of its server: `ENGINE_ENDED`, if it is down.

    A server that breaks the connection or cannot be reached is down. If it answers a call of an attempt with an error
    of its own, it is asked for its health, because vLLM answers the calls in progress before it ends.
    """
    if isinstance(error, BrokenError):
        down = not error.late
    else:
        own = error.status >= _SERVER_ERRORS and pending.requested.grant.attempt_id is not None
        down = own and await _is_unhealthy(http, replica)
    return {ENGINE_ENDED: True} if down else {}


async def _is_unhealthy(http: Connection, replica: Replica) -> bool:
    for look in range(_LOOKS):
        if look:
            await asyncio.sleep(_LOOK_S)
        try:
            await http.page(replica, "/../health")
        except BrokenError:
            return True
        except Refusal:  # a server without such a page
            return False
    return False
