"""What each algorithm is made of: a comparison, a loss, and the options that its paper sets.

Data only; the comparisons are in `advantages`, the losses in `losses`, and `algorithms.rl` puts them together. An
option that a recipe sets is a default: whoever sets it, has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

Comparison: TypeAlias = Literal["group", "leave-one-out", "none"]
LossName: TypeAlias = Literal["clip", "gspo", "cispo"]
Aggregation: TypeAlias = Literal["token-mean", "sequence-mean", "sequence-sum", "row-mean", "rollout-mean"]
KlEstimator: TypeAlias = Literal["k1", "k2", "k3", "abs", "low_var", "k1+", "k3+", "abs+", "low_var+"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One algorithm.

    Attributes:
        paper: where it is published.
        compare: what a value is compared with: its group, the others of its group, or nothing before the batch.
        whiten: whether values are then compared with the whole batch.
        critic: whether a value head says what was to be expected.
        loss: name of the policy loss.
        options: fields of `TrainConfig` that it sets, unless they are given.
    """

    paper: str
    compare: Comparison = "group"
    whiten: bool = False
    critic: bool = False
    loss: LossName = "clip"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def grouped(self) -> bool:
        """Whether a rollout alone in its group teaches nothing."""
        return self.compare != "none"


RECIPES: Final[Mapping[str, Recipe]] = {
    "grpo": Recipe(paper="arXiv 2402.03300"),
    "dr-grpo": Recipe(
        paper="arXiv 2503.20783", options={"normalise_std": False, "loss_aggregation": "sequence-sum", "clip_high": 0.2}
    ),
    "dapo": Recipe(
        paper="arXiv 2503.14476",
        options={"clip_low": 0.2, "clip_high": 0.28, "loss_aggregation": "token-mean", "resample": 3},
    ),
    "gspo": Recipe(
        paper="arXiv 2507.18071",
        loss="gspo",
        options={"clip_low": 3e-4, "clip_high": 4e-4, "loss_aggregation": "sequence-mean"},
    ),
    "cispo": Recipe(
        paper="arXiv 2506.13585",
        loss="cispo",
        options={"clip_low": 1.0, "clip_high": 0.28, "loss_aggregation": "token-mean"},
    ),
    "rloo": Recipe(paper="arXiv 2402.14740", compare="leave-one-out", options={"normalise_std": False}),
    "reinforce++": Recipe(
        paper="arXiv 2501.03262",
        compare="none",
        whiten=True,
        options={"normalise_std": False, "clip_high": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    ),
    "reinforce++-baseline": Recipe(
        paper="arXiv 2501.03262",
        whiten=True,
        options={"normalise_std": False, "clip_high": 0.2, "kl_estimator": "k2"},
    ),
    "ppo": Recipe(
        paper="arXiv 1707.06347",
        compare="none",
        critic=True,
        options={"normalise_std": False, "clip_high": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    ),
}
# One that a plugin registers: its rows come as it makes them, and the loss is the clipped one.
PLUGIN: Final = Recipe(paper="")


def recipe_of(algorithm: str) -> Recipe:
    """Give the recipe of an algorithm; one that a plugin registers has the plain one."""
    return RECIPES.get(algorithm, PLUGIN)
