"""On-policy distillation: a teacher rates each token that the policy sampled by its log-probability.

One step, from rollouts to the update:

1. Rollouts have ended. Every call of the trained agents becomes tokens; rewards are not used. 2. A token's advantage is
log p_teacher - log p_student, for the tokens that the student sampled: `distil_rows`. This
   minimises the reverse Kullback-Leibler divergence of each next token, as in GKD on the student's own samples
   (arXiv 2306.13649) and on-policy distillation (Thinking Machines, 2025); nothing is discounted over tokens.
3. The update raises or lowers the log-probability of each token by its advantage, within the clip range.

`Distil.batch` is step 1, the run asks the teacher for step 2, `Distil.policy_loss` is step 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from lightning_trainer.config.mistakes import refuse
from lightning_trainer.rl.algorithms.protocol import (
    Algorithm,
    Clip,
    TrainedTokens,
    group_option_refusals,
    value_head_refusals,
)
from lightning_trainer.rl.batch.batch import Batch, batch_of
from lightning_trainer.rl.batch.sharing import calls_of

if TYPE_CHECKING:
    from lightning_spans.schema.rewards import Reward
    from lightning_spans.schema.transitions import Transition
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.attempts import Traces
    from lightning_trainer.rl.batch.comparison import Penalty
    from lightning_trainer.rl.losses import PolicyLoss
    from lightning_trainer.rl.rollouts import Outcome
    from lightning_trainer.rl.rows import Row

DISTIL: Final = "distil"
# nats. A teacher gives impossible tokens -inf, or -9999 with vLLM, which would dominate all others
FARTHEST: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Distil:
    """On-policy distillation.

    Attributes:
        defaults: options of `TrainConfig` that it sets.
    """

    defaults: Mapping[str, Any] = field(
        default_factory=lambda: {"group_size": 4, "temperature": 1.0, "normalise_std": False}
    )

    grouped: ClassVar[bool] = False
    critic: ClassVar[bool] = False
    dual_clip: ClassVar[bool] = True

    def check(self, config: TrainConfig) -> None:
        """Reject options that contradict the algorithm; see `Algorithm.check`."""
        refuse(
            {
                "algorithm = distil needs a teacher: a model folder or name, MODEL=URL of a vLLM server, or self.": (
                    config.teacher is None
                ),
                "a teacher's server gives log-probabilities at temperature 1. Set temperature to 1, or name a model"
                " folder.": at_endpoint(config.teacher) and config.temperature != 1.0,
                "credit assigns rewards to calls, and algorithm = distil uses no rewards. Leave it out.": (
                    config.credit != "identical"
                ),
                "kl_in = reward subtracts from rewards, and algorithm = distil uses no rewards. Use kl_in = loss.": (
                    config.kl_coef > 0 and config.kl_in == "reward"
                ),
                "normalise_std has no effect with algorithm = distil. Leave it out.": config.normalise_std,
                **value_head_refusals(config),
                **group_option_refusals(config),
            }
        )

    def batch(
        self,
        config: TrainConfig,
        outcomes: Sequence[Outcome],
        traces: Traces,
        known_agents: Iterable[str] = (),
        *,
        penalty: Penalty | None = None,  # noqa: ARG002 - nothing is rewarded
        whole: bool = True,  # noqa: ARG002 - nothing is compared
        merge: bool = True,
    ) -> Batch:
        """Turn rollouts into rows; see `Algorithm.batch`. Their advantages are 1 until the teacher has been asked."""
        calls = calls_of(
            outcomes,
            traces,
            credit=_every_call,
            failed=config.failed,
            agents=config.agents,
            weights={},
            apart=False,
            known_agents=known_agents,
            alone="batch",
        )
        return batch_of(calls, np.ones(len(calls.compared)), None, merge=merge)

    def policy_loss(self, tokens: TrainedTokens, clip: Clip) -> PolicyLoss:
        """Clip the ratio of each token; see `Algorithm.policy_loss`."""
        from lightning_trainer.rl.losses import policy_loss

        return policy_loss(*tokens.given, clip_low=clip.low, clip_high=clip.high, clip_dual=clip.dual)


def at_endpoint(teacher: str | None) -> bool:
    """Whether a teacher is behind a server: ``MODEL=URL``."""
    return teacher is not None and "=" in teacher


def distil_rows(rows: Sequence[Row], teacher: Sequence[NDArray[Any]]) -> tuple[list[Row], float]:
    """Give each sampled token the advantage log p_teacher - log p_student.

    Args:
        rows: sampled by the student, with the recorded log-probabilities.
        teacher: for each row (K,) the teacher's log-probabilities of its trained tokens.

    Returns:
        The rows, and the mean over tokens of log p_student - log p_teacher: an estimate of the divergence, in nats.

    Raises:
        ValueError: the teacher did not return one number for each trained token.
    """
    found, total, count = [], 0.0, 0
    for row, own in zip(rows, teacher, strict=True):
        if own.shape != (int(row.mask.sum()),) or np.isnan(own).any():
            raise ValueError(f"{int(row.mask.sum())} tokens, and of the teacher {own.shape} numbers, NaN among them?")
        gap = np.clip(own.astype(np.float64) - row.logprobs[row.mask], -FARTHEST, FARTHEST)
        advantages = np.zeros(len(row.tokens))
        advantages[row.mask] = gap
        found.append(replace(row, advantages=advantages))
        total, count = total - float(gap.sum()), count + len(gap)
    return found, total / max(1, count)


def _every_call(transitions: Sequence[Transition], rewards: Sequence[Reward]) -> list[float]:  # noqa: ARG001
    """Credit of each call: none is left out for lack of a reward."""
    return [0.0] * len(transitions)


VARIANTS: Final[Mapping[str, Algorithm]] = {DISTIL: Distil()}
