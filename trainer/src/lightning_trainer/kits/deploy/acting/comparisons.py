"""The beginning of a shadow or a canary with what it compares, and another share of one that has begun."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_spans.errors import ConfigError
from lightning_spans.schema.spans import SHADOW
from lightning_spans.store.deployments import Deployment
from lightning_trainer.kits.deploy.options import CanaryOptions
from lightning_trainer.kits.deploy.shadow.comparison import ShadowRules
from lightning_trainer.kits.deploy.transitions import Note, begin_canary, begin_shadow


def compare_in_shadow(
    current: Deployment | None, agent: str, share: float | None, note: Note, given: Mapping[str, Any]
) -> Deployment:
    """Return the beginning of a shadow, or a change of one that compares as before.

    Args:
        current: the agent's newest deployment.
        agent: its name.
        share: of the conversations; None: as before, all at first.
        note: reason and actor.
        given: fields of `ShadowRules` that a person gave. They also change a shadow that has begun.

    Raises:
        ConfigError: no shadow can begin now, or a field is invalid.
    """
    running = current if current is not None and current.stage == "shadow" else None
    if share is None:
        share = 1.0 if running is None else running.share
    begun = begin_shadow(current, agent, share, note)
    before = None if running is None else running.details.get(SHADOW)
    rules = ShadowRules() if before is None else ShadowRules.of(before)
    return replace(begun, details={SHADOW: replace(rules, **given).to_details()})


def compare_in_canary(
    current: Deployment | None, agent: str, share: float, note: Note, given: Mapping[str, Any]
) -> Deployment:
    """Return the beginning of a canary with its gate, or another share of one with the same gate.

    The arguments are those of `compare_in_shadow`, except that `given` has fields of `CanaryOptions` and the share is
    needed.

    Raises:
        ConfigError: no canary can begin now, a bound is invalid, or fields are given for a canary that has begun.
    """
    begun = begin_canary(current, agent, share, note)
    rules = CanaryOptions.model_construct(**given).rules  # checks them
    if current is None or current.stage != "canary":
        return replace(begun, details=rules.to_details())
    if given:
        raise ConfigError(f"{', '.join(given)}: fixed since the candidate's canary began. Only the share can change.")
    return begun
