"""Rewards that an agent's program gives itself."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from opentelemetry import context as otel_context

from lightning_spans.errors import RewardError
from lightning_spans.record.context import current_attempt, use_context
from lightning_spans.record.pipeline import live_pipeline
from lightning_spans.schema.attempts import Attempt
from lightning_spans.schema.rewards import Reward, as_reward

_logger = logging.getLogger(__name__)
_COLLECTOR = "lightning-rewards"


class _Process:
    """What this process knows of rewards."""

    collecting = 0  # blocks of `collecting` that are open
    has_warned = False


class _Collector(NamedTuple):
    process: int  # what a forked process adds exists only in its own memory
    rewards: list[Reward]


@contextmanager
def collecting() -> Iterator[list[Reward]]:
    """Collect the rewards that `emit_reward` gives within the block.

    For runners, which deliver them with their own key.
    """
    rewards: list[Reward] = []
    _Process.collecting += 1
    try:
        with use_context(otel_context.set_value(_COLLECTOR, _Collector(os.getpid(), rewards))):
            yield rewards
    finally:
        _Process.collecting -= 1


def emit_reward(value: float, *, agent: str | None = None) -> None:
    """Give a reward from within the agent's program. It may be called several times; rewards add up.

    Within a runner's attempt, the reward is sent with the attempt's result. Within `use_attempt`, while attached, it
    goes to the process's own store. It belongs to the whole attempt unless an agent is named, and counts for the model
    calls that had ended when it was given: later calls earn nothing from it. In a program that nobody measures, as in
    production, the reward is not kept, and the first one is a warning in the log.

    Args:
        value: a finite number.
        agent: the agent that earned it.

    Raises:
        RewardError: the value is not a finite number; the process runs attempts and the call is in none of them; it is
            called in a process that the attempt started; or only an agent's own key could send it.
    """
    number = as_reward(value)
    attempt = current_attempt()
    collector = otel_context.get_value(_COLLECTOR)
    if isinstance(collector, _Collector) and attempt is not None:
        if collector.process != os.getpid():
            raise RewardError(
                "emit_reward() was called in another process than run(): return the number to run() first."
            )
        collector.rewards.append(_given_now(attempt, number, agent))
        return
    pipeline = live_pipeline()
    if attempt is not None and attempt.endpoint:
        raise RewardError("an agent's own key can't give rewards: print the reward as the command's last line instead.")
    if pipeline is not None and attempt is not None:
        pipeline.delivery.add_rewards([_given_now(attempt, number, agent)])
    elif _Process.collecting or os.environ.get("LIGHTNING_WORKER"):  # which a worker's processes inherit
        raise RewardError("emit_reward() was called outside an attempt: use it inside run(), or inside use_attempt().")
    elif not _Process.has_warned:
        _Process.has_warned = True
        _logger.warning("emit_reward(): no reward is kept, because nothing runs attempts of this program")


def _given_now(attempt: Attempt, value: float, agent: str | None) -> Reward:
    return Reward(
        rollout_id=attempt.rollout_id,
        attempt_id=attempt.attempt_id,
        value=value,
        agent=agent,
        source="emit_reward",
        given_ns=time.time_ns(),
    )
