"""PPO with a value head: the reward of a call is compared with its expected value.

One step, from rollouts to the update:

1. Rollouts have ended. The rewards of each attempt are assigned to its model calls: credit. Nothing is compared, and
   calls become rows of tokens that contain their credit.
2. At the update, the value head estimates for each sampled token the return still to come. With the credit at the end
of
   its response, minus the divergence at each token, this gives advantages of tokens: `token_advantages`.
3. The update raises or lowers the log-probability of each token by its advantage, within the clip range, and moves the
   values towards the returns.

`Ppo.batch` is step 1, `token_advantages` is step 2, `Ppo.policy_loss` and `losses.value_loss` are step 3.

Axes: `_M` calls, `_P` trained tokens of the batch, `_S` responses, `_T` tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from lightning_trainer.config.mistakes import refuse
from lightning_trainer.rl.advantages import FloatArray, generalised_advantages, keep_values, whiten
from lightning_trainer.rl.algorithms.protocol import (
    Algorithm,
    Clip,
    TrainedTokens,
    credit_of,
    division_refusals,
    group_option_refusals,
)
from lightning_trainer.rl.batch.batch import Batch, batch_of
from lightning_trainer.rl.batch.calls import FINAL
from lightning_trainer.rl.batch.comparison import compare_calls
from lightning_trainer.rl.batch.sharing import calls_of
from lightning_trainer.rl.rewards import source_weights

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.attempts import Traces
    from lightning_trainer.rl.batch.comparison import Penalty
    from lightning_trainer.rl.losses import PolicyLoss
    from lightning_trainer.rl.rollouts import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Ppo:
    """Proximal policy optimisation with generalised advantage estimation.

    Attributes:
        paper: where the algorithm is published.
        defaults: options of `TrainConfig` that the paper sets.
    """

    paper: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    grouped: ClassVar[bool] = False
    critic: ClassVar[bool] = True
    dual_clip: ClassVar[bool] = True

    def check(self, config: TrainConfig) -> None:
        """Reject options that contradict the algorithm; see `Algorithm.check`."""
        refuse({**division_refusals(config), **group_option_refusals(config)})

    def batch(
        self,
        config: TrainConfig,
        outcomes: Sequence[Outcome],
        traces: Traces,
        known_agents: Iterable[str] = (),
        *,
        penalty: Penalty | None = None,  # noqa: ARG002 - taken off at each token, in `token_advantages`
        whole: bool = True,  # noqa: ARG002 - calls are not compared with each other
        merge: bool = True,
    ) -> Batch:
        """Turn rollouts into rows that contain the credit of their calls; see `Algorithm.batch`."""
        # 1. Every attempt that counts becomes calls with credit; no group is needed.
        calls = calls_of(
            outcomes,
            traces,
            credit=credit_of(config),
            failed=config.failed,
            agents=config.agents,
            weights=source_weights(config),
            apart=False,
            known_agents=known_agents,
            alone="batch",
        )
        parts = compare_calls(calls, keep_values, normalise=False, eps=config.advantage_eps)
        return batch_of(calls, parts[FINAL], None, merge=merge)

    def policy_loss(self, tokens: TrainedTokens, clip: Clip) -> PolicyLoss:
        """Clip the ratio of each token; see `Algorithm.policy_loss`."""
        from lightning_trainer.rl.losses import policy_loss

        # 3. - sum of w * min(r A, clip(r) A): a token that has moved far enough has no gradient.
        return policy_loss(*tokens.given, clip_low=clip.low, clip_high=clip.high, clip_dual=clip.dual)


def token_advantages(
    credit_P: FloatArray, values_P: FloatArray, penalties_P: FloatArray, lengths: Sequence[int], lam: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Turn the credit of calls into advantages of tokens, and targets of their values: step 2.

    Each response is a separate episode, however rows were merged: its credit comes with its last token, a penalty with
    every token, and nothing is discounted within it (`advantages.generalised_advantages`). Advantages are then compared
    over all tokens of the batch (`advantages.whiten`), as in verl.

    Args:
        credit_P: the credit of each token's call.
        values_P: value of the state in which it was sampled.
        penalties_P: subtracted from its reward.
        lengths: (S,) number of tokens of each response, in order.
        lam: decay of the estimate.

    Returns:
        (P,) advantages and (P,) targets.
    """
    lengths_S = np.asarray(lengths, dtype=np.int64)
    ends_S = np.cumsum(lengths_S) - 1
    rewards_P = -penalties_P.astype(np.float64)
    rewards_P[ends_S] += credit_P[ends_S]
    advantages_P, targets_P = np.empty_like(rewards_P), np.empty_like(rewards_P)
    # Responses of similar lengths together: one long response would pad all others to its length.
    sizes_S = np.ceil(np.log2(np.maximum(lengths_S, 1)))
    for size in np.unique(sizes_S):
        some_S = sizes_S == size
        own, starts = lengths_S[some_S, None], (ends_S - lengths_S + 1)[some_S, None]
        steps_T = np.arange(own.max())
        mask_ST = steps_T < own
        places_P = (starts + steps_T)[mask_ST]
        rewards_ST, values_ST = np.zeros(mask_ST.shape), np.zeros(mask_ST.shape)
        rewards_ST[mask_ST], values_ST[mask_ST] = rewards_P[places_P], values_P[places_P]
        advantages_ST, targets_ST = generalised_advantages(rewards_ST, values_ST, mask_ST, lam=lam)
        advantages_P[places_P], targets_P[places_P] = advantages_ST[mask_ST], targets_ST[mask_ST]
    return whiten(advantages_P).astype(np.float32), targets_P.astype(np.float32)


VARIANTS: Final[Mapping[str, Algorithm]] = {
    "ppo": Ppo(
        paper="arXiv 1707.06347",
        defaults={"normalise_std": False, "clip_high": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    ),
}
