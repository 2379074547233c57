"""git: with the user's settings in the user's repository, and without any in a repository of ours."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from lightning_trainer.runner.worker.trees import WorkFolderError

# No setting of the user, the machine or attributes names a program that runs.
SEALED: Final[Mapping[str, str]] = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
}
_SETTINGS: Final = (
    "core.quotepath=false",
    "core.autocrlf=false",
    "advice.detachedHead=false",
    "core.fsmonitor=false",
    "core.bigFileThreshold=4m",  # larger files are compared as a whole
    "core.protectNTFS=false",  # otherwise a file named git~1 would be an error
    "core.protectHFS=false",
)


def run_git(
    folder: Path,
    *words: str,
    environment: Mapping[str, str] | None = None,
    status: Sequence[int] = (0,),
    given: bytes = b"",
    most: int | None = None,
) -> bytes:
    """Run git in a folder.

    Args:
        folder: the folder. Never one that an agent has written to.
        words: the command and its arguments.
        environment: variables on top of ours, such as `SEALED`.
        status: exit statuses that are not failures.
        given: its stdin.
        most: bytes to read of its output; the rest is dropped, and then its exit status is ignored.

    Raises:
        WorkFolderError: it failed.
    """
    with tempfile.TemporaryFile() as entered, tempfile.TemporaryFile() as errors:
        entered.write(given)
        entered.seek(0)
        with subprocess.Popen(  # noqa: S603 - our own words; a revision stands behind --end-of-options
            ["git", *_settings(), *words],  # noqa: S607 - the user's git
            cwd=folder,
            env=_environment(environment),
            stdin=entered,
            stdout=subprocess.PIPE,
            stderr=errors,
        ) as process:
            output = _output(process).read(-1 if most is None else most)
            if most is not None and len(output) == most:
                process.kill()
                return output
        if process.returncode not in status:
            errors.seek(0)
            told = errors.read().decode(errors="replace").strip()[-2000:]
            raise WorkFolderError(f"git {words[0]} in {folder}: {told or f'exit status {process.returncode}'}")
        return output


def read_blobs(git_dir: Path, names: Iterable[str]) -> Iterator[bytes]:
    """Yield the contents of blobs of a repository of ours, in this order."""
    with tempfile.TemporaryFile() as wanted:
        wanted.write("".join(f"{name}\n" for name in names).encode())
        wanted.seek(0)
        with subprocess.Popen(  # noqa: S603
            ["git", *_settings(), "cat-file", "--batch"],  # noqa: S607
            cwd=git_dir,
            env=_environment({**SEALED, "GIT_DIR": str(git_dir)}),
            stdin=wanted,
            stdout=subprocess.PIPE,
        ) as process:
            output = _output(process)
            while header := output.readline().split():
                if header[1] != b"blob":
                    raise WorkFolderError(f"git cat-file in {git_dir}: {b' '.join(header).decode()}")
                yield output.read(int(header[2]))
                output.read(1)


def _output(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdout is None:
        raise AssertionError("it was started with a pipe")
    return process.stdout


def _settings() -> list[str]:
    return [word for setting in _SETTINGS for word in ("-c", setting)]


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**own, **(more or {}), "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
