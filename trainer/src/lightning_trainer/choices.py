"""Allowed names of options, shared by `config` and the backends' own options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

Alone: TypeAlias = Literal["skip", "batch"]
Aggregation: TypeAlias = Literal["token-mean", "sequence-mean", "sequence-sum", "row-mean", "rollout-mean"]
AgentWeight: TypeAlias = Literal["equal"] | Mapping[str, float]
KlEstimator: TypeAlias = Literal["k1", "k2", "k3", "abs", "low_var", "k1+", "k3+", "abs+", "low_var+"]
Divergence: TypeAlias = Literal["reverse", "forward", "jensen-shannon"]
TeacherWeights: TypeAlias = Literal["newest", "base", "ema"]
Schedule: TypeAlias = Literal["constant", "linear", "cosine"]
Timeouts: TypeAlias = Literal["count", "exclude"]
"""Whether an attempt that was too slow counts as the policy's failure or is left out, for slow infrastructure."""

TRACKERS: Final = ("mlflow", "wandb")
RULES: Final = (
    "tool_status",
    "tool_arguments",
    "repeated_calls",
    "empty_results",
    "answer_format",
    "latency",
    "cost",
    "overlong",
)
"""The rules of automatic rewards, see `lightning_trainer.rl.rewards.rules`."""

NO_FORMAT: Final = "none"  # the tool format of a model that calls no tools
SELF: Final = "self"  # the teacher that is the policy itself
