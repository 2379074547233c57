"""Properties of the algorithm, credit and backend that are chosen by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Protocol

from pydantic.fields import FieldInfo

from lightning_spans.errors import ConfigError
from lightning_trainer import registry
from lightning_trainer.config.keywords import check_keywords, check_type

OF_ONE_BACKEND: Final = ("tinker_url", "max_cost", "prices")  # rejected by backends that do not accept them


class ChosenAlgorithm(Protocol):
    """The properties used here of an algorithm; see `lightning_trainer.rl.algorithms.protocol`, a layer above."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Options that it sets if they are not given."""

    @property
    def critic(self) -> bool:
        """Whether it learns a value function."""


def chosen_algorithm(name: str) -> ChosenAlgorithm:
    """Return the algorithm registered under a name.

    Raises:
        ConfigError: there is none.
    """
    algorithm: ChosenAlgorithm = registry.by_name("algorithm", name)
    return algorithm


def check_defaults(algorithm: str, options: Mapping[str, FieldInfo]) -> None:
    """Refuse defaults of an algorithm that are not options, or have a wrong type.

    Raises:
        ConfigError: names the algorithm and the default.
    """
    for name, value in chosen_algorithm(algorithm).defaults.items():
        if name not in options:
            raise ConfigError(f"algorithm {algorithm!r} sets {name!r} in its defaults, which is not an option.")
        field = options[name]
        expected = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        check_type(f"algorithm {algorithm!r} sets {name} = {value!r} in its defaults", expected, value)


def looks_at_forks(credit: str) -> bool:
    """Whether this credit compares forks. An unknown name is rejected when the credit itself is looked up."""
    return bool(getattr(registry.registrations("credit").get(credit), "across", False))


def check_credit(name: str, options: Mapping[str, Any]) -> None:
    """Refuse an unknown credit, and options that it does not have or that have a wrong type.

    Raises:
        ConfigError: names them, and what there is.
    """
    found = registry.by_name("credit", name)
    check_keywords(f"credit {name!r}", getattr(found, "assign", found), options)


def backend_defaults(name: str) -> Mapping[str, Any]:
    """Return the options that a backend sets if they are not given. An unknown name is rejected elsewhere."""
    found: Mapping[str, Any] = getattr(registry.registrations("backend").get(name), "defaults", {})
    return found


def backend_options(name: str) -> frozenset[str]:
    """Return the options in `OF_ONE_BACKEND` that this backend accepts."""
    return frozenset(getattr(registry.registrations("backend").get(name), "takes", ()))
