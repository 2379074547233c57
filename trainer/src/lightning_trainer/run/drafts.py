"""Folders that are complete or absent, also if the process is killed while it writes, replaces or removes one.

A folder is written and removed under a hidden name next to it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_OLD: Final = ".old"  # ends the hidden name of a folder until its replacement has its own name


@contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty draft of a folder, which replaces the folder after the block; if the block fails, it is removed.

    Raises:
        OSError: it cannot be written.
    """
    draft = _draft_of(folder)
    old = draft.with_name(draft.name + _OLD)
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        yield draft
        for path in draft.rglob("*"):
            _sync(path)
        if folder.exists():
            folder.rename(old)
        draft.rename(folder)
        if old.exists():
            old.rename(draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def remove_folder(folder: Path) -> None:
    """Remove a folder. If files in it cannot be removed, they stay in a hidden folder.

    Raises:
        OSError: it cannot be renamed.
    """
    draft = _draft_of(folder)
    shutil.rmtree(draft, ignore_errors=True)
    folder.rename(draft)
    shutil.rmtree(draft, ignore_errors=True)


def _draft_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}")


def _sync(path: Path) -> None:
    if path.is_file():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
