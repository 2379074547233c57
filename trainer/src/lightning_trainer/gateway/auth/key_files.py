"""The files with a server's keys: written when it starts, and again before their keys expire."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError, LightningError
from lightning_trainer.gateway.auth.keys import LIFE_S, Grant, KeyRefusedError, Keys, Scope
from lightning_trainer.gateway.auth.register import write_private
from lightning_trainer.gateway.http.masking import masking_logger

logger = masking_logger(__name__)
_AGAIN_S: Final = 60.0  # seconds between attempts to write a file after a failure


class KeyFiles:
    """Keys in files. A key is renewed at half its lifetime, so that its readers have the other half to reload it.

    Args:
        keys: issues them.
        files: path of each scope's key.
        life_s: seconds for which a key is valid.
    """

    def __init__(self, keys: Keys, files: Mapping[Scope, Path], *, life_s: float = LIFE_S) -> None:
        self.keys = keys
        self._files = dict(files)
        self._life_s = life_s
        self._grants: dict[Scope, Grant] = {}
        self._failure: str | None = None
        self._next_s = float("-inf")

    @property
    def paths(self) -> dict[str, str]:
        """The files by name: ``key_file`` for the admin's, ``runner_key_file`` and so on for the others."""
        return {
            "key_file" if scope == "admin" else f"{scope}_key_file": str(path) for scope, path in self._files.items()
        }

    def write(self) -> None:
        """Issue all keys again.

        Raises:
            ConfigError: a file cannot be written.
        """
        for scope in self._files:
            self._write(scope)

    def renew(self) -> None:
        """Renew the keys that have reached half their lifetime, or are revoked. Usually there are none."""
        now = time.time()
        if now < self._next_s:
            return
        self._next_s = now + 1.0
        for scope, grant in self._grants.items():
            if not self._is_old(grant, now):
                continue
            try:
                self._write(scope)
                logger.warning("the key in %s was renewed", self._files[scope])
                self._failure = None
            except LightningError as error:
                logger.error("a key can't be renewed: %s", error)
                self._failure, self._next_s = str(error), now + _AGAIN_S

    def status(self) -> dict[str, Any]:
        """Return for ``/healthz`` how long the keys are valid, and whether renewing or reading them fails."""
        left_s = min((grant.expires_s for grant in self._grants.values()), default=0.0) - time.time()
        good = {"good_for_s": round(left_s), "renewed_every_s": round(self._life_s / 2)}
        if failure := self._failure or self.keys.register_failure:
            return {"status": "error", "error": failure, **good}
        return {"status": "ok" if left_s > 0 else "error", **good}

    def _is_old(self, grant: Grant, now: float) -> bool:
        try:
            self.keys.check_grant(grant)
        except KeyRefusedError:
            return True
        return now > grant.expires_s - self._life_s / 2

    def _write(self, scope: Scope) -> None:
        path = self._files[scope]
        token = self.keys.issue(scope, expires_s=self._life_s, holder=None if scope == "admin" else scope)
        try:
            write_private(path, token)
        except OSError as error:
            raise ConfigError(f"key file {path} can't be written: {error.strerror}. Choose --key-file.") from None
        self._grants[scope] = self.keys.check(token)
