"""How a command is started in a sandbox: the command lines of bubblewrap, docker and podman."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning_trainer.runner.sandbox.door import SOCKET
from lightning_trainer.runner.sandbox.mounts import KERNEL_FILES, STARTER, SYSTEM_FILES, SYSTEM_FOLDERS, interpreters

HOME: Final = "/tmp/home"  # noqa: S108 - in the sandbox's own /tmp
_DOOR: Final = "/run/lightning"  # in the sandbox: the folder of the socket
_STARTER: Final = "/run/lightning-starter.py"
_PROCESSES: Final = "4096"  # limit for a container
_NO_SITE: Final = ("-I", "-S", "-B")  # the starter imports nothing from the folder or the environment


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxPlan:
    """A command to be started in a sandbox.

    Attributes:
        words: program and arguments.
        environment: all its variables, except its home.
        folder: its working folder; it is the only place where what it writes is kept.
        readable: paths that it may read.
        door: the folder of the socket by which the starter connects to us.
        arguments: arguments of the starter.
        most_bytes: size of its /tmp.
        image: image of a container.
        name: name of a container.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    readable: Sequence[str]
    door: Path
    arguments: Sequence[str]
    most_bytes: int
    image: str
    name: str

    @property
    def starter(self) -> list[str]:
        """The starter's own words, after the interpreter."""
        return [*_NO_SITE, _STARTER, f"{_DOOR}/{SOCKET}", *self.arguments, *self.words]

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the command. Its home, its temporary files and its folder are the sandbox's."""
        own = {"HOME": HOME, "TMPDIR": "/tmp", "PWD": str(self.folder)}  # noqa: S108
        return {**self.environment, **own}


def bubblewrap(plan: SandboxPlan) -> tuple[list[str], dict[str, str]]:
    """Return the words and the environment of `bwrap`. Keys go into the environment: every user can read the words."""
    words = ["bwrap", "--unshare-all", "--die-with-parent", "--hostname", "sandbox", "--cap-drop", "ALL", *_system()]
    words += ["--proc", "/proc", *_kernel(), "--dev", "/dev"]
    words += ["--size", str(plan.most_bytes), "--tmpfs", "/tmp"]  # noqa: S108
    for path in (*interpreters(), *plan.readable):
        words += ["--ro-bind", path, path]
    words += ["--ro-bind", str(plan.door), _DOOR, "--ro-bind", str(STARTER), _STARTER]
    words += ["--bind", str(plan.folder), str(plan.folder), "--chdir", str(plan.folder)]
    return [*words, "--", os.path.realpath(sys.executable), *plan.starter], plan.variables


def container(program: str, plan: SandboxPlan) -> tuple[list[str], dict[str, str]]:
    """Return the words and the environment of `docker run` or `podman run`. The variables are passed by name."""
    words = [program, "run", "--rm", "--interactive", "--name", plan.name, "--pull", "never", "--network", "none"]
    words += ["--read-only", "--tmpfs", f"/tmp:rw,exec,nosuid,mode=1777,size={plan.most_bytes}"]  # noqa: S108
    words += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--pids-limit", _PROCESSES]
    words += ["--user", f"{os.geteuid()}:{os.getegid()}"]
    if program == "podman":
        words += ["--security-opt", "label=disable"]  # otherwise SELinux would deny access to the work folder
        words += ["--userns", "keep-id"] if os.geteuid() else []
    for path in plan.readable:
        words += ["--mount", _mount(path, path, read_only=True)]
    words += ["--mount", _mount(str(plan.door), _DOOR, read_only=True)]
    words += ["--mount", _mount(str(STARTER), _STARTER, read_only=True)]
    words += ["--mount", _mount(str(plan.folder), str(plan.folder), read_only=False), "--workdir", str(plan.folder)]
    own = {"HOME", "TMPDIR", "PWD"}  # the client has other values for them
    for name, value in plan.variables.items():
        words += ["--env", f"{name}={value}" if name in own else name]
    words += ["--entrypoint", "python3", plan.image, *plan.starter]
    return words, {**os.environ, **{name: value for name, value in plan.variables.items() if name not in own}}


def _system() -> list[str]:
    """Return the arguments that make the system's programs, libraries and certificates visible, read-only."""
    words = ["--ro-bind", "/usr", "/usr"]
    for path in SYSTEM_FOLDERS:
        if os.path.islink(path):  # noqa: PTH114
            words += ["--symlink", os.readlink(path), path]  # noqa: PTH115
        else:
            words += ["--ro-bind-try", path, path]
    for path in SYSTEM_FILES:
        words += ["--ro-bind-try", path, path]
    return words


def _kernel() -> list[str]:
    """Return the arguments that make the kernel's settings read-only: if root runs this, they are its files."""
    return [word for path in KERNEL_FILES for word in ("--ro-bind-try", path, path)]


def _mount(source: str, target: str, *, read_only: bool) -> str:
    """Return the value of ``--mount``: the fields of a CSV line, so that a comma in a path is quoted."""
    line = io.StringIO()
    own = ["readonly"] if read_only else []
    csv.writer(line, lineterminator="").writerow(["type=bind", f"source={source}", f"target={target}", *own])
    return line.getvalue()
