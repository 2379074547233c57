"""Role-conditioned advantage estimation: a call is compared with the running mean of its agent's credit.

RAE of SPIRAL, arXiv 2506.24119: b <- DECAY * b + (1 - DECAY) * R for each attempt of an agent, and A = R - b with the
new b. In self-play, the two sides of a game have different expectations, which one mean over both would mix up. Nothing
is compared within a group, so a group may have one rollout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lightning_trainer.callbacks import Callback, CallbackContext, CallbackKind, Extra, StepRollouts
from lightning_trainer.rl.algorithms.reinforce import Reinforce

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.attempts import Traces
    from lightning_trainer.rl.batch.batch import Batch
    from lightning_trainer.rl.batch.comparison import Penalty
    from lightning_trainer.rl.rollouts import Outcome
    from lightning_trainer.rl.rows import Row

RAE: Final = "rae"
DECAY: Final = 0.95


class RoleAdvantages(Reinforce):
    """The algorithm: rows contain the credit of their calls until the baselines are subtracted."""

    __slots__ = ()

    def batch(
        self,
        config: TrainConfig,
        outcomes: Sequence[Outcome],
        traces: Traces,
        known_agents: Iterable[str] = (),
        *,
        penalty: Penalty | None = None,
        whole: bool = True,  # noqa: ARG002 - nothing is compared within the step
        merge: bool = True,
    ) -> Batch:
        """Turn rollouts into rows with the credit of their calls: `Algorithm.batch`."""
        return super().batch(config, outcomes, traces, known_agents, penalty=penalty, whole=False, merge=merge)


ROLE_ADVANTAGES: Final = RoleAdvantages(
    paper="arXiv 2506.24119", grouped=False, defaults={"normalise_std": False, "group_size": 1}
)


class RoleBaselinesKind(CallbackKind):
    """Takes part in runs with algorithm = rae."""

    def wanted(self, config: TrainConfig) -> bool:
        """Whether agents have baselines."""
        return config.algorithm == RAE

    def open(self, context: CallbackContext) -> AbstractContextManager[Callback]:  # noqa: ARG002 - it needs nothing
        """Open the callback that keeps the baselines."""
        return nullcontext(RoleBaselines())


class RoleBaselines(Callback):
    """Keeps the running mean of each agent, and subtracts it from the agent's rows."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    @property
    def kept(self) -> Mapping[str, Any]:
        """The running mean of each agent."""
        return {RAE: self._means}

    def before_batch(self, rollouts: StepRollouts) -> Extra:
        """Restore the means after the previous step."""
        self._means = dict(rollouts.kept.get(RAE, {}))
        return Extra()

    def after_batch(self, batch: Batch, rollouts: StepRollouts) -> tuple[Batch, Mapping[str, float]]:  # noqa: ARG002
        """Update the means with the attempts of the batch, and subtract from each row the mean at its attempt."""
        taken = self._move(batch)
        rows = [_without_mean(row, taken[row.agent, row.attempt_id]) for row in batch.rows]
        account = replace(batch.account, rows_without_gradient=sum(not row.has_gradient for row in rows))
        metrics = {f"baseline/{agent}": mean for agent, mean in self._means.items()}
        return replace(batch, rows=rows, account=account), metrics

    def _move(self, batch: Batch) -> dict[tuple[str, str], float]:
        """Update the means, and return each agent's mean after each of its attempts, in the order of the attempts."""
        credit: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for call in (call for call in batch.calls if call.left_out is None):
            credit[call.transition.agent or "", call.transition.attempt_id].append(call.advantage)
        taken = {}
        for (agent, attempt), values in credit.items():
            mean = self._means.get(agent, 0.0)
            self._means[agent] = taken[agent, attempt] = DECAY * mean + (1 - DECAY) * (sum(values) / len(values))
        return taken


def _without_mean(row: Row, mean: float) -> Row:
    return replace(row, advantages=np.where(row.mask, row.advantages - mean, 0.0))
