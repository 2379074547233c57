"""What a benchmark gives: figures, each with its goal and what others were measured to do."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")
QUICK = os.environ.get("BENCH_QUICK") == "1"


def choose_size(full: _T, quick: _T) -> _T:
    """Return the size of a measurement: `quick` where it is only to be seen that it runs, as in CI."""
    return quick if QUICK else full


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number.

    Attributes:
        what: what was measured, in a few words.
        value: the number.
        unit: its unit.
        goal: the bound we promise; None: no promise.
        more_is_better: whether the goal is a lower bound.
        others: what other projects were measured to do, with their names; empty: nothing known.
        note: how it was measured, where the name does not say it.
    """

    what: str
    value: float
    unit: str
    goal: float | None = None
    more_is_better: bool = False
    others: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.more_is_better else self.value <= self.goal


def measure_in_rounds(
    cases: Mapping[str, Callable[[], None]],
    *,
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Run every case once a round, in turns, and give each one's median in seconds.

    Interleaved because a busy machine slows down for a while: then all cases are slowed alike.
    """
    for case in cases.values():
        case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for name, case in cases.items():
            begin = clock()
            case()
            seconds[name].append(clock() - begin)
    gc.unfreeze()
    return {name: statistics.median(times) for name, times in seconds.items()}
