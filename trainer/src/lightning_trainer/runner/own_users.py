"""Separate user ids for workers, with a home that is deleted with the attempt: the system itself separates attempts.

Only root may assign them, and only Linux is supported. There is no weaker fallback: what cannot be provided is rejected
before anything runs, or ends the runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from lightning_spans.errors import ConfigError
from lightning_spans.record.stalls import waiting
from lightning_trainer.runner.environment import allowed_environment
from lightning_trainer.runner.worker.workfolder import LEFT_OVER, remove_folder, remove_left_over

logger = logging.getLogger("lightning_trainer")

OPTION: Final = "--isolate-users"
_KILL_S: Final = 5.0  # a user whose processes start others faster than they can be killed is not used again
_NONE: Final = 0  # placeholder if no user is left
_PROBE: Final = """
import os, sys
open(sys.argv[1], "w").close()
import lightning_trainer
if not os.access(os.getcwd(), os.R_OK | os.X_OK):
    sys.exit(f"it can't read the folder {os.getcwd()}")
"""
# git checks who owns a repository before it clones it, and the user's repository belongs to another user.
_GIT: Final = "[safe]\n\tdirectory = *\n"


@dataclass(frozen=True, slots=True)
class OwnUser:
    """A user for one worker.

    Attributes:
        number: its user id and group id.
        home: a folder that only it can read; deleted when the worker has ended.
    """

    number: int
    home: Path

    def environment(self, kept: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of an agent that runs as this user, with paths where it has write permission."""
        own = {name: value for name, value in kept.items() if not (name.startswith("XDG_") or name == "MAIL")}
        temporary = str(self.home / "tmp")
        named = f"attempt-{self.number}"
        return {
            **own,
            "HOME": str(self.home),
            **dict.fromkeys(("TMPDIR", "TMP", "TEMP"), temporary),
            **dict.fromkeys(("USER", "LOGNAME"), named),
            "LIGHTNING_SPOOL": str(self.home / "spool"),
        }


class OwnUsers:
    """The user ids that a runner may assign to its workers. Call its methods on one event loop.

    Args:
        numbers: the ids.
        workers: number of workers, which need one each; a worker starts before its predecessor has fully ended.

    Raises:
        ConfigError: this system, or these ids, cannot separate attempts.
    """

    def __init__(self, numbers: range, workers: int) -> None:
        _check(numbers, workers)
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for number in numbers:
            self._free.put_nowait(number)
        self._good = len(numbers)
        self._taken: dict[int, OwnUser] = {}

    async def take(self) -> OwnUser:
        """Return a user without processes, with an empty home; wait until there is one.

        Raises:
            ConfigError: none is left, because processes of all of them could not be ended.
        """
        with waiting("worker start", f"a user id of {OPTION} that is free"):
            number = await self._free.get()
        if number == _NONE:
            self._free.put_nowait(_NONE)
            raise ConfigError(f"{OPTION}: processes of all the user ids given could not be ended, so none is left.")
        try:
            home = await asyncio.to_thread(_home, number)
        except BaseException:
            self._free.put_nowait(number)
            raise
        self._taken[number] = user = OwnUser(number, home)
        return user

    async def give_back(self, user: OwnUser) -> None:
        """End all processes of a user, delete its home, and release its id. A second call does nothing."""
        if user.number not in self._taken:
            return
        free = await asyncio.to_thread(_end_all, user.number)
        await asyncio.to_thread(_clear, user)
        self._taken.pop(user.number, None)
        if free:
            self._free.put_nowait(user.number)
            return
        self._good -= 1
        logger.warning("not all processes of user %d could be ended: it is not used again", user.number)
        if self._good == 0:
            self._free.put_nowait(_NONE)

    async def close(self) -> None:
        """Give back all users that are still taken, after all workers have ended."""
        for user in list(self._taken.values()):
            await self.give_back(user)


def parse_users(text: str) -> range:
    """Parse ``FIRST-LAST``.

    Raises:
        ConfigError: it is not a range of user ids.
    """
    found = re.fullmatch(r"(\d+)-(\d+)", text.strip())
    if found is None or not 0 < int(found[1]) <= int(found[2]) < 2**32 - 1:
        raise ConfigError(f"{OPTION} {text!r}: give user ids that nobody has, as FIRST-LAST, such as 200000-200031.")
    return range(int(found[1]), int(found[2]) + 1)


def check_key_file(path: Path) -> None:
    """Make sure that no other user may read a runner's key.

    Raises:
        ConfigError: others may.
    """
    if path.stat().st_mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"{OPTION}: every user may read or change the key file {path}. Set its mode to 600.")


def _check(numbers: range, workers: int) -> None:
    if sys.platform != "linux":
        raise ConfigError(f"{OPTION} needs Linux, and this is {sys.platform}. Run the runners in containers instead.")
    if os.geteuid() != 0:
        raise ConfigError(
            f"{OPTION} needs a runner that root started, because only root may run programs as another user. Without"
            " root, run each runner as a separate user, or in a separate container."
        )
    if len(numbers) < 2 * workers:
        raise ConfigError(
            f"{OPTION}: {workers} workers need {2 * workers} user ids, because an attempt starts before the last one"
            f" has fully ended; {numbers.start}-{numbers.stop - 1} has {len(numbers)}."
        )
    _check_unknown(numbers)
    for process, number in _processes_of(numbers):
        raise ConfigError(
            f"{OPTION}: process {process.pid} runs as user {number}. Give ids that no other runner uses, or end it."
        )
    remove_left_over()
    _try(numbers[0])
    _try(numbers[-1])


def _check_unknown(numbers: range) -> None:
    """Make sure that no id belongs to a known user or group."""
    import grp
    import pwd

    known = {user.pw_uid: user.pw_name for user in pwd.getpwall()}
    known |= {group.gr_gid: group.gr_name for group in grp.getgrall()}
    for number in sorted(known.keys() & set(numbers)):
        raise ConfigError(f"{OPTION}: {number} is {known[number]}. Give ids that nobody has, such as 200000-200031.")


def _try(number: int) -> None:
    """Make sure that a user with this id can run a worker."""
    home = _home(number)
    user = OwnUser(number, home)
    words = [sys.executable, "-c", _PROBE, str(home / "probe")]
    try:
        done = subprocess.run(  # noqa: S603 - our own words
            words,
            user=number,
            group=number,
            extra_groups=[],
            env=user.environment(allowed_environment(os.environ)),
            capture_output=True,
            check=False,
        )
        problem = "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip()[-500:]
    except (OSError, subprocess.SubprocessError) as error:
        problem = f"{error}"
    finally:
        remove_folder(home)
    if problem:
        raise ConfigError(
            f"{OPTION}: user {number} can't run a worker: {problem}. Python ({sys.executable}), its packages, the"
            f" agent's folder and {tempfile.gettempdir()} must be open to every user, and this container must have ids"
            " that large."
        )


def _home(number: int) -> Path:
    home = Path(tempfile.mkdtemp(prefix=f"{LEFT_OVER}{os.getpid()}-user-"))  # accessible to its owner only
    (home / "tmp").mkdir(mode=0o700)
    (home / ".gitconfig").write_text(_GIT)
    for path in (home / "tmp", home / ".gitconfig", home):
        os.chown(path, number, number)
    return home


def _end_all(number: int) -> bool:
    """End all processes of a user, and return whether none is left."""
    until = time.monotonic() + _KILL_S
    while alive := _processes_of(range(number, number + 1)):
        if time.monotonic() > until:
            return False
        for process, _ in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)
    return True


def _processes_of(numbers: range) -> list[tuple[psutil.Process, int]]:
    """Return the processes that run as one of these users, by any of their three ids, and have not ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            number = next((number for number in process.uids() if number in numbers), None)
            if number is not None and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process, number))
    return found


def _clear(user: OwnUser) -> None:
    """Delete a home, except for undelivered spans in it."""
    spool = user.home / "spool"
    if spool.is_dir() and not spool.is_symlink() and any(path.suffix == ".spans" for path in spool.iterdir()):
        kept = Path(tempfile.mkdtemp(prefix="lightning-undelivered-")) / "spool"
        spool.rename(kept)
        logger.warning("spans of an attempt could not be delivered: they are kept in %s", kept)
    remove_folder(user.home)
