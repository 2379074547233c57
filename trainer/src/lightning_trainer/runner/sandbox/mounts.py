"""The files of the machine that a sandbox sees."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

# From /etc: what programs need to find libraries, names, certificates and the time. Nothing there is secret.
SYSTEM_FILES: Final = (
    "/etc/alternatives", "/etc/ca-certificates", "/etc/crypto-policies", "/etc/fonts", "/etc/group", "/etc/hosts",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/mime.types",
    "/etc/nsswitch.conf", "/etc/os-release", "/etc/passwd", "/etc/pki/ca-trust", "/etc/pki/tls/certs", "/etc/protocols",
    "/etc/services", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/timezone",
)  # fmt: skip
SYSTEM_FOLDERS: Final = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")  # links into /usr, or folders
KERNEL_FILES: Final = (
    "/proc/acpi", "/proc/asound", "/proc/bus", "/proc/driver", "/proc/fs", "/proc/irq", "/proc/mtrr", "/proc/pressure",
    "/proc/scsi", "/proc/sys", "/proc/sysrq-trigger",
)  # fmt: skip
STARTER: Final = Path(__file__).with_name("starter.py")


def interpreters() -> list[str]:
    """Return the folders outside /usr of the Python that we run on and of its packages."""
    folders = (sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))  # noqa: PTH120
    return [folder for folder in dict.fromkeys(folders) if not is_inside(folder, ("/usr",))]


def shared_objects(folder: Path) -> list[str]:
    """Return the object folders that a clone shares with other repositories, which may share others themselves.

    Args:
        folder: a new work folder, in which no agent has worked.
    """
    found: list[str] = []
    places = [folder / ".git" / "objects"]
    while places:
        place = places.pop()
        for line in _lines(place / "info" / "alternates"):
            objects = os.path.normpath(place / line)
            if objects not in found:
                found.append(objects)
                places.append(Path(objects))
    return found


def is_inside(path: str, folders: Iterable[str]) -> bool:
    """Whether a path is one of these folders or inside one."""
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


def expand_paths(paths: Sequence[str]) -> list[str]:
    """Return user-named paths as absolute paths."""
    return [os.path.abspath(os.path.expanduser(path)) for path in paths]  # noqa: PTH100, PTH111


def _lines(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    except OSError:
        return []
