"""Defaults that depend on other options, and options that may be written as one comma-separated text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightning_trainer import policies
from lightning_trainer.config.chosen import backend_defaults, chosen_algorithm, looks_at_forks
from lightning_trainer.models.bases import adapter_rank
from lightning_trainer.options.record import split_names

# Defaults for rows sampled by older weights: ratios compare with the weights before the update, and a token's weight
# corrects for the weights that sampled it.
_OF_STALENESS: Final[Mapping[str, Any]] = {"old_logprobs": "recompute", "importance_cap": 2.0}
# Defaults for credit that compares forks: a few alternatives are too few to estimate a standard deviation.
_OF_FORKS: Final[Mapping[str, Any]] = {"normalise_std": False, "group_size": 2}


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with dependent defaults filled in. Lists of names may also be one comma-separated text."""
    filled = with_adapters({**values, **of_backend(values)}, learning_rate=1e-4)
    for name, value in _of_choices(filled).items():
        filled[name] = value if filled.get(name) is None else filled[name]
    return filled


def of_backend(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the chosen backend for options that are not given."""
    backend = values.get("backend")
    defaults = backend_defaults(backend) if isinstance(backend, str) else {}
    return {name: value for name, value in defaults.items() if values.get(name) is None}


def without_defaults(values: Mapping[str, Any], nearer: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return an earlier run's options, without the defaults of algorithm, credit and staleness if one of these changes.

    Values that differ from those defaults were set by the user and are kept, as is the group size, needed to resume.

    Args:
        values: all options of the earlier run.
        nearer: options that take precedence over these.
        plain: defaults of options that depend on no other.
    """
    now = {**values, **nearer}
    if not values or all(values.get(name) == now.get(name) for name in ("algorithm", "credit", "staleness")):
        return dict(values)
    before = _of_choices(values)
    changing = (before.keys() | _of_choices(now).keys()) - {"group_size"}
    by_default = {name for name in changing if values.get(name) == before.get(name, plain.get(name))}
    return {name: value for name, value in values.items() if name not in by_default}


def _of_choices(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the chosen algorithm, credit and staleness. Those of the algorithm take precedence."""
    algorithm, credit = values.get("algorithm"), values.get("credit")
    of_credit = _OF_FORKS if isinstance(credit, str) and looks_at_forks(credit) else {}
    of_algorithm = chosen_algorithm(algorithm).defaults if isinstance(algorithm, str) else {}
    return {**of_credit, **_of_staleness(values), **of_algorithm}


def _of_staleness(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the default correction for rows of older weights. M2PO and ratios with the engine need no cap."""
    if not _is_set(values.get("staleness")) or values.get("old_logprobs") == "engine":
        return {}
    own = values.get("importance_moment") is not None
    return {name: value for name, value in _OF_STALENESS.items() if not (own and name == "importance_cap")}


def _is_set(value: Any) -> bool:
    """Whether an option is given and not 0. Flags arrive as text."""
    try:
        return bool(value) and float(value) != 0
    except (TypeError, ValueError):  # not a number: checked later
        return True


def _trains_adapters(values: Mapping[str, Any]) -> bool:
    """Whether a run trains adapters: those that its options add, or those that its model has."""
    model = values.get("model")
    return _is_set(values.get("lora_rank")) or (isinstance(model, str) and adapter_rank(model) > 0)


def with_adapters(values: Mapping[str, Any], *, learning_rate: float) -> dict[str, Any]:
    """Return the options with names and policies parsed, also from comma-separated text, plus the adapters' defaults.

    Args:
        values: options as given.
        learning_rate: of adapters, which start at zero and take larger steps than full weights.
    """
    filled = dict(values)
    if filled.get("policies"):
        if isinstance(filled["policies"], (str, tuple)):
            filled["policies"] = policies.read_text(filled["policies"])
        filled["lora_rank"] = filled["lora_rank"] if _is_set(filled.get("lora_rank")) else policies.DEFAULT_RANK
    if filled.get("learning_rate") is None and _trains_adapters(filled):
        filled["learning_rate"] = learning_rate
    for name in ("agents", "trackers"):
        if isinstance(filled.get(name), str):
            filled[name] = split_names(filled[name])
    if isinstance(filled.get("agent_weight"), str) and filled["agent_weight"] != "equal":
        filled["agent_weight"] = policies.read_weights(filled["agent_weight"])
    if isinstance(filled.get("opponents"), str):
        filled["opponents"] = policies.read_counts(filled["opponents"])
    if isinstance(filled.get("name_by"), str):  # an expression may contain commas
        filled["name_by"] = (filled["name_by"],)
    chosen = filled.get("policies")
    if isinstance(chosen, Mapping) and chosen and all(isinstance(value, str) for value in chosen.values()):
        filled["policies"], filled["agents"] = policies.complete(chosen, filled.get("agents"))
    return filled
