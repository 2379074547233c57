"""Automatic intermediate rewards (AIR): rules that judge the spans of an attempt. Off unless configured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_trainer.rl.rewards.judge import Judge, installed, read_rules, weights_of
from lightning_trainer.rl.rewards.rules import Finding
from lightning_trainer.runner.target import JUDGE

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig

__all__ = ["Finding", "Judge", "installed", "read_rules", "source_weights", "weights_of"]


def source_weights(config: TrainConfig) -> dict[str, float]:
    """Return the weight of each source that is compared separately: rules, and a judge next to other rewards."""
    weights = weights_of(config.rewards)
    if config.judge and config.reward != JUDGE:
        weights[JUDGE] = float(config.judge.get("weight", 1.0))
    return weights
