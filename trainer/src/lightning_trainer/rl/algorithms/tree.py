"""Tree-GRPO: rollouts branch at calls of earlier ones instead of beginning anew.

One step, from rollouts to the update:

1. Some rollouts of each task have ended: records. Calls of theirs are drawn again, and the program goes on from there:
   each record is a tree with its forks, and each end of it a leaf with a reward.
2. A leaf's advantage is its comparison with its own tree's leaves, and besides it that with all leaves of the task. A
   call has the sum of what the leaves below it have: `lightning_trainer.rl.credit.trees`.
3. Calls become rows of tokens. What a fork was given from its record is context: the record learns it, once.
4. The update is GRPO's.

It compares what was said after a branch with what its siblings said, for the price of the branches alone. VinePPO
(arXiv 2410.01679) draws from every call as often to know its value, and learns nothing of what it drew; with
continuations that are coupled, `credit = "counterfactual"` says more for less: docs/how-to/counterfactual.md.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from lightning_trainer.config.mistakes import refuse
from lightning_trainer.rl.advantages import uncompared
from lightning_trainer.rl.algorithms.grpo import Grpo
from lightning_trainer.rl.algorithms.protocol import Algorithm
from lightning_trainer.rl.credit.played import AcrossAttempts
from lightning_trainer.rl.credit.trees import tree_advantages

if TYPE_CHECKING:
    from lightning_trainer.config.train import TrainConfig

TREE: Final = "tree-grpo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree(Grpo):
    """GRPO whose groups are trees."""

    branches: ClassVar[bool] = True

    def check(self, config: TrainConfig) -> None:
        """Refuse options that contradict the algorithm: `Algorithm.check`."""
        Grpo.check(self, config)
        message = f"algorithm = {config.algorithm} compares what leaves of a tree earned. Leave credit out."
        refuse({message: config.credit != "identical"})

    def credit(self, config: TrainConfig) -> AcrossAttempts:
        """Return what makes the advantages of leaves those of calls."""
        return AcrossAttempts(
            functools.partial(tree_advantages, normalise=config.normalise_std, eps=config.advantage_eps)
        )


VARIANTS: Final[Mapping[str, Algorithm]] = {
    TREE: Tree(paper="arXiv 2509.21240", compare=uncompared, defaults={"group_size": 2})
}
