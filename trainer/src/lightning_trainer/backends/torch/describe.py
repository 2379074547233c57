"""Description of the embedded backend on this machine, for `lightning-rl doctor`."""

from __future__ import annotations

import torch

from lightning_trainer.backends.torch.threads import available_cores


def describe() -> str:
    """Compute something on the device that ``auto`` chooses, and return a description of the device.

    Raises:
        RuntimeError: torch cannot compute on it.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ones = torch.ones(8, 8, dtype=torch.bfloat16, device=device)
    if float((ones @ ones)[0, 0]) != 8.0:
        raise RuntimeError(f"torch multiplies wrongly on {device}")
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return f"{torch.cuda.get_device_name()}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    return f"cpu, {available_cores()} cores"
