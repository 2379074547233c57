"""Keys: signed, expiring, and good for one thing each. The server keeps no list of them, only the secret."""

from __future__ import annotations

import os
import secrets
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias, get_args

from lightning_spans.errors import ConfigError, LightningError

Scope: TypeAlias = Literal["attempt", "evaluator", "runner", "live", "admin"]
_PREFIX: Final = "lk-"
_SECRET_BYTES: Final = 32
_SECRETS_KEPT: Final = 2  # the newest signs; the one before it is still good, until the next is made
_LONGEST: Final = 2048  # characters of a key; longer ones are refused unread


class KeyRefusedError(LightningError):
    """The key is not one of this server's, was changed, or is too old."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a key opens.

    Attributes:
        scope: ``attempt`` samples and sends its own spans; ``evaluator`` gives rewards; ``runner`` claims and finishes;
            ``live`` sends spans of production; ``admin`` does all.
        rollout_id: of an attempt's key; None otherwise.
        attempt_id: of an attempt's key; None otherwise.
        agent: the agent whose calls these are, where no header names one.
        expires_s: Unix time in seconds.
        holder: whose key it is; goes into the source of the rewards that an evaluator gives.
    """

    scope: Scope
    rollout_id: str | None
    attempt_id: str | None
    agent: str | None
    expires_s: float
    holder: str | None = None


class Keys:
    """Issues and checks keys (HMAC-SHA256; a key can't choose another algorithm, for it names none).

    Args:
        secret: signs.
        older: secrets whose keys are still good.
    """

    def __init__(self, secret: bytes, older: Sequence[bytes] = ()) -> None:
        from itsdangerous import URLSafeSerializer

        short = min(map(len, (secret, *older)))
        if short < _SECRET_BYTES:
            raise ConfigError(f"the secret of the keys must have at least {_SECRET_BYTES} bytes, not {short}")
        import hashlib

        self._signer = URLSafeSerializer(
            [*reversed(older), secret],  # the last one signs
            salt="lightning-key",
            signer_kwargs={"digest_method": hashlib.sha256},
        )

    @classmethod
    def fresh(cls) -> Keys:
        """Make keys of a new secret that is kept nowhere: they die with the process."""
        return cls(secrets.token_bytes(_SECRET_BYTES))

    @classmethod
    def from_file(cls, path: Path, *, rotate: bool = False) -> Keys:
        """Use the secrets in this file, which is made, for its owner's eyes only, when it is not there.

        Args:
            path: of the file; a secret a line, the newest first.
            rotate: make a new secret. Keys of the one before it stay good until the next; those of older ones do not.

        Raises:
            ConfigError: the file can't be read or made, others may read it, or it holds no secret.
        """
        try:
            if not path.exists():
                write_private(path, secrets.token_hex(_SECRET_BYTES))
            elif rotate:
                kept = [secrets.token_hex(_SECRET_BYTES), *_lines(path)][:_SECRETS_KEPT]
                write_private(path, "\n".join(kept))
            newest, *older = map(bytes.fromhex, _lines(path) or [""])
            return cls(newest, older)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: can't be used as the secret of the keys: {error}") from None

    def issue(
        self,
        scope: Scope,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        agent: str | None = None,
        expires_s: float = 30 * 86400.0,
        holder: str | None = None,
    ) -> str:
        """Make a key.

        Args:
            scope: what it opens.
            rollout_id: for an attempt's key.
            attempt_id: for an attempt's key.
            agent: whose calls they are where no header names an agent.
            expires_s: seconds from now after which it opens nothing.
            holder: whose key it is, such as an evaluator's name.

        Raises:
            ValueError: an attempt's key without an attempt, or another key with one.
        """
        if (scope == "attempt") != (rollout_id is not None and attempt_id is not None):
            raise ValueError(f"a key of scope {scope!r} with rollout {rollout_id!r} and attempt {attempt_id!r}")
        payload = [scope, round(time.time() + expires_s, 3), rollout_id, attempt_id, agent, holder]
        return _PREFIX + str(self._signer.dumps(payload))

    def check(self, token: str) -> Grant:
        """Say what a key opens. The signature is compared in constant time.

        Raises:
            KeyRefusedError: it is not a key of this server, or it is too old. The message never holds the key.
        """
        from itsdangerous import BadData

        if len(token) > _LONGEST or not token.startswith(_PREFIX):
            raise KeyRefusedError("this key is not one of this server's")
        try:
            scope, expires_s, rollout_id, attempt_id, agent, holder = self._signer.loads(token.removeprefix(_PREFIX))
        except (BadData, ValueError, TypeError):
            raise KeyRefusedError("this key is not one of this server's") from None
        if scope not in get_args(Scope):
            raise KeyRefusedError("this key is of a kind that this server does not know")
        if time.time() >= expires_s:
            raise KeyRefusedError("this key is too old: it opens nothing any more")
        return Grant(scope, rollout_id, attempt_id, agent, expires_s, holder)


def _lines(path: Path) -> list[str]:
    """Read the secrets of a file that nobody else may read."""
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{path}: others may read the secret of the keys. Run: chmod 600 {path}")
    return path.read_text(encoding="ascii").split()


def write_private(path: Path, text: str) -> None:
    """Write a new file that only its owner can read; another's file of that name is never reused.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text + "\n")
    temporary.replace(path)
