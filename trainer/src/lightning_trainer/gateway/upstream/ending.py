"""Whether a call failed because its server is down. Then the outcome of its attempt says nothing about the policy."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.request.pending import PendingCall
from lightning_trainer.gateway.upstream.connection import Connection
from lightning_trainer.gateway.upstream.errors import BrokenError
from lightning_trainer.gateway.upstream.replicas import Replica
from lightning_trainer.reasons.call_errors import ENGINE_ENDED

_SERVER_ERRORS: Final = 500
_LOOKS: Final = 2
_LOOK_S: Final = 1.0


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
