"""Whose an attempt is: the runner key's that claimed it. Nobody else may renew its lease, end it or reward it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Final

from lightning_spans.schema.attempts import AttemptRecord
from lightning_spans.store import Store
from lightning_trainer.gateway.auth.keys import Grant
from lightning_trainer.gateway.http.errors import forbidden

UNNAMED: Final = "runner"  # holder of the runner keys that name nobody
_REMEMBERED: Final = 20_000  # attempts; older ones are asked of the store again


class Leases:
    """Knows the holder of each attempt's lease. It stands before a slash in the worker's name, so the store has it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._workers: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()

    def worker(self, grant: Grant, name: str) -> str:
        """Return the name under which a worker claims."""
        return name if grant.scope == "admin" else f"{_holder(grant)}/{name}"

    def claimed(self, records: Iterable[AttemptRecord]) -> None:
        """Note attempts that were just claimed."""
        with self._lock:
            for record in records:
                self._workers[record.attempt_id] = record.worker
                self._workers.move_to_end(record.attempt_id)
            while len(self._workers) > _REMEMBERED:
                self._workers.popitem(last=False)

    def of_others(self, grant: Grant, attempt_ids: Collection[str]) -> set[str]:
        """Return those of the attempts that were claimed with other keys; an admin's are all.

        Raises:
            StoreError: the store can't be asked.
        """
        if grant.scope == "admin":
            return set()
        with self._lock:
            known = {name: self._workers[name] for name in attempt_ids if name in self._workers}
        if unknown := [name for name in attempt_ids if name not in known]:
            found = self._store.attempts(attempt_ids=unknown)
            self.claimed(found)
            known |= {record.attempt_id: record.worker for record in found}
        return {name for name, worker in known.items() if worker.partition("/")[0] != _holder(grant)}

    def check(self, grant: Grant, attempt_ids: Collection[str]) -> None:
        """See that attempts are those of a key; what the store does not know is left to the store.

        Raises:
            Refusal: one was claimed with another key.
            StoreError: the store can't be asked.
        """
        if others := self.of_others(grant, attempt_ids):
            raise forbidden(f"attempt {min(others)!r} was claimed with another key than this one")


def _holder(grant: Grant) -> str:
    return (grant.holder or UNNAMED).replace("/", "_")
