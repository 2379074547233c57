"""The register of keys: which were issued and which are revoked. It contains their ids, never the keys themselves."""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from lightning_spans.errors import ConfigError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_LOOK_S: Final = 1.0  # a key that another process revoked becomes invalid within about this time
_KEPT_S: Final = 86_400.0  # seconds for which expired keys stay in the list


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A key that was issued.

    Attributes:
        key_id: its id.
        scope: what it permits.
        holder: its owner; None if nobody is named.
        issued_s: Unix time in seconds.
        expires_s: Unix time in seconds.
        revoked_s: Unix time since when it is invalid; None: it was never revoked.
    """

    key_id: str
    scope: str
    holder: str | None
    issued_s: float
    expires_s: float
    revoked_s: float | None = None


class Register:
    """A file with the issued keys. Several processes may use it: the server, and the command line.

    Args:
        path: of the file, which is created readable only by its owner.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._good: frozenset[str] = frozenset()
        self._looked_s = float("-inf")
        self._stamp: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def add(self, key: IssuedKey) -> None:
        """Add a key, and drop those that expired more than a day ago.

        Raises:
            ConfigError: the file cannot be written.
        """
        with self._open_for_changes() as keys:
            keys[:] = [one for one in keys if one.expires_s > time.time() - _KEPT_S] + [key]

    def revoke(self, name: str) -> list[IssuedKey]:
        """Revoke the key with this id, or all keys of a holder. Returns them; empty if none is valid.

        Raises:
            ConfigError: the file cannot be written.
        """
        now, found = round(time.time(), 3), []
        with self._open_for_changes() as keys:
            for at, key in enumerate(keys):
                if name in {key.key_id, key.holder} and key.revoked_s is None:
                    keys[at] = replace(key, revoked_s=now)
                    found.append(keys[at])
        return found

    def listed(self) -> list[IssuedKey]:
        """Return the keys, oldest first.

        Raises:
            ConfigError: the file cannot be read.
        """
        try:
            return [IssuedKey(**one) for one in json.loads(self._path.read_text(encoding="utf-8"))]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{self._path}: can't be read as the register of keys: {error}") from None

    def stands(self, key_id: str) -> bool:
        """Whether a key is in the register and not revoked. The file is checked once a second.

        Raises:
            ConfigError: the file cannot be read.
        """
        if key_id not in self._good or time.monotonic() - self._looked_s >= _LOOK_S:
            self._look()
        return key_id in self._good

    def _look(self) -> None:
        with self._lock:
            self._looked_s = time.monotonic()
            try:
                found = self._path.stat()
            except FileNotFoundError:
                self._good, self._stamp = frozenset(), None
                return
            stamp = (found.st_mtime_ns, found.st_ino)
            if stamp != self._stamp:
                self._good = frozenset(key.key_id for key in self.listed() if key.revoked_s is None)
                self._stamp = stamp

    @contextmanager
    def _open_for_changes(self) -> Iterator[list[IssuedKey]]:
        """Return the list for changes; no other process can change it meanwhile."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self._path.with_name(f".{self._path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                _wait_for(lock)
                keys = self.listed()
                yield keys
                write_private(self._path, json.dumps([asdict(key) for key in keys], indent=1))
            finally:
                os.close(lock)
        except OSError as error:
            raise ConfigError(f"{self._path}: the register of keys can't be written: {error.strerror}") from None
        self._looked_s = float("-inf")


def register_of(secret: Path) -> Path:
    """Return the path of the register for the keys that a secret signs."""
    return secret.with_name(f"{secret.name}.keys")


def write_private(path: Path, text: str) -> None:
    """Write a new file that only its owner can read. An existing file of that name is never reused.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text + "\n")
    temporary.replace(path)


def _wait_for(file: int) -> None:
    """Lock an open file; closing it unlocks it."""
    if sys.platform == "win32":
        msvcrt.locking(file, msvcrt.LK_LOCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_EX)
