"""The servers that answer for one policy: which one an attempt's calls use, which are healthy, and when all pause."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.request.constraints import Form
from lightning_trainer.gateway.upstream.dialects import Dialect
from lightning_trainer.gateway.upstream.token_protocols import TokenServer

_ATTEMPTS: Final = 20_000  # attempts whose replica is kept; far more than run at once


@dataclass(slots=True, eq=False)
class Replica:
    """One server.

    Attributes:
        url: base URL, with its ``/v1``.
        in_flight: calls that it is answering.
        failure: why it gets no calls; None while it is healthy.
        failed_at: monotonic time in seconds at which it ceased to be healthy.
        dialect: how tokens are requested from it; None: not known yet.
        again_at: monotonic time in seconds from which the dialect is requested again; never if the server has named it.
        raw_logprobs: whether its log-probabilities ignore the temperature; None: not known yet.
        tokens: how it is sent token ids, or why it is sent messages; None: not known yet.
        form: its format for an answer's required form, or ``none``; None: not known yet.
    """

    url: str
    in_flight: int = 0
    failure: str | None = None
    failed_at: float = -math.inf
    dialect: Dialect | None = None
    again_at: float = math.inf
    raw_logprobs: bool | None = None
    tokens: TokenServer | str | None = None
    form: Form | Literal["none"] | None = None


class Replicas:
    """Chooses replicas.

    All calls of an attempt use one while it is healthy, because it caches the attempt's prompts.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = tuple(Replica(url) for url in urls)
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._homed = dict.fromkeys(self.all, 0)
        self._going = asyncio.Event()
        self._going.set()
        self._changed = asyncio.Event()
        self._healthy = asyncio.Event()
        self._healthy.set()

    def choose(self, attempt_id: str | None, but: Collection[Replica] = ()) -> Replica | None:
        """Return the replica for a call.

        Args:
            attempt_id: the calling attempt; None: none, and the least busy replica is chosen.
            but: those that failed this call.

        Returns:
            A healthy one; if there is none, an unhealthy one (it may have recovered); None if all failed this call.
        """
        left = [replica for replica in self.all if replica not in but]
        candidates = [replica for replica in left if replica.failure is None] or left
        home = self._homes.get(attempt_id) if attempt_id is not None else None
        if home in candidates or not candidates:
            return home if home in candidates else None
        chosen = min(candidates, key=lambda replica: (replica.in_flight, self._homed[replica]))
        if attempt_id is not None:
            self.forget(attempt_id)
            self._homes[attempt_id] = chosen
            self._homed[chosen] += 1
            if len(self._homes) > _ATTEMPTS:
                self.forget(next(iter(self._homes)))
        return chosen

    def forget(self, attempt_id: str) -> None:
        """Drop an attempt that has ended."""
        home = self._homes.pop(attempt_id, None)
        if home is not None:
            self._homed[home] -= 1

    @contextmanager
    def answering(self, replica: Replica) -> Iterator[None]:
        """Count a call as being answered within the block."""
        replica.in_flight += 1
        try:
            yield
        finally:
            replica.in_flight -= 1
            self._changed.set()

    # Which are healthy.

    def fail(self, replica: Replica, why: str) -> None:
        """Note that a replica is not healthy."""
        if replica.failure is None:
            replica.failed_at = time.monotonic()
        replica.failure = why
        if all(each.failure is not None for each in self.all):
            self._healthy.clear()

    def recover(self, replica: Replica) -> None:
        """Note that a replica is healthy."""
        replica.failure = None
        self._healthy.set()

    @property
    def all_down(self) -> bool:
        """Whether none is healthy."""
        return not self._healthy.is_set()

    async def some_healthy(self, down_s: float) -> None:
        """Wait while all replicas are down, but not for one that never answered, or has been down for `down_s`."""
        known = (replica.failed_at for replica in self.all if replica.dialect is not None)
        left_s = max(known, default=-math.inf) + down_s - time.monotonic()
        if self.all_down and left_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._healthy.wait(), left_s)

    # While weights change.

    @property
    def paused(self) -> bool:
        """Whether calls wait."""
        return not self._going.is_set()

    def pause(self) -> None:
        """Let running calls end, and hold the others until `resume`."""
        self._going.clear()

    def resume(self) -> None:
        """Continue."""
        self._going.set()

    async def drained(self, timeout_s: float) -> int:
        """Wait until no call is in progress, or for so many seconds. Returns the number still in progress."""
        until = time.monotonic() + timeout_s
        while going := sum(replica.in_flight for replica in self.all):
            self._changed.clear()
            left_s = until - time.monotonic()
            if left_s <= 0:
                return going
            try:
                await asyncio.wait_for(self._changed.wait(), left_s)
            except TimeoutError:
                continue
        return 0

    async def may_go(self, timeout_s: float) -> None:
        """Wait while calls are held.

        Raises:
            Refusal: for longer than that (503).
        """
        if self._going.is_set():
            return
        try:
            await asyncio.wait_for(self._going.wait(), timeout_s)
        except TimeoutError:
            message = f"the policy has been paused for {timeout_s:g} s. Try again later."
            raise Refusal(503, message, "server_error", "paused", {"retry-after": "10"}) from None
