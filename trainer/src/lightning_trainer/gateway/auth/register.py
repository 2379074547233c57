"""The register of keys: which were issued and which are revoked. It contains their ids, never the keys themselves."""

from __future__ import annotations

import json
import os
import secrets
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.http.masking import masking_logger

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

logger = masking_logger(__name__)

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

    Attributes:
        failure: why the file can't be read now; None: it can. Meanwhile, the keys that were valid before stay valid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.failure: str | None = None
        self._good: frozenset[str] | None = None
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
            raise self._unreadable(error) from None

    def stands(self, key_id: str) -> bool:
        """Whether a key is in the register and not revoked. The file is checked once a second.

        Raises:
            ConfigError: the file cannot be read, and never could be.
        """
        good = self._good
        if good is None or key_id not in good or time.monotonic() - self._looked_s >= _LOOK_S:
            good = self._look()
        return key_id in good

    def _look(self) -> frozenset[str]:
        with self._lock:
            self._looked_s = time.monotonic()
            try:
                self._good = good = self._read_again(self._good)
                self.failure = None
            except ConfigError as error:
                if self._good is None:
                    raise
                good, failure = self._good, str(error)
                if failure != self.failure:
                    logger.error("%s. The keys that were valid before stay valid.", failure)
                self.failure = failure
            return good

    def _read_again(self, known: frozenset[str] | None) -> frozenset[str]:
        """Return the ids of the valid keys: `known` if the file has not changed.

        Raises:
            ConfigError: the file cannot be read.
        """
        try:
            found = self._path.stat()
        except FileNotFoundError:
            self._stamp = None
            return frozenset()
        except OSError as error:
            raise self._unreadable(error) from None
        stamp = (found.st_mtime_ns, found.st_ino)
        if stamp == self._stamp and known is not None:
            return known
        good = frozenset(key.key_id for key in self.listed() if key.revoked_s is None)
        self._stamp = stamp
        return good

    def _unreadable(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self._path}: can't be read as the register of keys: {error}")

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
                write_private(self._path, json.dumps([asdict(key) for key in keys], indent=1), keep_owner=True)
            finally:
                os.close(lock)
        except OSError as error:
            raise ConfigError(f"{self._path}: the register of keys can't be written: {error.strerror}") from None
        self._looked_s = float("-inf")


def register_of(secret: Path) -> Path:
    """Return the path of the register for the keys that a secret signs."""
    return secret.with_name(f"{secret.name}.keys")


def write_private(path: Path, text: str, *, keep_owner: bool = False) -> None:
    """Write a new file that only its owner can read. An existing file of that name is never reused.

    Args:
        path: of the file.
        text: its only line.
        keep_owner: whether it gets the owner and mode of an existing file of that name.

    Raises:
        OSError: it cannot be written.
        ConfigError: the existing file's owner is another user, and this one may not give files to others.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text + "\n")
            if keep_owner and path.exists():
                _give_to_owner_of(path, file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _give_to_owner_of(path: Path, file: int) -> None:
    """Give an open file the owner and mode of another: the server must be able to read what root writes."""
    if sys.platform == "win32":
        return
    old, new = path.stat(), os.fstat(file)
    try:
        if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
            os.fchown(file, old.st_uid, old.st_gid)
    except PermissionError:
        if old.st_uid == new.st_uid:  # only the group differs: then the new one gets nothing
            return
        raise ConfigError(
            f"{path} belongs to the user {old.st_uid}, and so must its next version. Run the command as that user."
        ) from None
    os.fchmod(file, stat.S_IMODE(old.st_mode))


def _wait_for(file: int) -> None:
    """Lock an open file; closing it unlocks it."""
    if sys.platform == "win32":
        msvcrt.locking(file, msvcrt.LK_LOCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_EX)
