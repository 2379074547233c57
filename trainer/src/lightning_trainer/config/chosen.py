"""What the algorithm and the credit that are chosen by name say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

from lightning_trainer import registry

OF_ONE_BACKEND: Final = ("tinker_url", "max_cost", "prices")  # refused by backends that do not take them


class ChosenAlgorithm(Protocol):
    """What is asked of an algorithm here; see `lightning_trainer.rl.algorithms.protocol`, a floor above."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Options that it sets where they are not given."""

    @property
    def critic(self) -> bool:
        """Whether it learns values."""


def chosen_algorithm(name: str) -> ChosenAlgorithm:
    """Return the algorithm that is registered under a name.

    Raises:
        ConfigError: there is none.
    """
    algorithm: ChosenAlgorithm = registry.by_name("algorithm", name)
    return algorithm


def looks_at_forks(credit: str) -> bool:
    """Whether this credit compares forks; an unknown name is refused when credit is asked for."""
    return bool(getattr(registry.registered("credit").get(credit), "across", False))


def backend_defaults(name: str) -> Mapping[str, Any]:
    """Return the options that a backend sets where they are not given; an unknown name is refused elsewhere."""
    found: Mapping[str, Any] = getattr(registry.registered("backend").get(name), "defaults", {})
    return found


def backend_options(name: str) -> frozenset[str]:
    """Return the options of a run that a backend alone takes, of those in `OF_ONE_BACKEND`."""
    return frozenset(getattr(registry.registered("backend").get(name), "takes", ()))
