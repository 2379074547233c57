"""What each algorithm is on verl: its estimator of advantages and its loss, by verl's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_trainer.choices import Aggregation
from lightning_trainer.config.train import TrainConfig

# What ends the name of an estimator of ours, by how the loss weighs responses.
AGGREGATIONS: Final[Mapping[Aggregation, str]] = {
    "token-mean": "",
    "sequence-mean": "_sequence_mean",
    "sequence-sum": "_sequence_sum",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnVerl:
    """An algorithm on verl.

    Attributes:
        estimator: of advantages: ``gae`` of verl's own, or one of those that `estimators` registers.
        loss: verl's policy loss.
        critic: whether verl trains a critic, for which rows hold the credit of calls as rewards.
        merge: whether calls that continue an earlier one share its row. verl's GSPO takes a row for a response.
    """

    estimator: str = "lightning"
    loss: str = "vanilla"
    critic: bool = False
    merge: bool = True

    def estimator_for(self, aggregation: Aggregation) -> str:
        """Name the estimator that weighs responses so, too: verl's own losses know the mean over tokens alone."""
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
    """Return what a run's algorithm is on verl.

    Raises:
        ConfigError: verl does not know it.
    """
    if config.algorithm not in ALGORITHMS:
        raise ConfigError(f"verl knows no algorithm {config.algorithm!r}. Use one of: {', '.join(ALGORITHMS)}.")
    return ALGORITHMS[config.algorithm]
