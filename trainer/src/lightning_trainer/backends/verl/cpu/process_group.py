"""The one place where verl is patched, and why.

verl starts its process group with the backend ``cpu:gloo,{device}:{backend}``. Where the device is the CPU itself that
is ``cpu:gloo,cpu:gloo``, which torch refuses ("Duplicate device type cpu in backend string"). No option or registry
leads there. The patch gives torch ``cpu:gloo``. `tests/verl/test_process_group.py` fails when verl needs it no longer.
"""

from __future__ import annotations

import functools
from typing import Any


def patch() -> None:
    """Register a process group on CPU with verl. Does nothing on other platforms, and nothing the second time."""
    from verl.utils import distributed

    original = distributed.initialize_global_process_group_ray
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def initialize(timeout_second: int | None = None, backend: str | None = None) -> Any:
        from verl.utils.device import get_device_name

        if backend is None and get_device_name() == "cpu":
            backend = "cpu:gloo"
        return original(timeout_second=timeout_second, backend=backend)

    distributed.initialize_global_process_group_ray = initialize
