"""Names every wait that is longer than its bound, so that nothing hangs silently.

```python
with waiting("store write", "512 spans") as wait:
    ...  # wait.moved() whenever something arrives: the bound limits silence, not work
```

A thread watches the open waits and logs each that is too long, once, and once more when it has ended. `stalls` returns
the current ones, for ``/healthz``; `stall_counts` all so far, for ``/metrics``. Noting a wait costs about a
microsecond. A bound says when a wait is reported; the waiting code's own time limit ends it.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_spans.record.process import in_child

logger = logging.getLogger("lightning_spans")

BOUNDS: Final[Mapping[str, float]] = {
    # the server
    "store write": 10.0,  # a transaction: calls, spans, ends of attempts
    "store read": 30.0,
    "request body": 60.0,  # a client that sends slowly, or not at all
    "engine": 120.0,  # the next tokens of an answer, from the embedded model
    "upstream": 120.0,  # the next bytes of an answer, from another model server
    "shutdown": 60.0,
    # the agent's process
    "sink delivery": 20.0,  # a batch of spans, to a server or the process's own store
    "spool write": 10.0,  # the disk for what could not be delivered
    "replayed tool": 20.0,  # a recorded tool outcome in a replay, requested from the gateway
    "span listener": 20.0,  # a plugin's `lightning_span_ended`
    "span processor": 20.0,  # an OpenTelemetry processor given to `attach()`
    "sink flush": 20.0,  # the spans of an attempt that has ended
    # the runner
    "runner claim": 20.0,
    "runner heartbeat": 20.0,
    "runner result": 20.0,  # the end of an attempt, written to the store
    "worker start": 60.0,  # a process that imports the agent
    "ray actor": 60.0,  # a cluster without capacity for a worker
    "worker": 30.0,  # a blocked event loop
    "agent": 3600.0,  # an attempt without a time limit; otherwise its limit plus the time it gets to end
    "reward function": 120.0,
    # the trainer
    "queue": 60.0,  # rollouts that no runner claims
    "lease": 60.0,  # attempts whose runner has gone and that no other takes over
    "group": 300.0,  # the last rollouts of groups that are otherwise complete
    "rows": 300.0,
    "update": 1800.0,
    "teacher": 1800.0,  # of distillation: the teacher's log-probabilities of a batch
    "checkpoint write": 300.0,
}
"""Seconds after which a wait is reported, by part; ``LIGHTNING_BOUNDS="engine=30;update=7200"`` changes them."""

_LOOK_S: Final = 0.25
_bounds: dict[str, float] = dict(BOUNDS)
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Stall:
    """A wait that is longer than its bound.

    Attributes:
        part: the waiting part, by its name in `BOUNDS`.
        waits_for: what it waits for.
        seconds: time without progress.
        bound_s: longest such time before it is reported.
    """

    part: str
    waits_for: str
    seconds: float
    bound_s: float

    def __str__(self) -> str:
        return (
            f"{self.part} stalls: it has waited {self.seconds:.1f} s for {self.waits_for} (bound: {self.bound_s:g} s)"
        )


class Wait:
    """An open wait. Created by `begin`, or by `waiting` for a block."""

    __slots__ = ("_for", "bound_s", "number", "part", "since", "told")

    def __init__(self, part: str, waits_for: str | Callable[[], str], bound_s: float | None) -> None:
        self.part = part
        self.bound_s = _bounds[part] if bound_s is None else bound_s
        self._for = waits_for
        self.number = next(_numbers)
        self.told = False
        self.since = time.monotonic()

    def moved(self, part: str | None = None, waits_for: str | Callable[[], str] | None = None) -> None:
        """Note progress, and what it waits for now. Its time starts again."""
        if part is not None:
            self.part, self.bound_s = part, _bounds[part]
        if waits_for is not None:
            self._for = waits_for
        if self.told:
            self._over()
        self.since = time.monotonic()

    def end(self) -> None:
        """Note that the wait is over. Calling it again changes nothing."""
        if _open.pop(self.number, None) is not None and self.told:
            self._over()

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def stall(self, now: float) -> Stall | None:
        """Return this wait as a stall, if it is one."""
        seconds = now - self.since
        if seconds < self.bound_s:
            return None
        try:
            what = self._for if isinstance(self._for, str) else self._for()
        except Exception as error:  # noqa: BLE001 - a description that fails must not hide the stall
            what = f"a value that can't be described ({type(error).__name__}: {error})"
        return Stall(self.part, what, seconds, self.bound_s)

    def _over(self) -> None:
        self.told = False
        logger.warning("lightning: %s continues, after %.1f s", self.part, time.monotonic() - self.since)


_open: dict[int, Wait] = {}
_counts: Counter[str] = Counter()
_thread: threading.Thread | None = None
_lock = threading.Lock()


def begin(part: str, waits_for: str | Callable[[], str], bound_s: float | None = None) -> Wait:
    """Note a wait that ends with its `end`.

    Args:
        part: a name in `BOUNDS`.
        waits_for: a description; a function is called only if the wait is reported.
        bound_s: seconds until it is reported; by default the part's.
    """
    wait = Wait(part, waits_for, bound_s)
    _open[wait.number] = wait
    if _thread is None:
        _start()
    return wait


def waiting(part: str, waits_for: str | Callable[[], str], bound_s: float | None = None) -> Wait:
    """Note a wait that lasts as long as the `with` block; see `begin`."""
    return begin(part, waits_for, bound_s)


def stalls() -> list[Stall]:
    """Return the waits of this process that currently exceed their bounds, longest first."""
    now = time.monotonic()
    found = [stall for wait in list(_open.values()) if (stall := wait.stall(now)) is not None]
    return sorted(found, key=lambda stall: -stall.seconds)


def stall_counts() -> dict[str, int]:
    """Return how many stalls of each part this process has reported."""
    return dict(_counts)


def configure(text: str | None) -> None:
    """Set bounds from text such as ``engine=30;update=7200``; None or empty sets the defaults.

    Raises:
        ConfigError: a part is unknown, or a bound is not a positive number.
    """
    wanted = dict(BOUNDS)
    for pair in filter(None, ((text or "").split(";"))):
        name, _, value = (side.strip() for side in pair.partition("="))
        if name not in BOUNDS:
            raise ConfigError(f"LIGHTNING_BOUNDS: no part {name!r}. There are: {', '.join(BOUNDS)}.")
        try:
            wanted[name] = float(value)
        except ValueError:
            wanted[name] = 0.0
        if not wanted[name] > 0:
            raise ConfigError(f"LIGHTNING_BOUNDS: {name}={value!r}: give seconds, such as {name}={BOUNDS[name]:g}.")
    _bounds.update(wanted)


def _start() -> None:
    global _thread  # noqa: PLW0603 - one thread looks at all waits of a process
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_look_on, name="lightning-stalls", daemon=True)
            _thread.start()


def _look_on() -> None:
    while True:
        time.sleep(_LOOK_S)
        now = time.monotonic()
        for wait in list(_open.values()):
            if not wait.told and (stall := wait.stall(now)) is not None:
                logger.warning("lightning: %s", stall)
                wait.told = True
                _counts[stall.part] += 1  # last: who sees the count finds the message


def _after_fork() -> None:
    """Start again in a forked child: the thread and the waits are its parent's."""
    global _thread, _lock
    _thread, _lock = None, threading.Lock()
    _open.clear()


in_child(_after_fork)
