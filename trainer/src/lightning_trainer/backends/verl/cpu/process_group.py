"""The only place that patches verl, and why.

verl starts its process group with the backend ``cpu:gloo,{device}:{backend}``. If the device is the CPU, that is
``cpu:gloo,cpu:gloo``, which torch refuses ("Duplicate device type cpu in backend string"). No option or registry can
change it. The patch gives torch ``cpu:gloo``. `tests/verl/test_process_group.py` fails once verl no longer needs it.
"""

from __future__ import annotations

import functools
from typing import Any


def patch() -> None:
    """Make verl use a valid process group on CPU. Does nothing on other platforms or if already patched."""
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
