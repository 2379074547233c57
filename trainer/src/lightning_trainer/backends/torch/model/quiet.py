"""Libraries that load a model without writing to stderr, which belongs to the program that trains."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final

# peft imports bitsandbytes wherever it is installed, and that warns about a kernel for layers that are not used here.
_WARNS: Final = "bitsandbytes.backends.cpu.ops"


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress transformers' progress bars and the warning of bitsandbytes' import."""
    bars: Any = import_module("transformers.utils.logging")  # its functions have no type annotations
    shown, warner = bars.is_progress_bar_enabled(), logging.getLogger(_WARNS)
    level = warner.level
    bars.disable_progress_bar()
    warner.setLevel(logging.ERROR)
    try:
        yield
    finally:
        warner.setLevel(level)
        if shown:
            bars.enable_progress_bar()
