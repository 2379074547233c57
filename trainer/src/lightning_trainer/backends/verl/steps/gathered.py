"""Metrics of the rollouts between two steps of verl's trainer, as the torch backend reports them too."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Final

from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.rewards import Reward
from lightning_trainer.intervals import Declared
from lightning_trainer.report import step_metrics
from lightning_trainer.report.answers import of_answers
from lightning_trainer.report.speed.waits import RolloutTime, Window, divide_step, time_rollouts
from lightning_trainer.report.step_notes import UNREWARDED, unrewarded_agents
from lightning_trainer.rl.account import Account
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.batch.calls import CountedCall
from lightning_trainer.rl.rewards.judge import take_failures
from lightning_trainer.rl.rollouts import Failed, Outcome
from lightning_trainer.rl.scores import by_source, score

_LEARNER: Final = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")  # verl's names of phases


class GroupCollector:
    """Accumulates groups as they end, on one thread, until another takes their numbers.

    Args:
        failed: the reward of a rollout that failed because of the policy; ``exclude`` leaves it out.
        agents: names and globs of the agents that are trained; None: all are.
        declared: range of the rewards.
    """

    def __init__(self, failed: Failed, agents: Sequence[str] | None = None, declared: Declared = None) -> None:
        self._failed = failed
        self._agents = agents
        self._declared = declared
        self._lock = threading.Lock()
        self._clear()

    def add(self, ended: Sequence[Outcome], batch: Batch, traces: Sequence[Trace]) -> None:
        """Add outcomes that have ended, the batch made of them, and the traces of their attempts."""
        compared, flat = step_metrics.count_compared(batch)
        with self._lock:
            self._outcomes += ended
            self._account += batch.account
            self._automatic += batch.automatic
            self._traces += traces
            self._calls += batch.calls
            self._compared += compared
            self._flat += flat

    def take(self, windows: Sequence[Window]) -> tuple[dict[str, float], RolloutTime]:
        """Return the metrics of what was added since the last call, and how these rollouts were waited for.

        Args:
            windows: in which the step waited.
        """
        with self._lock:
            waited = time_rollouts(self._outcomes, self._traces, windows)
            result = score(self._outcomes, self._failed, self._agents, self._declared)
            numbers = {
                **result.metrics(),
                **self._account.metrics(),
                **by_source(self._outcomes, self._automatic, self._failed),
                **take_failures(),
                **step_metrics.of_groups(self._compared, self._flat),
                **step_metrics.of_traces(self._traces),
                **of_answers(self._traces, self._agents)[0],
                **{f"{UNREWARDED}{name}": 1.0 for name in unrewarded_agents(self._calls)},
            }
            self._clear()
        return numbers, waited

    def _clear(self) -> None:
        self._outcomes: list[Outcome] = []
        self._account = Account()
        self._automatic: list[Reward] = []
        self._traces: list[Trace] = []
        self._calls: list[CountedCall] = []
        self._compared: int = 0
        self._flat: int = 0


def waits_of_step(rollouts: RolloutTime, timing: Mapping[str, float], generated: float) -> dict[str, float]:
    """Divide the time of a step of verl's trainer by what it waited for: `divide_step`.

    Args:
        rollouts: how the step waited for its rollouts.
        timing: seconds of its phases by verl's names.
        generated: tokens that were sampled in these rollouts.
    """
    weights = timing.get("update_weights", 0.0)
    return divide_step(
        rollouts,
        {
            "seconds": timing["step"],
            "update_seconds": weights + sum(timing.get(phase, 0.0) for phase in _LEARNER),
            "weights_seconds": weights,
            "tokens_generated": generated,
        },
    )
