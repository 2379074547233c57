"""Limits of a worker process: memory and processor cores, set by the worker on itself before it imports the agent.

Both are inherited by whatever the agent starts. They apply to each process, not to their sum.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from typing import Final

from lightning_spans.errors import ConfigError

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_LEAST: Final = 64 << 20  # bytes: an interpreter that imports the openai client needs about this much


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of each worker process.

    Attributes:
        memory_bytes: maximum private writable memory (RLIMIT_DATA); None: no limit of ours.
        cores: number of processor cores it may run on; None: all.
    """

    memory_bytes: int | None = None
    cores: int | None = None

    def check(self) -> None:
        """Make sure that this system can enforce the limits.

        Raises:
            ConfigError: it cannot, or a limit is invalid.
        """
        if (self.memory_bytes, self.cores) == (None, None):
            return
        if sys.platform != "linux":
            raise ConfigError(
                f"--worker-memory and --worker-cores need Linux, and this is {sys.platform}: "
                "it can't limit either for one process. Leave them out, or run the workers in a container with limits."
            )
        if self.memory_bytes is not None and self.memory_bytes < _LEAST:
            raise ConfigError(f"--worker-memory {self.memory_bytes} bytes: Python alone needs more than {_LEAST}.")
        there = len(os.sched_getaffinity(0))
        if self.cores is not None and not 1 <= self.cores <= there:
            raise ConfigError(f"--worker-cores {self.cores}: this machine allows 1 to {there}.")

    def apply(self, number: int) -> None:
        """Set the limits on this process.

        Args:
            number: number of the worker; successive workers get neighbouring cores.

        Raises:
            OSError: the system refuses.
        """
        if self.memory_bytes is not None:
            import resource

            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            most = self.memory_bytes if hard == resource.RLIM_INFINITY else min(hard, self.memory_bytes)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        if self.cores is not None:
            there = sorted(os.sched_getaffinity(0))
            first = number * self.cores
            os.sched_setaffinity(0, {there[(first + step) % len(there)] for step in range(self.cores)})


NO_LIMITS: Final = WorkerLimits()


def parse_bytes(text: str) -> int:
    """Parse a size such as ``800M`` or ``2GiB``; units are powers of 1024.

    Raises:
        ConfigError: it is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise ConfigError(f"size {text!r}: write it as 800M or 2GiB.")
    return int(float(found[1]) * _UNITS[found[2]])
