"""Schedules and role baselines, registered through the public hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl


@hookimpl
def lightning_register_algorithms(register: Callable[[str, Any], None]) -> None:
    """Register the algorithm whose baseline is the running mean of each agent."""
    from lightning_trainer.kits.schedules.role_baselines import ROLE_ADVANTAGES

    register("rae", ROLE_ADVANTAGES)


@hookimpl
def lightning_register_callbacks(register: Callable[[str, Any], None]) -> None:
    """Register the schedule, the populations of opponents and the baselines of agents."""
    from lightning_trainer.kits.schedules.alternate import AlternateKind
    from lightning_trainer.kits.schedules.opponents import OpponentsKind
    from lightning_trainer.kits.schedules.role_baselines import RoleBaselinesKind

    register("alternate", AlternateKind())  # before the lineage, which lists the rows that are learned
    register("alternate_opponents", OpponentsKind())  # after turns restore weights, before baselines read calls
    register("baselines_of_agents", RoleBaselinesKind())
