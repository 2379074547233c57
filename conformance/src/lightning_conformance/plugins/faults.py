"""Faults for every method of a store, generated from the protocol: as when machines and networks fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

from lightning_spans.errors import StoreError
from lightning_spans.store import Store

Fault: TypeAlias = Literal["before", "after", "delay", "cut"]
FAULTS: Final[tuple[Fault, ...]] = get_args(Fault)
METHODS: Final = tuple(name for name, value in vars(Store).items() if callable(value) and not name.startswith("_"))
"""Every method of the protocol but the constructor; a new one is among them without anybody's doing."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One planned fault.

    Attributes:
        method: of the store.
        fault: ``before``: an error, nothing done. ``after``: done, then an error instead of the answer. ``delay``: done
            late. ``cut``: the caller gets an error at once, while the work continues and is done later.
        nth: index of the affected call of the method, 0 for the first.
    """

    method: str
    fault: Fault
    nth: int = 0


class FaultyStore:
    """A store that fails as planned, and passes everything else on.

    Args:
        store: the working store.
        plan: the faults.
        delay_s: seconds that a delay lasts, and before the work of a cut call begins.
    """

    def __init__(self, store: Store, plan: Sequence[PlannedFault], *, delay_s: float = 0.05) -> None:
        self._store = store
        self._plan = {(fault.method, fault.nth): fault.fault for fault in plan}
        self._delay_s = delay_s
        self._calls = dict.fromkeys(METHODS, 0)
        self._lock = threading.Lock()
        self._late: list[threading.Thread] = []

    def __getattr__(self, name: str) -> Any:
        if name not in METHODS:
            raise AttributeError(name)
        real = getattr(self._store, name)

        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                nth = self._calls[name]
                self._calls[name] += 1
            fault = self._plan.get((name, nth))
            return real(*args, **options) if fault is None else self._meet(fault, lambda: real(*args, **options))

        return call

    def _meet(self, fault: Fault, work: Callable[[], Any]) -> Any:
        if fault == "before":
            raise StoreError("a fault of this test, before anything was done")
        if fault == "cut":
            late = threading.Thread(target=self._later, args=(work,))
            self._late.append(late)
            late.start()
            raise StoreError("a fault of this test: the connection was cut, and the work continues")
        if fault == "delay":
            time.sleep(self._delay_s)
        answer = work()
        if fault == "after":
            raise StoreError("a fault of this test, after all was done")
        return answer

    def _later(self, work: Callable[[], Any]) -> None:
        time.sleep(self._delay_s)
        try:
            work()
        except StoreError:
            return  # nobody waits for this answer any more, and it may be too late

    def called(self, method: str) -> int:
        """Return how often a method was called."""
        return self._calls[method]

    def settled(self) -> None:
        """Wait until the work of cut calls is done."""
        for thread in self._late:
            thread.join()
