"""The GPUs of this machine and their memory, as reported by NVIDIA's driver or torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

_DEVICES: Final = "nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits"


def gpu_totals() -> list[int]:
    """Return the bytes of each NVIDIA GPU. Asks the driver; if that fails, torch, if it is already imported."""
    try:
        command = _DEVICES.split()
        told = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout  # noqa: S603 - ours
        return [int(line) * 2**20 for line in told.split()]
    except (OSError, subprocess.SubprocessError, ValueError):
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            return []
        return [int(torch.cuda.mem_get_info(number)[1]) for number in range(torch.cuda.device_count())]


def gpu_total(device: str) -> int | None:
    """Return the bytes of the GPU that a torch device names (auto, cuda, cuda:1); None if it names none."""
    kind, _, number = device.partition(":")
    totals = gpu_totals() if kind in ("auto", "cuda") else []
    place = int(number or 0)
    return totals[place] if place < len(totals) else None
