"""Everything that a configuration chooses by name, from the trainer and from plugins: algorithms, backends, credit etc.

The trainer's own parts come through the same hooks as those of plugins; see `lightning_trainer.builtin`. On the
training side, plugins are loaded only here.
"""

from __future__ import annotations

import difflib
import functools
import pkgutil
from collections.abc import Iterable
from importlib import import_module
from typing import Any, Final, Literal, TypeAlias

import pluggy

from lightning_spans import hooks
from lightning_spans.errors import ConfigError
from lightning_trainer.choices import NO_FORMAT, RULES
from lightning_trainer.commands import ListedCommand

Kind: TypeAlias = Literal[
    "alarm", "algorithm", "backend", "callback", "command", "credit", "engine", "environment", "judge", "tool format"
]

_HOOKS: Final[dict[Kind, str]] = {
    "alarm": "lightning_register_alarms",
    "algorithm": "lightning_register_algorithms",
    "backend": "lightning_register_backends",
    "callback": "lightning_register_callbacks",
    "command": "lightning_register_commands",
    "credit": "lightning_register_credit",
    "engine": "lightning_register_engines",
    "environment": "lightning_register_environments",
    "judge": "lightning_register_judges",
    "tool format": "lightning_register_formats",
}

_REMOVED: Final[dict[tuple[Kind, str], str]] = {
    ("credit", "shapley"): "credit = shapley is removed: its update can point away from the gradient. Set orders = 2 to"
    " log what each agent adds, and train with credit = identical or counterfactual.",
    ("algorithm", "tree-grpo"): "algorithm = tree-grpo is removed: it learned no faster than groups. Use grpo, with"
    " credit = counterfactual to tell the agents of a team apart.",
}


def _refuse_removed(kind: Kind, name: str) -> None:
    """Refuse a name that earlier versions had, unless a plugin registers it.

    Raises:
        ConfigError: gives the reason for the removal, and a replacement.
    """
    if (kind, name) in _REMOVED and name not in registrations(kind):
        raise ConfigError(_REMOVED[kind, name])


def by_name(kind: Kind, name: str) -> Any:
    """Return the object that is registered under a name.

    Raises:
        ConfigError: the name is unknown, or two plugins claim one name.
    """
    known = registrations(kind)
    if name not in known:
        _refuse_removed(kind, name)
        others = [NO_FORMAT] if kind == "tool format" else []
        raise unknown(kind, name, [*offered_names(kind), *others])
    return known[name]


def check(kind: Kind, name: str | None) -> None:
    """Refuse an unknown name; None chooses nothing.

    Raises:
        ConfigError: names the closest match, and all available names.
    """
    if name is not None and (kind, name) != ("tool format", NO_FORMAT):
        by_name(kind, name)


def check_rule(name: str) -> None:
    """Refuse an unknown rule of automatic rewards. ``module:function`` is one of the user's own.

    Raises:
        ConfigError: names the closest match, and all available names.
    """
    if ":" not in name and name not in RULES:
        raise unknown("rule", name, [*RULES, "module:function"])


def unknown(kind: str, name: str, names: Iterable[str]) -> ConfigError:
    """Return the error for an unknown name: the closest match, all available names, and plugins that were left out."""
    listed = sorted(names)
    near = difflib.get_close_matches(str(name).lower(), listed, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    missing = "".join(f" Left out: plugin {plugin}, because {why}" for plugin, why in hooks.left_out.items())
    return ConfigError(f"unknown {kind} {name!r}.{hint} Use one of: {', '.join(listed)}.{missing}")


def registrations(kind: Kind) -> dict[str, Any]:
    """Return all objects that the trainer and the installed plugins register, by name.

    Of a plugin whose hook raises, nothing of this kind is registered: it is logged and left out.

    Raises:
        ConfigError: two plugins claim one name; the message names both.
    """
    load_plugins()
    found: dict[str, tuple[str, Any]] = {}
    for implementation in getattr(hooks.manager().hook, _HOOKS[kind]).get_hookimpls():
        owner, own = implementation.plugin_name, list[tuple[str, Any]]()
        try:
            implementation.function(register=lambda name, thing, own=own: own.append((name, thing)))
        except Exception as error:  # noqa: BLE001 - whatever a plugin raises is its own fault
            hooks.leave_out(owner, f"{_HOOKS[kind]} raises {type(error).__name__}: {error}")
            continue
        for name, thing in own:
            if name in found:
                raise ConfigError(f"{name!r} is registered by two plugins: {found[name][0]} and {owner}.")
            found[name] = (owner, thing)
    return {name: thing for name, (_, thing) in found.items()}


def offered_names(kind: Kind) -> list[str]:
    """Return the names that a user may choose: all that are registered and not marked `internal`.

    Raises:
        ConfigError: two plugins claim one name.
    """
    return [name for name, value in registrations(kind).items() if not getattr(value, "internal", False)]


def kinds() -> tuple[Kind, ...]:
    """Return all kinds."""
    return tuple(_HOOKS)


def load_plugins() -> None:
    """Import and register the trainer's own plugin, its kits and every installed plugin, once per process."""
    _load(hooks.manager())


@functools.cache
def kit_commands() -> dict[str, ListedCommand]:
    """Return the commands of the kits, by name. Importing a kit's `plugin` module imports nothing else of the kit."""
    found: dict[str, ListedCommand] = {}
    for module in _kits().values():
        if hasattr(module, "lightning_register_commands"):
            module.lightning_register_commands(found.__setitem__)
    return found


@functools.cache
def _kits() -> dict[str, Any]:
    """Import and return the `plugin` module of each kit, which is a folder in `kits/`."""
    home = import_module(f"{__package__}.kits")
    return {
        each.name: import_module(f"{home.__name__}.{each.name}.plugin") for each in pkgutil.iter_modules(home.__path__)
    }


@functools.cache
def _load(_manager: pluggy.PluginManager) -> None:
    for name, module in _kits().items():
        hooks.register(module, f"kit {name}")
    hooks.load(hooks.TRAINER)  # raises on failure; other plugins that fail to load are logged and left out
    hooks.load_all()
