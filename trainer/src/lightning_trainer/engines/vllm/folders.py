"""Folders in memory from which vLLM reads weights. Those that dead processes left in memory are removed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

_NAME: Final = "lightning-engine"
_LOCK: Final = "in_use"  # locked by the process that uses the folder; containers see each other's locks, not processes
_held: Final[list[IO[bytes]]] = []  # until this process ends


def make_folder(place: Path | None = None, need: int = 0) -> Path:
    """Create a folder that other users can read too: vLLM may run as one.

    Args:
        place: its path; None: in memory, or on disk if memory has no room.
        need: bytes that will be written to it.
    """
    made = Path(tempfile.mkdtemp(prefix=f"{_NAME}-{os.getpid()}-", dir=place or ram_folder(need)))
    made.chmod(0o755)
    lock = (made / _LOCK).open("wb")
    with suppress(OSError):  # a file system without locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _held.append(lock)
    return made


def ram_folder(need: int = 0) -> Path:
    """Return a folder in memory, or the temporary folder if there is none or it has no room for this many bytes."""
    folder = Path("/dev/shm")  # noqa: S108 - a folder of our own is made in it
    if not os.access(folder, os.W_OK):
        return Path(tempfile.gettempdir())
    for left in filter(_is_left, folder.glob(f"{_NAME}-*")):
        with suppress(OSError):
            shutil.rmtree(left)
    return folder if shutil.disk_usage(folder).free >= need else Path(tempfile.gettempdir())


def _is_left(folder: Path) -> bool:
    """Whether the process that made a folder has ended. One without a lock is being made."""
    try:
        with (folder / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
