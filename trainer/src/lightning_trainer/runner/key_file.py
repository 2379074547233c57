"""A runner's key, read from its file again when the server has renewed it."""

from __future__ import annotations

import logging
from collections.abc import Generator
from pathlib import Path

import httpx

logger = logging.getLogger("lightning_trainer")


class KeyFromFile(httpx.Auth):
    """Authentication with the key in a file. If it is rejected, and the file contains a new one, retries with that.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key = ""
        self._stamp: tuple[int, int] | None = None

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the key to a request."""
        self._read()
        request.headers["authorization"] = f"Bearer {self._key}"
        response = yield request
        if response.status_code == httpx.codes.UNAUTHORIZED and self._read():
            request.headers["authorization"] = f"Bearer {self._key}"
            yield request

    def _read(self) -> bool:
        """Read the file if it has changed, and return whether it contains another key than before."""
        try:
            found = self._path.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            if stamp == self._stamp:
                return False
            key = self._path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("the key file %s can't be read, so the last key is used: %s", self._path, error)
            return False
        changed, self._key, self._stamp = key != self._key, key, stamp
        return changed
