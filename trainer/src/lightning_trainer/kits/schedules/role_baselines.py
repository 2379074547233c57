"""Role-conditioned advantage estimation: a call is compared with the running mean of its agent's credit.

RAE of SPIRAL, arXiv 2506.24119: b <- DECAY * b + (1 - DECAY) * R for each attempt of an agent, and A = R - b with the
new b. In self-play the two sides of a game have different expectations, which one mean over both would mix up. Nothing
is compared within a group, so a group may have one rollout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from lightning_trainer.callbacks import Callback, CallbackContext, CallbackKind, Extra, StepRollouts
from lightning_trainer.config.mistakes import refuse
from lightning_trainer.rl.advantages import uncompared
from lightning_trainer.rl.algorithms.protocol import (
    Clip,
    TrainedTokens,
    credit_of,
    division_asked,
    group_options_asked,
    value_head_asked,
)
from lightning_trainer.rl.batch.batch import Batch, batch_of
from lightning_trainer.rl.batch.comparison import compared, no_contrast, penalties_of, weighed
from lightning_trainer.rl.batch.sharing import calls_of
from lightning_trainer.rl.rewards import source_weights

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.attempts import Traces
    from lightning_trainer.rl.batch.comparison import Penalty
    from lightning_trainer.rl.losses import PolicyLoss
    from lightning_trainer.rl.rollouts import Outcome
    from lightning_trainer.rl.rows import Row

RAE: Final = "rae"
DECAY: Final = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleAdvantages:
    """The algorithm: rows hold the credit of their calls until the baselines are taken off."""

    defaults: Mapping[str, Any] = field(default_factory=lambda: {"normalise_std": False, "group_size": 1})

    grouped: ClassVar[bool] = False
    critic: ClassVar[bool] = False
    dual_clip: ClassVar[bool] = True

    def check(self, config: TrainConfig) -> None:
        """Refuse options that contradict the algorithm: `Algorithm.check`."""
        refuse({**value_head_asked(config), **division_asked(config), **group_options_asked(config)})

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
        weights = source_weights(config)
        calls = calls_of(
            outcomes,
            traces,
            credit=credit_of(config),
            failed=config.failed,
            agents=config.agents,
            weights=weights,
            apart=False,
            known_agents=known_agents,
            alone="batch",
        )
        off = penalties_of(calls, penalty)
        parts = compared(calls, uncompared, penalties_M=off, normalise=False, eps=config.advantage_eps)
        return batch_of(calls, weighed(parts, weights), no_contrast(calls, parts), merge=merge)

    def policy_loss(self, tokens: TrainedTokens, clip: Clip) -> PolicyLoss:
        """Clip the ratio of each token: `Algorithm.policy_loss`."""
        from lightning_trainer.rl.losses import policy_loss

        return policy_loss(*tokens.given, clip_low=clip.low, clip_high=clip.high, clip_dual=clip.dual)


class RoleBaselinesKind(CallbackKind):
    """Takes part in runs with algorithm = rae."""

    def wanted(self, config: TrainConfig) -> bool:
        """Return whether agents have baselines."""
        return config.algorithm == RAE

    def open(self, context: CallbackContext) -> AbstractContextManager[Callback]:  # noqa: ARG002 - it needs nothing
        """Return what keeps the baselines."""
        return nullcontext(RoleBaselines())


class RoleBaselines(Callback):
    """Keeps the running mean of each agent, and takes it off its rows."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    @property
    def kept(self) -> Mapping[str, Any]:
        """The running mean of each agent."""
        return {RAE: self._means}

    def before_batch(self, rollouts: StepRollouts) -> Extra:
        """Read the means after the step before."""
        self._means = dict(rollouts.kept.get(RAE, {}))
        return Extra()

    def after_batch(self, batch: Batch, rollouts: StepRollouts) -> tuple[Batch, Mapping[str, float]]:  # noqa: ARG002
        """Move the means by the attempts of the batch, and take the mean at each attempt off its rows."""
        taken = self._move(batch)
        rows = [_without_mean(row, taken[row.agent, row.attempt_id]) for row in batch.rows]
        account = replace(batch.account, rows_without_gradient=sum(not row.has_gradient for row in rows))
        metrics = {f"baseline/{agent}": mean for agent, mean in self._means.items()}
        return replace(batch, rows=rows, account=account), metrics

    def _move(self, batch: Batch) -> dict[tuple[str, str], float]:
        """Return the mean of each agent after each of its attempts, in the order of the attempts."""
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
