"""Quotas per key: bytes, model calls and spans, of an attempt in total and of a live key per hour."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from lightning_spans.terms import TENANT
from lightning_trainer.gateway.auth.keys import Grant
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.settings import Limits
from lightning_trainer.reasons.call_errors import QUOTA_EXCEEDED

HOUR_S: Final = 3600.0
_REMEMBERED: Final = 20_000  # attempts and live keys


@dataclass(slots=True)
class _QuotaUse:
    since_s: float
    amounts: dict[str, int] = field(default_factory=dict)


class Quotas:
    """Counts what each key has sent since the server's start. Keys of people and runners have no quota."""

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = {
            "attempt": {
                "bytes": limits.attempt_bytes,
                "model calls": limits.attempt_calls,
                "spans": limits.attempt_spans,
            },
            **{scope: {"bytes": limits.live_bytes, "spans": limits.live_spans} for scope in ("live", "caller")},
        }
        self._clock = clock
        self._used: OrderedDict[str, _QuotaUse] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, grant: Grant, what: str, amount: int = 1) -> None:
        """Count what a request sends.

        Args:
            grant: of its key.
            what: ``bytes``, ``model calls`` or ``spans``.
            amount: how much; not counted if it is rejected.

        Raises:
            Refusal: it exceeds the key's quota (429): of a live key for the rest of its hour, of an attempt
                permanently.
        """
        most = self._most.get(grant.scope, {}).get(what)
        if most is None:
            return
        with self._lock:
            used = self._of(grant)
            total = used.amounts.get(what, 0) + amount
            if total <= most:
                used.amounts[what] = total
                return
            left_s = HOUR_S - (self._clock() - used.since_s)
        raise _quota_refusal(grant, what, most, left_s)

    def forget(self, attempt_id: str) -> None:
        """Drop the counts of an attempt whose key has expired."""
        with self._lock:
            self._used.pop(f"attempt {attempt_id}", None)

    def _of(self, grant: Grant) -> _QuotaUse:
        tenant = dict(grant.terms).get(TENANT)
        holder = f"{grant.scope} {grant.attempt_id or grant.key_id}"
        name, now = f"tenant {tenant}" if tenant else holder, self._clock()  # keys of one tenant share its quota
        used = self._used.get(name)
        if used is None or (grant.is_live and now - used.since_s >= HOUR_S):
            used = self._used[name] = _QuotaUse(now)
        self._used.move_to_end(name)
        while len(self._used) > _REMEMBERED:
            self._used.popitem(last=False)
        return used


def _quota_refusal(grant: Grant, what: str, most: int, left_s: float) -> Refusal:
    if grant.is_live:
        wait_s = max(1, round(left_s))
        message = (
            f"this {grant.scope} key has sent {most} {what} in an hour, the most that it may: send more in {wait_s} s"
        )
        return Refusal(429, message, "rate_limit_error", QUOTA_EXCEEDED, {"retry-after": str(wait_s)})
    message = (
        f"this attempt has sent {most} {what}, the most that it may. If that is too few, start the server with a higher"
        f" --limit attempt_{what.rpartition(' ')[2]}=N."
    )
    return Refusal(429, message, "rate_limit_error", QUOTA_EXCEEDED, {"x-should-retry": "false"})
