"""The folder of a run: made when it starts, found again when it goes on, left as it was when nothing came of it."""

from __future__ import annotations

import datetime as dt
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from lightning_spans.errors import ConfigError
from lightning_trainer.config.files import CONFIG_NAME, read_kept
from lightning_trainer.models import NEWEST
from lightning_trainer.report.metrics import LOG_NAME, read
from lightning_trainer.report.runs import is_run
from lightning_trainer.run.state import FOLDER, find

STORE_NAME: Final = "lightning.db"
RUNS: Final = Path("runs")  # where runs without a folder of their own go
PRIVATE: Final = 0o700  # of new folders: options, numbers and learned tokens say as much as the store
_LOCK: Final = ".lock"  # in the run's folder: locked while a process trains there
HOLDER: Final = ".held-by"  # beside it: which one


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep a run's folder for this process alone, until the block ends or the process does.

    Raises:
        ConfigError: another process trains there; the message says which.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(_in_use(folder)) from None
    except OSError as error:
        raise ConfigError(f"the run's folder {folder} can't be locked: {error.strerror}. Choose --out.") from None
    try:
        since = dt.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        (folder / HOLDER).write_text(f"process {os.getpid()} on {socket.gethostname()}, since {since},")
        yield
    finally:
        (folder / HOLDER).unlink(missing_ok=True)
        lock.release()


def is_held(folder: Path) -> bool:
    """Whether a process trains in a folder, told from what it left beside the lock: nothing here takes the lock.

    A process of this machine that died without a word holds nothing; of another machine's its word is taken.
    """
    found = re.match(r"process (\d+) on (.*), since ", _holder(folder))
    if found is None:
        return False
    return found[2] != socket.gethostname() or psutil.pid_exists(int(found[1]))


def _in_use(folder: Path) -> str:
    return (
        f"{folder} is in use: {_holder(folder)} trains there."
        " Wait until it has ended, stop it, or choose another --out."
    )


def _holder(folder: Path) -> str:
    try:
        return (folder / HOLDER).read_text(encoding="utf-8")
    except OSError:
        return "another process"


def _clear(folder: Path) -> None:
    """Remove everything in a folder but what keeps it for this process."""
    for path in folder.iterdir():
        if path.name in (_LOCK, HOLDER):
            continue
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@contextmanager
def new_folder(out: Path | None) -> Iterator[Path]:
    """Make a run's folder, the one asked for or one named after the day, and keep it for this process.

    It goes again when the run fails before it has begun.

    Raises:
        ConfigError: the folder can't be made, is another process's, or holds anything but a run that came to nothing.
    """
    existed, alone = out is not None and out.exists(), out is None and not RUNS.exists()
    folder = make_folder(out)
    with held(folder):
        try:
            _empty(folder)
        except ConfigError:
            (folder / _LOCK).unlink()
            raise
        try:
            yield folder
        finally:
            if not (folder / CONFIG_NAME).exists():
                _leave(folder, existed=existed)
                if alone and not any(RUNS.iterdir()):
                    RUNS.rmdir()


def make_folder(out: Path | None) -> Path:
    """Make the folder asked for, or one named after the day.

    Raises:
        ConfigError: it can't be made, or lies in the folder of another run.
    """
    try:
        if out is None:
            return _dated(RUNS)
        _check_outside(out)
        out.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the run's folder {out or RUNS} can't be made: {error.strerror}. Choose --out.") from None
    return out


def _check_outside(out: Path) -> None:
    """Refuse a folder in another run's: `runs` would not list it, and that run clears its own when it begins anew.

    Raises:
        ConfigError: it lies in one.
    """
    for parent in out.resolve().parents:
        if is_run(parent):
            raise ConfigError(f"{out} lies in the folder of the run {parent}. Choose another --out.")


def _empty(folder: Path) -> None:
    """Make sure that a folder is empty. What an earlier run left there that never took a step is cleared away.

    Raises:
        ConfigError: it holds anything else.
    """
    if _came_to_nothing(folder):
        _clear(folder)
    if any(path.name not in (_LOCK, HOLDER) for path in folder.iterdir()):
        then = f", or resume it with --resume {folder}" if (folder / NEWEST).exists() else ""
        raise ConfigError(f"{folder} is not empty. Choose another --out{then}.")


def _leave(folder: Path, *, existed: bool) -> None:
    """Leave a folder of which nothing came as it was found."""
    _clear(folder)
    for name in (_LOCK, HOLDER):
        (folder / name).unlink(missing_ok=True)
    if not existed:
        folder.rmdir()


def _dated(base: Path) -> Path:
    day, number = dt.datetime.now().astimezone().date().isoformat(), 1
    base.mkdir(parents=True, exist_ok=True)
    while True:
        folder = base / (day if number == 1 else f"{day}-{number}")
        try:
            folder.mkdir(mode=PRIVATE)
        except FileExistsError:
            number += 1
        else:
            return folder


def _came_to_nothing(folder: Path) -> bool:
    ours = is_run(folder)
    steps = ours and any(line["kind"] == "train" for line in read(folder / LOG_NAME))
    return ours and not steps and not (folder / NEWEST).exists() and not (folder / FOLDER).exists()


def read_config(resume: Path) -> dict[str, Any]:
    """Read the options of a run that goes on, from its folder; those that were not set are left out.

    Raises:
        ConfigError: there is no run to go on from, another process trains in it and has written no checkpoint yet, or
            its options can't be read.
    """
    if not (resume / NEWEST).exists() and is_held(resume):
        raise ConfigError(_in_use(resume))
    run, _ = find(resume)
    values = read_kept(run, "Give all options again.")
    return {name: value for name, value in values.items() if value is not None and name != "out"}
