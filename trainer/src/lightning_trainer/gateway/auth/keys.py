"""Keys: signed, expiring, each with one scope.

Checking one needs only the secret. Keys of people and machines also have an id and are listed in a register, where they
can be revoked; those of attempts end with their attempt.
"""

from __future__ import annotations

import secrets
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, get_args

from lightning_spans.errors import ConfigError, LightningError
from lightning_spans.terms import TENANT
from lightning_trainer.gateway.auth.register import IssuedKey, Register, register_of, write_private

if TYPE_CHECKING:
    from itsdangerous import URLSafeSerializer

Scope: TypeAlias = Literal[
    "attempt", "evaluator", "runner", "live", "caller", "viewer", "approver", "deployer", "admin"
]
_PREFIX: Final = "lk-"
_SECRET_BYTES: Final = 32
_SECRETS_KEPT: Final = 2  # the newest signs; the previous one stays valid until the next is created
_LONGEST: Final = 2048  # longest key, in characters; longer ones are rejected unread
_AT_ZERO_S: Final = time.time() - time.monotonic()
LIFE_S: Final = 30 * 86_400.0
RUN_S: Final = 3650 * 86_400.0  # validity of keys whose secret ends with the process: a run may take long


class KeyRefusedError(LightningError):
    """The key is not one of this server's, was changed, or has expired."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a key permits.

    Attributes:
        scope: ``attempt`` samples and sends its own spans; ``evaluator`` gives rewards; ``runner`` claims and finishes;
            ``live`` sends spans of production, and ``caller`` also calls models; ``viewer`` reads what the viewer
                shows;
            ``approver`` approves candidates of deployments; ``deployer`` changes deployments in the viewer; ``admin``
                does everything except these two.
        rollout_id: of an attempt's key; None otherwise.
        attempt_id: of an attempt's key; None otherwise.
        agent: the agent that makes the calls, if no header names one.
        expires_s: Unix time in seconds.
        holder: the key's owner; part of the source of the rewards that an evaluator gives, and the owner of the
            attempts that a runner claims.
        fence: fencing number of an attempt's key; an attempt that uses the id again has another.
        key_id: its id in the register; None for an attempt's key.
        failures: earlier attempts of its rollout that failed; 0 for other keys.
        replay: whether its attempt replays an earlier one.
        terms: of the data that comes with a live key: names and values of `lightning_spans.terms`.
    """

    scope: Scope
    rollout_id: str | None
    attempt_id: str | None
    agent: str | None
    expires_s: float
    holder: str | None = None
    fence: int | None = None
    key_id: str | None = None
    failures: int = 0
    replay: bool = False
    terms: tuple[tuple[str, str | float], ...] = ()

    @property
    def is_live(self) -> bool:
        """Whether it is the key of a program in production."""
        return self.scope in {"live", "caller"}

    @property
    def conversations(self) -> str | None:
        """Whose conversations it may continue: its attempt's, its tenant's, or those of all keys with neither."""
        if self.attempt_id is not None:
            return self.attempt_id
        tenant = dict(self.terms).get(TENANT)
        return None if tenant is None else f"{TENANT}:{tenant}"


class Keys:
    """Issues and checks keys (HMAC-SHA256; a key names no algorithm, so it cannot choose another).

    Args:
        secret: signs.
        older: secrets whose keys are still valid.
        register: of the valid keys; None: all keys that are signed and not expired are valid.
    """

    def __init__(self, secret: bytes, older: Sequence[bytes] = (), *, register: Register | None = None) -> None:
        short = min(map(len, (secret, *older)))
        if short < _SECRET_BYTES:
            raise ConfigError(f"the secret of the keys must have at least {_SECRET_BYTES} bytes, not {short}")
        self._register = register
        self._secrets = [*reversed(older), secret]  # the last one signs
        self._signer = self.signer("key")

    @property
    def register_failure(self) -> str | None:
        """Why the register can't be read now; see `Register.failure`."""
        return None if self._register is None else self._register.failure

    def signer(self, purpose: str) -> URLSafeSerializer:
        """Return what signs and checks texts for one purpose. A text signed for another purpose is rejected."""
        import hashlib

        from itsdangerous import URLSafeSerializer

        return URLSafeSerializer(
            self._secrets, salt=f"lightning-{purpose}", signer_kwargs={"digest_method": hashlib.sha256}
        )

    @classmethod
    def fresh(cls) -> Keys:
        """Create keys with a new secret that is stored nowhere: they end with the process."""
        return cls(secrets.token_bytes(_SECRET_BYTES))

    @classmethod
    def from_file(cls, path: Path, *, rotate: bool = False) -> Keys:
        """Use the secrets in this file. If it does not exist, it is created, readable only by its owner.

        Args:
            path: of the file; one secret per line, the newest first.
            rotate: create a new secret. Keys of the previous one stay valid until the next rotation; older ones do not.

        Raises:
            ConfigError: the file cannot be read or created, others may read it, or it contains no secret.
        """
        try:
            if not path.exists():
                write_private(path, secrets.token_hex(_SECRET_BYTES))
            elif rotate:
                kept = [secrets.token_hex(_SECRET_BYTES), *_lines(path)][:_SECRETS_KEPT]
                write_private(path, "\n".join(kept))
            newest, *older = map(bytes.fromhex, _lines(path) or [""])
            return cls(newest, older, register=Register(register_of(path)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: can't be used as the secret of the keys: {error}") from None

    def issue(
        self,
        scope: Scope,
        *,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        fence: int | None = None,
        failures: int = 0,
        replay: bool = False,
        agent: str | None = None,
        expires_s: float = LIFE_S,
        holder: str | None = None,
        terms: Mapping[str, str | float] | None = None,
    ) -> str:
        """Create a key.

        Args:
            scope: what it permits.
            rollout_id: for an attempt's key.
            attempt_id: for an attempt's key.
            fence: fencing number, for an attempt's key.
            failures: earlier attempts of the rollout that failed, for an attempt's key.
            replay: whether the attempt replays an earlier one.
            agent: the agent that makes the calls if no header names one.
            expires_s: seconds from now until it expires.
            holder: the key's owner, such as a runner's or an evaluator's name.
            terms: of the data that comes with a live key.

        Raises:
            ValueError: an attempt's key without an attempt, or another key with one.
            ConfigError: the register cannot be written.
        """
        own = (rollout_id, attempt_id, fence)
        if (scope == "attempt") != all(each is not None for each in own) or (scope != "attempt" and any(own)):
            raise ValueError(f"a key of scope {scope!r} with rollout, attempt and fence {own}")
        until_s = round(_now_s(attempt_id) + expires_s, 3)
        key_id = None if scope == "attempt" else secrets.token_hex(6)
        if self._register is not None and key_id is not None:
            self._register.add(IssuedKey(key_id, scope, holder, round(time.time(), 3), until_s))
        payload: list[object] = [scope, until_s, rollout_id, attempt_id, fence, agent, holder, key_id, failures]
        payload += [replay, dict(terms)] if terms else [True] if replay else []
        return _PREFIX + str(self._signer.dumps(payload))

    def check(self, token: str) -> Grant:
        """Return what a key permits. The signature is compared in constant time.

        Raises:
            KeyRefusedError: it is not this server's, or is revoked or expired. The message never contains the key.
        """
        from itsdangerous import BadData

        if len(token) > _LONGEST or not token.startswith(_PREFIX):
            raise KeyRefusedError("this key is not one of this server's")
        try:
            found = self._signer.loads(token.removeprefix(_PREFIX))
            scope, expires_s, rollout_id, attempt_id, fence, agent, holder, key_id, failures, *rest = found
            replay, terms = bool(rest[:1] and rest[0]), tuple(sorted(rest[1].items())) if len(rest) > 1 else ()
        except (BadData, ValueError, TypeError, AttributeError):
            raise KeyRefusedError("this key is not one of this server's") from None
        if scope not in get_args(Scope):
            raise KeyRefusedError("this server does not know this kind of key")
        grant = Grant(scope, rollout_id, attempt_id, agent, expires_s, holder, fence, key_id, failures, replay, terms)
        self.check_grant(grant)
        return grant

    def check_grant(self, grant: Grant) -> None:
        """Check that a key which was checked before is still valid.

        Raises:
            KeyRefusedError: it is revoked or has expired.
        """
        if _now_s(grant.attempt_id) >= grant.expires_s:
            raise KeyRefusedError("this key has expired")
        if self._register is not None and grant.key_id is not None and not self._register.stands(grant.key_id):
            raise KeyRefusedError("this key is revoked")


def _now_s(attempt_id: str | None) -> float:
    """Return the Unix time.

    For attempts, changes of the machine's clock since the start of this process are ignored.
    """
    return time.time() if attempt_id is None else _AT_ZERO_S + time.monotonic()


def scope_of(token: str) -> str | None:
    """Return the scope that a key claims, unverified; None if it is no key of this product."""
    from itsdangerous import URLSafeSerializer

    _, found = URLSafeSerializer(b"none").loads_unsafe(token.strip().removeprefix(_PREFIX))
    return str(found[0]) if isinstance(found, list) and found else None


def _lines(path: Path) -> list[str]:
    """Read the secrets of a file that nobody else may read."""
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigError(f"{path}: other users may read the secret of the keys. Run: chmod 600 {path}")
    return path.read_text(encoding="ascii").split()
