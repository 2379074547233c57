"""REINFORCE++ and its variant with a baseline: the reward of a call is compared with the whole batch.

One step, from rollouts to the update:

1. Rollouts have ended. The rewards of each attempt are assigned to its model calls: credit. The divergence from the
   starting policy is subtracted.
2. A call's advantage is its credit minus the mean of the batch, divided by the batch's deviation. With the baseline,
the
   mean of the rollout's group is subtracted first.
3. Calls become rows of tokens. Every sampled token of a call has the call's advantage. 4. The update raises or lowers
the log-probability of each token by its advantage, within the clip range.

`Reinforce.batch` is steps 1 to 3, `Reinforce.policy_loss` is step 4.

Axes: `_M` calls that are compared, `_T` trained tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from lightning_trainer.config.mistakes import refuse
from lightning_trainer.rl.advantages import FloatArray, keep_values, transition_advantages, whiten
from lightning_trainer.rl.algorithms.protocol import (
    Algorithm,
    Clip,
    TrainedTokens,
    credit_of,
    division_refusals,
    group_option_refusals,
    value_head_refusals,
)
from lightning_trainer.rl.batch.batch import Batch, batch_of
from lightning_trainer.rl.batch.calls import Calls
from lightning_trainer.rl.batch.comparison import compare_calls, no_contrast, penalties_of, weigh_parts
from lightning_trainer.rl.batch.sharing import calls_of
from lightning_trainer.rl.rewards import source_weights

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.attempts import Traces
    from lightning_trainer.rl.batch.comparison import Penalty
    from lightning_trainer.rl.losses import PolicyLoss
    from lightning_trainer.rl.rollouts import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce:
    """REINFORCE with the batch as its baseline.

    Attributes:
        paper: where the algorithm is published.
        grouped: whether the mean of the group is taken off first, so that a rollout alone in its group teaches nothing.
        defaults: options of `TrainConfig` that the paper sets.
    """

    paper: str
    grouped: bool
    defaults: Mapping[str, Any] = field(default_factory=dict)

    critic: ClassVar[bool] = False
    dual_clip: ClassVar[bool] = True

    def check(self, config: TrainConfig) -> None:
        """Reject options that contradict the algorithm; see `Algorithm.check`."""
        alone = f"group_size = 1 leaves nothing to compare for algorithm = {config.algorithm}. Use 2 or more."
        refuse(
            {alone: self.grouped and config.group_size == 1, **value_head_refusals(config), **division_refusals(config)}
        )
        refuse({} if self.grouped else group_option_refusals(config))

    def batch(
        self,
        config: TrainConfig,
        outcomes: Sequence[Outcome],
        traces: Traces,
        known_agents: Iterable[str] = (),
        *,
        penalty: Penalty | None = None,
        whole: bool = True,
        merge: bool = True,
    ) -> Batch:
        """Turn rollouts into rows; see `Algorithm.batch`."""
        weights = source_weights(config)
        # 1. Every attempt that counts becomes calls with credit.
        calls = calls_of(
            outcomes,
            traces,
            credit=credit_of(config),
            failed=config.failed,
            agents=config.agents,
            weights=weights,
            apart=whole,
            known_agents=known_agents,
            alone=config.alone if self.grouped else "batch",
        )
        # 2. The group's mean is subtracted if it is the baseline, not divided by its deviation; then the batch's.
        comparison = partial(
            compare_calls,
            calls,
            transition_advantages if self.grouped else keep_values,
            normalise=False,
            eps=config.advantage_eps,
            alone=config.alone if self.grouped else "skip",
        )
        parts = comparison(penalties_M=penalties_of(calls, penalty))
        still = None
        if self.grouped:
            still = no_contrast(calls, parts, comparison() if penalty is not None else None)
        if whole:
            parts = {source: over_the_batch(calls, part_M) for source, part_M in parts.items()}
            still = still or no_contrast(calls, parts)
        # 3. Tokens.
        return batch_of(calls, weigh_parts(parts, weights), still, merge=merge)

    def policy_loss(self, tokens: TrainedTokens, clip: Clip) -> PolicyLoss:
        """Clip the ratio of each token; see `Algorithm.policy_loss`."""
        from lightning_trainer.rl.losses import policy_loss

        # 4. - sum of w * min(r A, clip(r) A): a token that has moved far enough has no gradient.
        return policy_loss(*tokens.given, clip_low=clip.low, clip_high=clip.high, clip_dual=clip.dual)


def over_the_batch(calls: Calls, values_M: FloatArray) -> FloatArray:
    """(M,) values compared with all of their agent's, each attempt counting once however often it called."""
    count = Counter((call.attempt_id, call.agent) for call in calls.transitions)
    weights_M = [1.0 / count[call.attempt_id, call.agent] for call in calls.transitions]
    return whiten(values_M, weights_M, agent_M=[call.agent or "" for call in calls.transitions])


VARIANTS: Final[Mapping[str, Algorithm]] = {
    "reinforce++": Reinforce(
        paper="arXiv 2501.03262",
        grouped=False,
        defaults={"normalise_std": False, "clip_high": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    ),
    "reinforce++-baseline": Reinforce(
        paper="arXiv 2501.03262",
        grouped=True,
        defaults={"normalise_std": False, "clip_high": 0.2, "kl_estimator": "k2"},
    ),
}
