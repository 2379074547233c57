"""GRPO and its variants: each rollout of a task is compared with the others of its group.

One step, from rollouts to the update:

1. G rollouts of each task have ended. The rewards of each attempt are assigned to its model calls: credit. 2. A call's
advantage is its credit minus the mean of its group's, divided by the group's deviation. 3. Calls become rows of tokens.
Every sampled token of a call has the call's advantage. 4. The update raises or lowers the log-probability of each token
by its advantage, within the clip range.

`Grpo.batch` is steps 1 to 3, `Grpo.policy_loss` is step 4. What an update adds for every algorithm, the divergence from
the starting policy and the entropy, is in the backend's update. `VARIANTS` defines how each variant differs.

Axes: `_M` calls that are compared, `_T` trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from lightning_trainer.config.mistakes import refuse
from lightning_trainer.rl.advantages import FloatArray, leave_one_out, transition_advantages
from lightning_trainer.rl.algorithms.protocol import (
    Algorithm,
    Clip,
    TrainedTokens,
    credit_of,
    division_refusals,
    value_head_refusals,
)
from lightning_trainer.rl.batch.batch import Batch, batch_of
from lightning_trainer.rl.batch.comparison import compare_calls, no_contrast, penalties_of, weigh_parts
from lightning_trainer.rl.batch.sharing import calls_of
from lightning_trainer.rl.credit.played import AcrossAttempts
from lightning_trainer.rl.rewards import source_weights

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.attempts import Traces
    from lightning_trainer.rl.batch.comparison import Penalty
    from lightning_trainer.rl.credit.assigners import CreditAssigner
    from lightning_trainer.rl.losses import PolicyLoss
    from lightning_trainer.rl.rollouts import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo:
    """Group relative policy optimisation.

    Attributes:
        paper: where the algorithm is published.
        defaults: options of `TrainConfig` that the paper sets.
        compare: what a call is compared with, from `lightning_trainer.rl.advantages`.
        divides: whether advantages may be divided by the deviation of their group, as `normalise_std` says.
    """

    paper: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    compare: Callable[..., FloatArray] = transition_advantages
    divides: bool = True

    grouped: ClassVar[bool] = True
    critic: ClassVar[bool] = False
    dual_clip: ClassVar[bool] = True
    alternatives: ClassVar[bool] = True  # whether a call can be compared only with its own alternatives

    def check(self, config: TrainConfig) -> None:
        """Reject options that contradict the algorithm; see `Algorithm.check`."""
        alone = f"group_size = 1 leaves nothing to compare for algorithm = {config.algorithm}. Use 2 or more."
        refuse({alone: config.group_size == 1 and not config.uses_forks, **value_head_refusals(config)})
        refuse({} if self.divides else division_refusals(config))

    def credit(self, config: TrainConfig) -> CreditAssigner | AcrossAttempts:
        """Return the credit assigner."""
        return credit_of(config)

    def batch(
        self,
        config: TrainConfig,
        outcomes: Sequence[Outcome],
        traces: Traces,
        known_agents: Iterable[str] = (),
        *,
        penalty: Penalty | None = None,
        whole: bool = True,  # noqa: ARG002 - groups are compared by themselves, whoever has the others
        merge: bool = True,
    ) -> Batch:
        """Turn rollouts into rows; see `Algorithm.batch`."""
        weights, credit = source_weights(config), self.credit(config)
        across = isinstance(credit, AcrossAttempts)
        # 1. Every attempt that counts becomes calls with credit. A rollout without others in its group is left out,
        #    unless the batch is its baseline.
        calls = calls_of(
            outcomes,
            traces,
            credit=credit,
            failed=config.failed,
            agents=config.agents,
            weights=weights,
            apart=config.normalise_std,
            known_agents=known_agents,
            alone=config.alone,
        )
        # 2. How much better did each call do than its group? Nothing is dropped before this: a call without tokens
        #    is still part of the baseline.
        comparison = partial(
            compare_calls,
            calls,
            # Alternatives of one call are compared with each other, whatever the algorithm compares rollouts with.
            leave_one_out if across else self.compare,
            normalise=config.normalise_std,
            eps=config.advantage_eps,
            alone=config.alone,
        )
        parts = comparison(penalties_M=penalties_of(calls, penalty))
        still = no_contrast(calls, parts, comparison() if penalty is not None else None)
        # 3. Tokens. Calls that continue each other share a row; groups without contrast are counted.
        return batch_of(calls, weigh_parts(parts, weights), still, merge=merge)

    def policy_loss(self, tokens: TrainedTokens, clip: Clip) -> PolicyLoss:
        """Clip the ratio of each token; see `Algorithm.policy_loss`."""
        from lightning_trainer.rl.losses import policy_loss

        # 4. - sum of w * min(r A, clip(r) A): a token that has moved far enough has no gradient.
        return policy_loss(*tokens.given, clip_low=clip.low, clip_high=clip.high, clip_dual=clip.dual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo(Grpo):
    """GRPO with one ratio for a whole response instead of one for each token."""

    dual_clip: ClassVar[bool] = False

    def policy_loss(self, tokens: TrainedTokens, clip: Clip) -> PolicyLoss:
        """Clip the ratio of each response; see `Algorithm.policy_loss`."""
        from lightning_trainer.rl.losses import gspo_loss

        return gspo_loss(*tokens.given, tokens.response_T, clip_low=clip.low, clip_high=clip.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo(Grpo):
    """GRPO that clips the weight of a token and keeps its gradient."""

    dual_clip: ClassVar[bool] = False

    def policy_loss(self, tokens: TrainedTokens, clip: Clip) -> PolicyLoss:
        """Clip the weight of each token; see `Algorithm.policy_loss`."""
        from lightning_trainer.rl.losses import cispo_loss

        return cispo_loss(*tokens.given, clip_low=clip.low, clip_high=clip.high)


GRPO: Final = Grpo(paper="arXiv 2402.03300")

VARIANTS: Final[Mapping[str, Algorithm]] = {
    "grpo": GRPO,
    # No division by the deviation, and no division by the response's length: neither favours short or long answers.
    "dr-grpo": Grpo(
        paper="arXiv 2503.20783",
        defaults={"normalise_std": False, "loss_aggregation": "sequence-sum", "clip_high": 0.2},
    ),
    # Clip-higher, equal weights for all tokens, and replacement of groups without contrast.
    "dapo": Grpo(
        paper="arXiv 2503.14476",
        defaults={"clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token-mean", "resample": 3},
    ),
    "gspo": Gspo(
        paper="arXiv 2507.18071",
        # Rounding alone puts most sequence ratios outside such a narrow range, unless both sides are the trainer's.
        defaults={
            "clip_low": 3e-4,
            "clip_high": 4e-4,
            "loss_aggregation": "sequence-mean",
            "old_logprobs": "recompute",
        },
    ),
    "cispo": Cispo(
        paper="arXiv 2506.13585",
        defaults={"clip_low": 1.0, "clip_high": 0.28, "loss_aggregation": "token-mean"},
    ),
    # The baseline is the mean of the others: the rollout itself does not contribute to it.
    "rloo": Grpo(paper="arXiv 2402.14740", compare=leave_one_out, divides=False, defaults={"normalise_std": False}),
}
