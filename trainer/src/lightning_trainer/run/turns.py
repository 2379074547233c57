"""The turns of `--schedule alternate:K`: which policy learns in which steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.policies import parse

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig

ALTERNATE: Final = "alternate"


def policies_to_train(config: TrainConfig) -> list[str]:
    """Return the trained policies, in the order in which they are named."""
    own = parse(config.policies)
    return [policy for policy in own.adapters if policy not in own.fixed]


def turn_steps(schedule: str) -> int:
    """Return the number of steps of a turn.

    Raises:
        ConfigError: the schedule is not ``alternate:K``.
    """
    name, _, steps = schedule.partition(":")
    if name != ALTERNATE or not steps.isdecimal() or int(steps) < 1:
        raise ConfigError(f"schedule = {schedule!r}: write alternate:K, such as alternate:5 for turns of 5 steps.")
    return int(steps)


def turn_of(step: int, policies: Sequence[str], steps: int) -> str:
    """Return the policy that learns in a step."""
    return policies[step // steps % len(policies)]


def last_turn(config: TrainConfig, step: int) -> tuple[str, int] | None:
    """Return the policy that learned in the step before this one, and the first step of its turn.

    None without a schedule, and before the first step.
    """
    if config.schedule is None or step == 0:
        return None
    steps = turn_steps(config.schedule)
    return turn_of(step - 1, policies_to_train(config), steps), (step - 1) // steps * steps
