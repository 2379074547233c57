"""Shell completion after Tab: models, agents of earlier runs, runs, and registered names.

Enabled with `eval "$(_LIGHTNING_RL_COMPLETE=bash_source lightning-rl)"`, likewise zsh_source and fish_source. Nothing
here is imported before Tab is pressed, and nothing raises: an invalid file offers nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from lightning_trainer import registry

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

FILES: Final = frozenset({"data", "val", "out", "chat_template"})


def for_option(name: str) -> Complete | None:
    """Return the completer of a run's option; None if nothing can be offered."""
    if name in FILES:
        return lambda *_: [CompletionItem("", type="file")]
    offers: dict[str, Callable[[], Iterable[str]]] = {
        "model": models,
        "agents": agents,
        "resume": runs,
        "algorithm": lambda: _registered_names("algorithm"),
        "credit": _credits,
        "backend": lambda: _registered_names("backend"),
        "trackers": lambda: ("mlflow", "wandb"),
    }
    return offering(offers[name]) if name in offers else None


def offering(names: Callable[[], Iterable[str]]) -> Complete:
    """Return a completer that offers the names that start with the text typed after the last comma."""

    def complete(_context: click.Context, _parameter: click.Parameter, typed: str) -> list[CompletionItem]:
        before, comma, last = typed.rpartition(",")
        return [CompletionItem(f"{before}{comma}{name}") for name in sorted(set(names())) if name.startswith(last)]

    return complete


def models() -> list[str]:
    """Return the model that needs no network, earlier runs, and model folders here."""
    from lightning_trainer.models import SMOLLM2

    here = [path.parent.name for path in Path.cwd().glob("*/config.json")]
    return [SMOLLM2, *runs(), *(f"./{name}" for name in here)]


def runs() -> list[str]:
    """Return the runs that have a checkpoint."""
    return [str(path.parent) for path in Path("runs").glob("*/checkpoint")]


def agents() -> list[str]:
    """Return the names of the agents that earlier runs saw."""
    names: list[str] = []
    for path in Path("runs").glob("*/checkpoint/state.json"):
        try:
            names += json.loads(path.read_text(encoding="utf-8"))["agents"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return names


def _registered_names(kind: registry.Kind) -> Iterable[str]:
    from lightning_trainer import registry

    return registry.offered_names(kind)


def _credits() -> Iterable[str]:
    return _registered_names("credit")
