"""The GPUs of this machine and their memory, as reported by NVIDIA's driver or torch; or those that are planned for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from lightning_trainer.models.folders import SIZES_ALONE

_DEVICES: Final = "nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits"


_PLANNED: Final[ContextVar[tuple[int, ...]]] = ContextVar("planned GPUs", default=())


@contextmanager
def plan_for(gib: float, count: int) -> Iterator[None]:
    """Plan within the block for so many GPUs with so many GiB each. Of the model, only its config.json is read."""
    gpus, sizes = _PLANNED.set((int(gib * 2**30),) * count), SIZES_ALONE.set(True)
    try:
        yield
    finally:
        _PLANNED.reset(gpus)
        SIZES_ALONE.reset(sizes)


def are_planned() -> bool:
    """Whether the GPUs are not this machine's: nothing can run on them."""
    return bool(_PLANNED.get())


def gpu_totals() -> list[int]:
    """Return the bytes of each NVIDIA GPU that this process sees.

    Asks the driver; if that fails, torch, if it is already imported.
    """
    if are_planned():
        return list(_PLANNED.get())
    try:
        command = _DEVICES.split()
        told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout  # noqa: S603 - ours
        return _visible([int(line) * 2**20 for line in told.split()])
    except (OSError, subprocess.SubprocessError, ValueError):
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return []
        return [int(torch.cuda.mem_get_info(number)[1]) for number in range(torch.cuda.device_count())]


def _visible(totals: list[int]) -> list[int]:
    """Return those of all GPUs that this process sees, in its order; all of them if they are not named by numbers."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = [int(name) for name in names if name.strip().isdigit()]
    if len(numbers) < len(names) or max(numbers) >= len(totals):
        return totals
    return [totals[number] for number in numbers]


def gpu_total(device: str) -> int | None:
    """Return the bytes of the GPU that a torch device names (auto, cuda, cuda:1); None if it names none."""
    kind, _, number = device.partition(":")
    totals = gpu_totals() if kind in ("auto", "cuda") else []
    place = int(number or 0)
    return totals[place] if place < len(totals) else None
