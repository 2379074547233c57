"""Weighted likelihood: the token-level form of supervised learning, preference pairs and distillation.

The loss is - sum of w A log p. With A = 1 it is the cross-entropy. With another A its gradient is that of the loss from
which A was derived, at the current weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NoReturn

from lightning_spans.errors import ConfigError

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.algorithms.protocol import Clip, TrainedTokens
    from lightning_trainer.rl.batch.attempts import Traces
    from lightning_trainer.rl.batch.batch import Batch
    from lightning_trainer.rl.batch.comparison import Penalty
    from lightning_trainer.rl.losses import PolicyLoss
    from lightning_trainer.rl.rollouts import Outcome

LIKELIHOOD: Final = "likelihood"


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The loss of `lightning-rl sft`: `Algorithm`. It compares no rollouts, so no training run offers it."""

    defaults: ClassVar[Mapping[str, Any]] = {}
    grouped: ClassVar[bool] = False
    critic: ClassVar[bool] = False
    dual_clip: ClassVar[bool] = False
    internal: ClassVar[bool] = True  # not offered, see `registry.offered`

    def check(self, config: TrainConfig) -> None:
        """Reject it; see `Algorithm.check`."""
        _refuse(config.algorithm)

    def batch(
        self,
        config: TrainConfig,
        outcomes: Sequence[Outcome],  # noqa: ARG002 - the protocol's signature
        traces: Traces,  # noqa: ARG002
        known_agents: Iterable[str] = (),  # noqa: ARG002
        *,
        penalty: Penalty | None = None,  # noqa: ARG002
        whole: bool = True,  # noqa: ARG002
        merge: bool = True,  # noqa: ARG002
    ) -> Batch:
        """Reject it; see `Algorithm.batch`."""
        _refuse(config.algorithm)

    def policy_loss(self, tokens: TrainedTokens, clip: Clip) -> PolicyLoss:  # noqa: ARG002 - nothing is compared
        """Weight log-probabilities; see `Algorithm.policy_loss`."""
        from lightning_trainer.rl.losses import likelihood_loss

        return likelihood_loss(tokens.logprobs_T, tokens.advantages_T, tokens.weights_T)


def _refuse(name: str) -> NoReturn:
    raise ConfigError(f"algorithm = {name} compares no rollouts. `lightning-rl sft` uses it.")


VARIANTS: Final[Mapping[str, Likelihood]] = {LIKELIHOOD: Likelihood()}
