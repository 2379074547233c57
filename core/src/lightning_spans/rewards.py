"""Rewards: numbers that say how well an attempt, or one agent in it, did."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from opentelemetry import context as otel_context

from lightning_spans.context import current_attempt, entered
from lightning_spans.errors import RewardError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward, in float64.

    Attributes:
        rollout_id: the rollout it belongs to.
        attempt_id: the attempt it belongs to.
        value: finite; higher is better.
        agent: the agent that earned it; None when the whole attempt did.
        span_id: the span that earned it; None when no single one did.
        source: who gave it: ``run``, ``score``, ``emit_reward``, or the name of an automatic rule.
        reward_id: makes delivery idempotent.
    """

    rollout_id: str
    attempt_id: str
    value: float
    agent: str | None = None
    span_id: str | None = None
    source: str = "run"
    reward_id: str = field(default_factory=lambda: uuid.uuid4().hex)


def as_reward(value: object, *, what: str = "reward") -> float:
    """Take a number, also numpy's and torch's scalars, as a reward.

    Raises:
        RewardError: it is None, not a number, or not finite.
    """
    if value is None:
        raise RewardError(f"{what} is None. Return a number from run(), or name a --reward function that gives one.")
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__"):
        raise RewardError(f"{what} is {value!r} ({type(value).__name__}), not a number.")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"{what} is {number}. A reward must be finite: look at what the agent returned.")
    return number


def as_rewards(value: object) -> dict[str | None, float]:
    """Take what `run()` or a reward function returned: a number for the attempt, or numbers by agent name.

    Returns:
        Rewards by agent name; the key None holds the reward of the whole attempt.

    Raises:
        RewardError: a value is None, not a number, not finite, or a dictionary is empty or has keys that are not names.
    """
    if not isinstance(value, Mapping):
        return {None: as_reward(value)}
    if not value:
        raise RewardError("the dictionary of rewards is empty. Give a number for each agent, or one number for all.")
    for name in value:
        if not isinstance(name, str):
            raise RewardError(f"rewards by agent must have agent names as keys, not {name!r}.")
    return {name: as_reward(number, what=f"reward of {name!r}") for name, number in value.items()}


_COLLECTOR = "lightning-rewards"


@contextmanager
def collecting() -> Iterator[list[Reward]]:
    """Collect what `emit_reward` gives inside the block; for runners, which deliver it with their own key."""
    rewards: list[Reward] = []
    with entered(otel_context.set_value(_COLLECTOR, rewards)):
        yield rewards


def emit_reward(value: float, *, agent: str | None = None) -> None:
    """Give a reward from inside the agent's program, as often as you like; rewards add up.

    Inside a runner's attempt it travels with the attempt's result. Outside, while attached, it goes to the process's
    own store. It belongs to the whole attempt unless an agent is named.

    Args:
        value: a finite number.
        agent: the agent that earned it.

    Raises:
        RewardError: the value is not a finite number, or there is no attempt and nothing is attached.
    """
    from lightning_spans.attach import live_delivery

    number = as_reward(value)
    attempt = current_attempt()
    collector = otel_context.get_value(_COLLECTOR)
    if isinstance(collector, list) and attempt is not None:
        collector.append(
            Reward(
                rollout_id=attempt.rollout_id,
                attempt_id=attempt.attempt_id,
                value=number,
                agent=agent,
                source="emit_reward",
            )
        )
        return
    delivery = live_delivery()
    if attempt is not None and attempt.endpoint:
        raise RewardError("an agent's own key can't give rewards: print the reward as the command's last line instead.")
    if delivery is None or attempt is None:
        raise RewardError("emit_reward() was called outside an attempt: use it inside run(), or inside use_attempt().")
    delivery.add_rewards(
        [
            Reward(
                rollout_id=attempt.rollout_id,
                attempt_id=attempt.attempt_id,
                value=number,
                agent=agent,
                source="emit_reward",
            )
        ]
    )
