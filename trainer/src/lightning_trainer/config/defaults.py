"""Defaults that depend on other options, and options that may be written as one text with commas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from lightning_trainer import policies
from lightning_trainer.config.chosen import chosen_algorithm, looks_at_forks

# Defaults of credit that looks at forks: a few alternatives are no sample to take a deviation of.
_OF_FORKS: Final[Mapping[str, Any]] = {"normalise_std": False, "group_size": 2}


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the defaults that depend on other options, and take lists of names as one text with commas too."""
    filled = with_adapters(values, learning_rate=1e-4)
    if isinstance(filled.get("algorithm"), str):
        for name, value in chosen_algorithm(filled["algorithm"]).defaults.items():
            filled[name] = value if filled.get(name) is None else filled[name]
    if isinstance(filled.get("credit"), str) and looks_at_forks(filled["credit"]):
        for name, value in _OF_FORKS.items():
            filled[name] = value if filled.get(name) is None else filled[name]
    return filled


def with_adapters(values: Mapping[str, Any], *, learning_rate: float) -> dict[str, Any]:
    """Read lists of names and the policies of agents, also as one text with commas, and fill in what adapters need.

    Args:
        values: options as given.
        learning_rate: of adapters, which start at zero and take larger steps than full weights.
    """
    filled = dict(values)
    if filled.get("policies"):
        if isinstance(filled["policies"], (str, tuple)):
            filled["policies"] = policies.read_text(filled["policies"])
        filled["lora_rank"] = filled.get("lora_rank") or policies.DEFAULT_RANK
    if filled.get("lora_rank") and filled.get("learning_rate") is None:
        filled["learning_rate"] = learning_rate
    for name in ("agents", "trackers", "restore"):
        if isinstance(filled.get(name), str):
            filled[name] = tuple(part.strip() for part in filled[name].split(",") if part.strip())
    if isinstance(filled.get("name_by"), str):  # an expression may have commas
        filled["name_by"] = (filled["name_by"],)
    chosen = filled.get("policies")
    if isinstance(chosen, Mapping) and chosen and all(isinstance(value, str) for value in chosen.values()):
        filled["policies"], filled["agents"] = policies.complete(chosen, filled.get("agents"))
    return filled
