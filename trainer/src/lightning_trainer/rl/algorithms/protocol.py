"""The protocol of algorithms: they turn rollouts into rows, and define how a token's gradient is weighted.

Axis `_T`: the trained tokens of a micro-batch, row after row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.attempts import Traces
    from lightning_trainer.rl.batch.batch import Batch
    from lightning_trainer.rl.batch.comparison import Penalty
    from lightning_trainer.rl.credit.assigners import CreditAssigner
    from lightning_trainer.rl.credit.played import AcrossAttempts
    from lightning_trainer.rl.losses import PolicyLoss
    from lightning_trainer.rl.rollouts import Outcome


@dataclass(frozen=True, slots=True, eq=False)
class TrainedTokens:
    """The inputs of a policy's loss for a micro-batch.

    Attributes:
        logprobs_T: (T,) log-probabilities under the weights being trained, with gradient.
        old_T: (T,) those before the update.
        advantages_T: (T,) advantages.
        weights_T: (T,) from `rows.token_weights`: the loss is a sum.
        response_T: (T,) number of the response of each token, from 0.
    """

    logprobs_T: Tensor
    old_T: Tensor
    advantages_T: Tensor
    weights_T: Tensor
    response_T: Tensor

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the common arguments of the losses in `lightning_trainer.rl.losses`."""
        return self.logprobs_T, self.old_T, self.advantages_T, self.weights_T


@dataclass(frozen=True, slots=True)
class Clip:
    """How far an update may move a probability: the options `clip_low` and `clip_high`.

    Attributes:
        low: the ratio's lower bound is 1 minus this.
        high: its upper bound is 1 plus this.
        dual: the largest weight of a ratio if the advantage is negative; None: no such bound.
    """

    low: float
    high: float
    dual: float | None = None


class Algorithm(Protocol):
    """Registered by name, and chosen by the option `algorithm`."""

    @property
    def defaults(self) -> Mapping[str, Any]:
        """Options of `TrainConfig` that the algorithm sets unless they are given."""
        ...

    @property
    def grouped(self) -> bool:
        """Whether a rollout without others in its group teaches nothing."""
        ...

    @property
    def critic(self) -> bool:
        """Whether rows contain the credit of calls, from which a value head makes advantages."""
        ...

    @property
    def dual_clip(self) -> bool:
        """Whether the policy's loss supports `Clip.dual`."""
        ...

    def check(self, config: TrainConfig) -> None:
        """Reject options that contradict the algorithm.

        Raises:
            ConfigError: names them, and says what to do.
        """
        ...

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
        """Turn rollouts into rows.

        Args:
            config: of the run.
            outcomes: all rollouts of whole groups.
            traces: reads the traces of attempts.
            known_agents: names seen earlier in the run.
            penalty: returns what is subtracted from the rewards: the divergence, if it is part of the reward.
            whole: whether these are all groups of a step. If not, the caller that combines them compares them.
            merge: whether calls that continue an earlier one share its row.

        Raises:
            UnknownAgentError: an agent was selected by a name that was never seen, and is close to one that was.
            ConfigError: no credit has the name, or it does not have the option.
        """
        ...

    def policy_loss(self, tokens: TrainedTokens, clip: Clip) -> PolicyLoss:
        """Return the loss of a micro-batch, to which an update adds divergence, entropy and the error of values."""
        ...


def credit_of(config: TrainConfig) -> CreditAssigner | AcrossAttempts:
    """Return the credit assigner that a configuration names.

    Raises:
        ConfigError: nothing has the name, or it does not have the option.
    """
    from lightning_trainer.rl.credit.assigners import credit_by_name

    discount = {} if config.gamma is None else {"gamma": config.gamma}
    return credit_by_name(config.credit, **config.credit_options, **discount)


def value_head_refusals(config: TrainConfig) -> dict[str, bool]:
    """Return, for `config.refuse`, whether options of a value head are given to an algorithm without one."""
    given = (config.gae_lambda, config.value_learning_rate, config.value_clip)
    return {
        "gae_lambda, value_learning_rate and value_clip are options of algorithm = ppo. Leave them out.": given
        != (None,) * 3
    }


def group_option_refusals(config: TrainConfig) -> dict[str, bool]:
    """Return, likewise, whether group options are given to an algorithm that compares with the whole batch."""
    return {
        f"resample looks for rewards that differ within a group, which algorithm = {config.algorithm} does not need. "
        "Leave it out.": config.resample > 0,
        f"alone = batch is the baseline of algorithm = {config.algorithm} anyway. Leave it out.": config.alone
        == "batch",
        f"credit = gigpo adds a comparison of calls in the same state of a group, and algorithm = {config.algorithm}"
        " does not compare within groups. Use grpo, or credit = discounted.": config.credit == "gigpo",
    }


def division_refusals(config: TrainConfig) -> dict[str, bool]:
    """Return, likewise, whether a division is requested that the algorithm never makes."""
    return {
        f"normalise_std has no effect with algorithm = {config.algorithm}. Leave it out.": config.normalise_std,
    }
