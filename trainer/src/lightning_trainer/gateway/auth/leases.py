"""Leases belong to the runner key that claimed the attempt. No other key may renew, end or reward the attempt."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

from lightning_spans.schema.attempts import AttemptRecord
from lightning_spans.store import Store
from lightning_trainer.gateway.auth.keys import Grant
from lightning_trainer.gateway.http.errors import forbidden

UNNAMED: Final = "runner"  # holder of runner keys without a name
_REMEMBERED: Final = 20_000  # attempts; for older ones the store is asked again


class _Lease(NamedTuple):
    holder: str
    rollout_id: str


class Leases:
    """Knows the holder of each attempt's lease.

    It is the part of the worker's name before the slash, so it is in the store.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._leases: OrderedDict[str, _Lease] = OrderedDict()  # by attempt
        self._lock = threading.Lock()

    def worker(self, grant: Grant, name: str) -> str:
        """Return the name under which a worker claims."""
        return name if grant.scope == "admin" else f"{_holder(grant)}/{name}"

    def claimed(self, records: Iterable[AttemptRecord]) -> None:
        """Note attempts that were just claimed."""
        with self._lock:
            for record in records:
                self._leases[record.attempt_id] = _lease_of(record)
                self._leases.move_to_end(record.attempt_id)
            while len(self._leases) > _REMEMBERED:
                self._leases.popitem(last=False)

    def of_others(self, grant: Grant, attempt_ids: Collection[str]) -> set[str]:
        """Return the attempts that were claimed with other keys. To an admin, all attempts are permitted.

        Raises:
            StoreError: the store cannot be asked.
        """
        if grant.scope == "admin":
            return set()
        leases = self._find(attempt_ids)
        return {name for name, lease in leases.items() if lease.holder != _holder(grant)}

    def own_rollouts(self, grant: Grant, attempt_ids: Collection[str]) -> dict[str, str]:
        """Return the rollouts of those attempts that were claimed with this key, whether they have ended or not.

        Raises:
            StoreError: the store cannot be asked.
        """
        leases = self._find(attempt_ids)
        return {name: lease.rollout_id for name, lease in leases.items() if lease.holder == _holder(grant)}

    def _find(self, attempt_ids: Collection[str]) -> dict[str, _Lease]:
        with self._lock:
            known = {name: self._leases[name] for name in attempt_ids if name in self._leases}
        if unknown := [name for name in attempt_ids if name not in known]:
            records = self._store.attempts(attempt_ids=unknown)
            self.claimed(records)
            known |= {record.attempt_id: _lease_of(record) for record in records}
        return known

    def check(self, grant: Grant, attempt_ids: Collection[str]) -> None:
        """Check that a key owns attempts. Those unknown to the store are left to the store.

        Raises:
            Refusal: one was claimed with another key.
            StoreError: the store cannot be asked.
        """
        if others := self.of_others(grant, attempt_ids):
            raise forbidden(f"attempt {min(others)!r} was claimed with a different key")


def _lease_of(record: AttemptRecord) -> _Lease:
    return _Lease(record.worker.partition("/")[0], record.rollout.rollout_id)


def _holder(grant: Grant) -> str:
    return (grant.holder or UNNAMED).replace("/", "_")
