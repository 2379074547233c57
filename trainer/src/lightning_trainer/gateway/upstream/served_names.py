"""The names under which servers have a model's weights: the newest, and older ones until their last call has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class ServedName:
    """A name on the servers.

    Attributes:
        name: used in requests.
        version: number of its weights; None if only another program knows it.
        calls: answers in progress.
        unused: called once, when the name is no longer the newest and its last call has ended; None: nothing is called.
    """

    name: str
    version: int | None = None
    calls: int = 0
    unused: Callable[[], None] | None = None


class ServedNames:
    """The names of one model, newest last. A call keeps the name that it began with. Thread-safe.

    vLLM's prefix cache uses the name of an adapter as its key, so other weights need another name: under the same one
    it answers with the keys and values of the previous weights.
    """

    def __init__(self, name: str, version: int | None = None) -> None:
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._names = [ServedName(name, version)]

    @property
    def newest(self) -> ServedName:
        """The name for the next call."""
        return self._names[-1]

    @property
    def in_use(self) -> list[str]:
        """The newest name, and the older ones that still answer calls; newest last."""
        with self._lock:
            return [each.name for each in self._names]

    @contextmanager
    def call(self) -> Iterator[ServedName]:
        """Return the newest name, which stays in use until the block ends."""
        with self._lock:
            served = self._names[-1]
            served.calls += 1
        try:
            yield served
        finally:
            self._end(served)

    def switch(self, name: str, version: int | None = None, unused: Callable[[], None] | None = None) -> None:
        """Use another name for the next calls.

        Args:
            name: of the new weights, which the servers have loaded.
            version: their number.
            unused: called when the last call under the previous name has ended, which may be now. It runs in the thread
                in which that call ends, and must not block.
        """
        with self._lock:
            before = self._names[-1]
            if before.name == name:
                before.version = version
                return
            before.unused = unused
            again = next((each for each in self._names if each.name == name), None)
            if again is not None:  # calls under it have not ended yet
                self._names.remove(again)
                again.version, again.unused = version, None
            self._names.append(again or ServedName(name, version))
        self._retire(before)

    def wait(self, most: int, timeout_s: float) -> bool:
        """Wait until at most so many names are in use. Returns whether they are."""
        with self._ended:
            return self._ended.wait_for(lambda: len(self._names) <= most, timeout_s)

    def _end(self, served: ServedName) -> None:
        with self._lock:
            served.calls -= 1
        self._retire(served)

    def _retire(self, served: ServedName) -> None:
        """Drop a name that no call needs any more, unless it is the newest."""
        with self._ended:
            if served.calls or served is self._names[-1] or served not in self._names:
                return
            self._names.remove(served)
            self._ended.notify_all()
        if served.unused is not None:
            served.unused()
