"""Rewards: numbers that say how well an attempt, or one agent in it, did."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lightning_spans.errors import RewardError

_ADVICE: Final = "Return a number from run(), or from the function that --reward names."


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """One reward, in float64.

    Attributes:
        rollout_id: the rollout it belongs to.
        attempt_id: the attempt it belongs to.
        value: finite; higher is better.
        agent: the agent that earned it; None if the whole attempt did.
        span_id: the span that earned it; None if no single one did.
        choice: index of the answer that earned it, of a call with several; None: all of them did.
        source: its giver: ``run``, ``score``, ``emit_reward``, or the name of an automatic rule.
        given_ns: Unix time in nanoseconds at which it was given during the attempt: it counts for the calls that had
            ended by then. None: it counts for the whole attempt.
        reward_id: makes delivery idempotent.
    """

    rollout_id: str
    attempt_id: str
    value: float
    agent: str | None = None
    span_id: str | None = None
    choice: int | None = None
    source: str = "run"
    given_ns: int | None = None
    reward_id: str = field(default_factory=lambda: uuid.uuid4().hex)


def as_reward(value: object, *, what: str = "reward") -> float:
    """Convert a number, including numpy's and torch's scalars, to a reward.

    Raises:
        RewardError: it is None, not a number, or not finite.
    """
    try:
        number = float(None if isinstance(value, (str, bytes)) else value)  # type: ignore[arg-type]
    except Exception as error:  # an array of several, a number beyond floats: other objects may raise anything
        raise RewardError(f"{what} is {_short(value)} ({type(value).__name__}), not a number. {_ADVICE}") from error
    if not math.isfinite(number):
        raise RewardError(f"{what} is {number}. A reward must be finite: look at what the agent returned.")
    return number


def _short(value: object, most: int = 80) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a program's own; or an integer of more digits than Python writes
        text = "a value that can't be written"
    return text if len(text) <= most else f"{text[:most]}..."


def as_rewards(value: object) -> dict[str | None, float]:
    """Convert the result of `run()` or a reward function: a number for the attempt, or numbers by agent name.

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
