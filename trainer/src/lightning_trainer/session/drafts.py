"""Folders that are complete or absent, also if the process is killed while it writes, replaces or removes one.

A folder is written and removed under a hidden name next to it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_OLD: Final = ".old"  # ends the hidden name of a folder until its replacement has its own name
_HIDDEN: Final = re.compile(rf"\.(.+)\.\d+({re.escape(_OLD)})?")


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
        for path in (draft, *draft.rglob("*")):
            if path.exists():  # a link may only be right under the final name
                _sync(path)
        if folder.exists():
            folder.rename(old)
        draft.rename(folder)
        _sync(folder.parent)
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


def clear_drafts(parent: Path) -> None:
    """Remove what killed processes left hidden in a folder; one that had no replacement yet gets its name back.

    No other process may write in the folder meanwhile.
    """
    for path, name, is_old in _hidden(parent):
        if is_old and not path.with_name(name).exists():
            path.rename(path.with_name(name))
    for path, _, _ in _hidden(parent):
        shutil.rmtree(path, ignore_errors=True)


def _draft_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}")


def _hidden(parent: Path) -> list[tuple[Path, str, bool]]:
    """Return the hidden folders, each with the name of its folder, and whether it is the old one."""
    found = [(path, _HIDDEN.fullmatch(path.name)) for path in parent.glob(".*")]
    return [(path, match[1], match[2] is not None) for path, match in found if match is not None]


def _sync(path: Path) -> None:
    """Write a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
