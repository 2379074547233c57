"""Folders in memory from which vLLM reads weights. Those left in memory by dead processes are removed."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

_FOLDER: Final = re.compile(r"lightning-engine-(\d+)-")


def make_folder(place: Path | None = None, need: int = 0) -> Path:
    """Create a folder that other users can read too: vLLM may run as one.

    Args:
        place: its path; None: in memory, or on disk if memory has no room.
        need: bytes that will be written to it.
    """
    made = Path(tempfile.mkdtemp(prefix=f"lightning-engine-{os.getpid()}-", dir=place or ram_folder(need)))
    made.chmod(0o755)
    return made


def ram_folder(need: int = 0) -> Path:
    """Return a folder in memory, or the temporary folder if there is none or it has no room for this many bytes."""
    folder = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
    if not os.access(folder, os.W_OK):
        return Path(tempfile.gettempdir())
    for left in folder.glob("lightning-engine-*"):
        match = _FOLDER.match(left.name)
        if match and not Path("/proc", match[1]).exists():
            with suppress(OSError):
                shutil.rmtree(left)
    return folder if shutil.disk_usage(folder).free >= need else Path(tempfile.gettempdir())
