"""Number of threads for an update: as many as cores are free. No torch at import.

An update on a CPU is thousands of short parallel regions, and each ends when its last thread does. A thread that has to
share its core delays all others, which wait by spinning. If other programs use the machine, fewer threads are therefore
faster than one for each core.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

import psutil

_TOLERATED: Final = 1 / 3  # share of a core that others may use before it counts as theirs
_WINDOW_S: Final = 0.1  # clocks of cores have a resolution of 0.01 s
_LOOKS: Final = 2  # a process that ends just before an update, such as an agent's, is gone in the second look


class Reading(NamedTuple):
    """Clock readings, each in seconds since its own start.

    Attributes:
        at_s: the time.
        idle_s: total idle time of the cores that this process may use.
        own_s: processor time that this process used, in all its threads.
    """

    at_s: float
    idle_s: float
    own_s: float


def free_cores(before: Reading, now: Reading) -> float:
    """Return how many cores other processes left free between two readings: idle, or used by this process.

    Raises:
        ValueError: no time passed between them.
    """
    passed_s = now.at_s - before.at_s
    if passed_s <= 0:
        raise ValueError("the second reading must be later than the first")
    # Linux warns that a core's idle time may go back a little.
    return max(0.0, (now.idle_s - before.idle_s + now.own_s - before.own_s) / passed_s)


def whole_cores(free: float, most: int) -> int:
    """Return how many threads suit so many free cores: at least 1, at most `most`. Two thirds free count as free."""
    return max(1, math.floor(min(free, most) + _TOLERATED))


def update_threads(chosen: int | Literal["auto"] | None, most: int, look: Callable[[], float]) -> int:
    """Return the number of threads for the update that begins now.

    Args:
        chosen: a fixed number; None for `most`; or ``auto``, as many as cores are free.
        most: cores that this process may use.
        look: measures how many cores are free. It is called again if some are not, and the larger result counts.
    """
    if chosen != "auto":
        return most if chosen is None else chosen
    found = 1
    for _ in range(_LOOKS):
        if found < most:
            found = max(found, whole_cores(look(), most))
    return found


def measure_free_cores() -> float:
    """Wait a tenth of a second, and return how many of the cores that this process may use were free in that time."""
    before = _read()
    time.sleep(_WINDOW_S)
    return free_cores(before, _read())


def use_threads(chosen: int | Literal["auto"] | None, device: str) -> int:
    """Set the number of torch's threads for an update on this device ("cpu", "cuda"), and return it.

    With an accelerator the number matters little, so ``auto`` does not wait to measure there.
    """
    import torch

    most = available_cores()
    number = update_threads(chosen, most, measure_free_cores if device == "cpu" else lambda: float(most))
    torch.set_num_threads(number)
    return number


def available_cores() -> int:
    """Return how many cores this process may use, by its affinity and by the limits of its control groups."""
    return whole_cores(cpu_limit(), len(_own_cores()))


def cpu_limit(membership: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many cores the control groups of this process allow, versions 1 and 2; infinity without a limit."""
    if not membership.exists():  # not Linux
        return math.inf
    folders = (folder for line in membership.read_text().splitlines() for folder in _groups(line, mounted))
    return min((_limit(folder) for folder in folders), default=math.inf)


def _groups(line: str, mounted: Path) -> Iterator[Path]:
    """Yield the folders of the group that a line names (``NUMBER:CONTROLLERS:PATH``), up to the root."""
    _, controllers, path = line.split(":", 2)
    if controllers and "cpu" not in controllers.split(","):
        return
    group = mounted / controllers / path.lstrip("/")
    # in a container the path may be the host's; its root is then the container's
    while group.is_relative_to(mounted / controllers):
        yield group
        group = group.parent


def _limit(group: Path) -> float:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except FileNotFoundError:
        return math.inf
    return math.inf if quota == "max" or float(quota) < 0 else float(quota) / float(period)


def _read() -> Reading:
    times = psutil.cpu_times(percpu=True)
    own = _own_cores()
    if len(own) < len(times):
        times = [times[core] for core in own if core < len(times)]
    idle_s = sum(float(core.idle) + float(getattr(core, "iowait", 0.0)) for core in times)
    return Reading(time.monotonic(), idle_s, time.process_time())


def _own_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
