"""Check, before any attempt, that a sandbox can be opened here and that it sees the programs."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_trainer.runner.sandbox.mounts import SYSTEM_FOLDERS, expand_paths, interpreters, is_inside
from lightning_trainer.runner.sandbox.sandbox import Sandbox
from lightning_trainer.work import BUBBLEWRAP, Work

_TRY_S: Final = 60.0
_TRY_BYTES: Final = 1 << 20
_ADVICE: Final = {
    True: "The kernel must let this user open user namespaces (sysctl kernel.unprivileged_userns_clone=1, or an"
    " AppArmor profile for bwrap); most containers forbid it. Allow it, or use docker or podman.",
    False: "The image must be on this machine (pull or build it first) and have python3.",
}


def check_sandbox(work: Work, programs: Sequence[str]) -> None:
    """Make sure that the sandbox of a command can be opened.

    Args:
        work: its options.
        programs: programs that will run in it.

    Raises:
        ConfigError: it cannot be opened, or it does not see them.
    """
    option, own = f"--sandbox {work.sandbox}", work.sandbox == BUBBLEWRAP
    if sys.platform != "linux":
        raise ConfigError(f"{option} needs Linux, and this is {sys.platform}. Run the command in a virtual machine.")
    if shutil.which(work.sandbox or "") is None:
        package = "bubblewrap" if own else work.sandbox
        raise ConfigError(f"{option}: no program {work.sandbox!r} is found. Install {package}.")
    for path in expand_paths(work.sandbox_read):
        if not os.path.exists(path):  # noqa: PTH110
            raise ConfigError(f"--sandbox-read {path!r}: there is no such file or folder. Check the path.")
    for program in programs if own else ():
        _check_program(program, work)
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(1) as thread:  # an event loop may be running here
        folder = Path(root, "work")
        folder.mkdir()
        problem = thread.submit(asyncio.run, _try(work, folder)).result()
    if problem:
        raise ConfigError(f"{option} does not work on this machine: {problem}\n{_ADVICE[own]}")


def _check_program(name: str, work: Work) -> None:
    """Make sure that a program of this machine is in a place that bubblewrap makes visible.

    Raises:
        ConfigError: it is not.
    """
    found = shutil.which(name)
    if found is None or ("/" in name and not name.startswith("/")):
        return  # a program in the work folder
    seen = ("/usr", *SYSTEM_FOLDERS, *interpreters(), *expand_paths(work.sandbox_read))
    for path in (Path(found).absolute(), Path(found).resolve()):
        if not is_inside(str(path), seen):
            raise ConfigError(
                f"--sandbox {work.sandbox}: the program {name!r} is in {path.parent}, which the sandbox does not see."
                " Add --sandbox-read with the folder of its installation."
            )


async def _try(work: Work, folder: Path) -> str:
    """Start `true` in a sandbox; return what went wrong, or an empty string."""
    async with Sandbox(work, folder, _TRY_BYTES).started(["true"], {}, (), None) as command:
        process = await asyncio.create_subprocess_exec(
            *command.words, env=command.environment, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), _TRY_S)
        except TimeoutError:
            process.kill()
            return f"nothing happened in {_TRY_S:g} s"
    said = output.decode(errors="replace").strip()[-1000:]
    return "" if process.returncode == 0 else said or f"it ended with exit status {process.returncode}"
