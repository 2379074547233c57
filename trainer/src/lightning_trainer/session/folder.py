"""The folder of work that can be resumed: created or found at the start, locked meanwhile, removed if nothing began.

`train`, `sft`, `eval`, `improve` and `prompts` keep their work in such a folder.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import psutil

from lightning_spans.errors import ConfigError

DIGESTS: Final = ("data", "tasks", "val")  # compared by a digest, which means nothing to a reader
PRIVATE: Final = 0o700  # of new folders: options, numbers and learned tokens reveal as much as the store
_LOCK: Final = ".lock"  # in the folder: locked while a process works there
HOLDER: Final = ".held-by"  # next to it: names that process


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Lock a folder for this process until the block or the process ends.

    Raises:
        ConfigError: another process works there, which the message names, or the folder cannot be locked.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(in_use(folder)) from None
    except (OSError, NotImplementedError) as error:
        why = getattr(error, "strerror", None) or "its file system has no locks"
        raise ConfigError(f"the folder {folder} can't be locked: {why}. Choose --out, on a local disk.") from None
    try:
        since = dt.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        (folder / HOLDER).write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since},")
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def check_unchanged(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any], advice: str = "") -> None:
    """Make sure that resumed work is the same work.

    Args:
        folder: the folder that is resumed.
        before: how the work was started: options, and digests under the names of `DIGESTS`.
        now: the same for this process. A name that `before` lacks is not compared: older versions wrote fewer.
        advice: what else the user should know, after the error.

    Raises:
        ConfigError: something differs; the message names it, and gives both values of an option.
    """
    for name, value in now.items():
        began = before.get(name, value)
        if began == value:
            continue
        if name in DIGESTS:
            what, then = f"its {name} changed since it was started", f"Restore the {name}"
        else:
            what, then = f"it was started with {name} = {began!r}, not {value!r}", "Use the same value"
        more = f" {advice}" if advice else ""
        raise ConfigError(f"{folder} can't be resumed: {what}. {then}, or start again in another folder.{more}")


def is_held(folder: Path) -> bool:
    """Whether a process trains in a folder, according to the file next to the lock. The lock itself is not taken.

    A process of this machine that no longer exists does not count; one of another machine is assumed to be alive.
    """
    found = re.match(r"process (\d+) on (.*), since ", _holder(folder))
    if found is None:
        return False
    return found[2] != socket.gethostname() or psutil.pid_exists(int(found[1]))


def in_use(folder: Path) -> str:
    """Return the error message for a folder in which another process works."""
    return f"{folder} is in use: {_holder(folder)} uses it. Wait until it has ended, stop it, or choose another --out."


def _holder(folder: Path) -> str:
    try:
        return (folder / HOLDER).read_text(encoding="utf-8")
    except OSError:
        return "another process"


def _clear(folder: Path) -> None:
    """Remove everything in a folder except the lock and the file that names its holder."""
    for path in _content(folder):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _content(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name not in (_LOCK, HOLDER)]


@contextmanager
def open_folder(
    out: Path | None,
    resume: Path | None = None,
    *,
    base: Path,
    begun: Callable[[Path], bool],
    resumable: Callable[[Path], bool] | None = None,
    came_to_nothing: Callable[[Path], bool] = lambda _folder: False,
    keep_interrupted: bool = True,
) -> Iterator[Path]:
    """Lock the folder of resumed work, or create a new one, which is removed again if the work never began.

    Args:
        out: the new folder; None: one in `base`, named after the day.
        resume: the folder of the work to resume; None: the work is new.
        base: parent of folders that the user did not name.
        begun: whether a folder contains something to keep.
        resumable: whether the work in a folder can be resumed, for the error message; None: if it has begun.
        came_to_nothing: whether a folder contains only leftovers of an earlier attempt, which are removed.
        keep_interrupted: whether a folder stays if the user stops the work before it has begun.

    Raises:
        ConfigError: the folder cannot be created, another process works there, or a new one is not empty.
    """
    if resume is not None:
        with hold_folder(resume):
            yield resume
        return
    existed, alone = out is not None and out.exists(), out is None and not base.exists()
    folder = make_folder(out, base)
    with hold_folder(folder):
        if came_to_nothing(folder):
            _clear(folder)
        if _content(folder):
            (folder / _LOCK).unlink()
            then = f", or resume it with --resume {folder}" if (resumable or begun)(folder) else ""
            raise ConfigError(f"{folder} is not empty. Choose another --out{then}.")
        stays = False
        try:
            yield folder
        except KeyboardInterrupt:
            stays = keep_interrupted
            raise
        finally:
            if not (stays or begun(folder)):
                _leave(folder, existed=existed)
                if alone and not any(base.iterdir()):
                    base.rmdir()


def make_folder(out: Path | None, base: Path) -> Path:
    """Create a folder, or one in `base` that is named after the day.

    Raises:
        ConfigError: it cannot be created.
    """
    try:
        if out is None:
            return _make_dated(base)
        out.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {out or base} can't be made: {error.strerror}. Choose --out.") from None
    return out


def _make_dated(base: Path) -> Path:
    day = dt.datetime.now().astimezone().date().isoformat()
    base.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = base / (day if number == 1 else f"{day}-{number}")
        try:
            folder.mkdir(mode=PRIVATE)
        except FileExistsError:
            continue
        break
    return folder


def _leave(folder: Path, *, existed: bool) -> None:
    """Restore a folder in which nothing began to its state before."""
    _clear(folder)
    for name in (_LOCK, HOLDER):
        (folder / name).unlink(missing_ok=True)
    if not existed:
        folder.rmdir()
