"""What a configuration chooses by name, from the trainer and from plugins: backends, algorithms, credit.

The trainer's own come through the same hooks as everybody's, and stand in `lightning_trainer.builtin`.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias

from lightning_spans import hooks
from lightning_spans.errors import ConfigError

Kind: TypeAlias = Literal["algorithm", "backend", "credit"]

_HOOKS: Final[dict[Kind, str]] = {
    "algorithm": "lightning_register_algorithms",
    "backend": "lightning_register_backends",
    "credit": "lightning_register_credit",
}


def by_name(kind: Kind, name: str) -> Any:
    """Return what is registered under a name; plugins are loaded where the trainer itself has nothing of that name.

    Raises:
        ConfigError: nothing is, or two plugins claim one name.
    """
    known = registered(kind)
    if name not in known:
        hooks.load_all()
        known = registered(kind)
    if name not in known:
        raise ConfigError(f"unknown {kind} {name!r}. Use one of: {', '.join(sorted(offered(kind)))}.")
    return known[name]


def registered(kind: Kind) -> dict[str, Any]:
    """Return what the trainer and the plugins that are loaded register, by name.

    Raises:
        ConfigError: two plugins claim one name.
    """
    hooks.load(hooks.TRAINER)
    return hooks.registry(_HOOKS[kind])


def offered(kind: Kind) -> list[str]:
    """Name what a user may choose: all that is registered, but what says of itself that it is `internal`.

    Raises:
        ConfigError: two plugins claim one name.
    """
    return [name for name, value in registered(kind).items() if not getattr(value, "internal", False)]
