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

_REMOVED: Final[dict[tuple[Kind, str], str]] = {
    ("credit", "shapley"): "credit = shapley is removed: its update can point away from the gradient. Set orders = 2 to"
    " log what each agent adds, and train with credit = identical or counterfactual.",
    ("algorithm", "tree-grpo"): "algorithm = tree-grpo is removed: it learned no faster than groups. Use grpo, with"
    " credit = counterfactual to tell the agents of a team apart.",
}


def refuse_removed(kind: Kind, name: str) -> None:
    """Refuse a name that earlier versions had, unless a plugin registers it.

    Raises:
        ConfigError: says why it was removed, and what to use instead.
    """
    if (kind, name) in _REMOVED and name not in registered(kind):
        raise ConfigError(_REMOVED[kind, name])


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
        refuse_removed(kind, name)
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
