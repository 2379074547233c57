"""Each algorithm on verl: its advantage estimator and its loss, by verl's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_trainer.choices import Aggregation
from lightning_trainer.config.train import TrainConfig

# Suffix of the name of our estimators, by how the loss weights responses.
AGGREGATIONS: Final[Mapping[Aggregation, str]] = {
    "token-mean": "",
    "sequence-mean": "_sequence_mean",
    "sequence-sum": "_sequence_sum",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnVerl:
    """An algorithm on verl.

    Attributes:
        estimator: of advantages: verl's ``gae``, or one of those that `estimators` registers.
        loss: verl's policy loss.
        critic: whether verl trains a critic, for which rows contain the credit of calls as rewards.
        merge: whether calls that continue an earlier one share its row. verl's GSPO treats a row as a response.
    """

    estimator: str = "lightning"
    loss: str = "vanilla"
    critic: bool = False
    merge: bool = True

    def estimator_for(self, aggregation: Aggregation) -> str:
        """Return the estimator that also weights responses: verl's own losses only support the mean over tokens."""
        return self.estimator if self.critic else self.estimator + AGGREGATIONS[aggregation]


ALGORITHMS: Final[Mapping[str, OnVerl]] = {
    "grpo": OnVerl(),
    "dr-grpo": OnVerl(),
    "dapo": OnVerl(),
    "rloo": OnVerl(),
    "gspo": OnVerl(loss="gspo", merge=False),
    "cispo": OnVerl(loss="cispo"),
    "reinforce++": OnVerl(estimator="lightning_whitened"),
    "reinforce++-baseline": OnVerl(estimator="lightning_whitened"),
    "ppo": OnVerl(estimator="gae", critic=True),
}


def on_verl(config: TrainConfig) -> OnVerl:
    """Return a run's algorithm on verl.

    Raises:
        ConfigError: verl does not have it.
    """
    if config.algorithm not in ALGORITHMS:
        raise ConfigError(f"verl knows no algorithm {config.algorithm!r}. Use one of: {', '.join(ALGORITHMS)}.")
    return ALGORITHMS[config.algorithm]
