"""What is kept: only what is better than the base on tasks that nothing was chosen by, whatever was tried before.

The methods were chosen by other held-out tasks, so each agent brings one candidate to these. Its interval, and that of
all candidates together, are corrected for their number (Bonferroni). If no candidate is better than the base, the base
is replaced in at most 2.5 % of cases: 5 % outside of all intervals together, half of them above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_trainer.intervals import Declared, Estimate, estimate_difference
from lightning_trainer.kits.improve.halving import Rewards

UNCHANGED: Final = Estimate(0.0, 0.0, 0.0)  # the difference of the base to itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is kept.

    Attributes:
        kept: agents whose candidate replaces the base.
        differences: of each agent's candidate alone to the base, by agent.
        together: of what is kept to the base; a difference of 0 if nothing is.
        comparisons: number of intervals for which each of them is corrected.
    """

    kept: tuple[str, ...] = ()
    differences: Mapping[str, Estimate] = field(default_factory=dict)
    together: Estimate = UNCHANGED
    comparisons: int = 1


def decide(
    candidates: Sequence[str],
    base: Callable[[], Rewards],
    measure: Callable[[Sequence[str]], Rewards],
    *,
    declared: Declared = None,
) -> Decision:
    """Compare candidates with the base: first each alone, then those that are better together.

    If together they are not better for sure, the best one alone is kept.

    Args:
        candidates: agents that have one.
        base: runs the tasks with the unchanged agents.
        measure: of agents: runs the tasks with their candidates, and the other agents unchanged.
        declared: range of the rewards.
    """
    if not candidates:
        return Decision()
    comparisons = len(candidates) + (len(candidates) > 1)
    unchanged = base()

    def compare(agents: Sequence[str]) -> Estimate:
        rewards = measure(agents)
        both = [task for task in rewards if task in unchanged]
        pairs = [rewards[task] for task in both], [unchanged[task] for task in both]
        return estimate_difference(*pairs, declared, comparisons=comparisons)

    alone = {agent: compare([agent]) for agent in candidates}
    better = [agent for agent in candidates if is_better(alone[agent])]
    if not better:
        return Decision(differences=alone, comparisons=comparisons)
    best = max(better, key=lambda agent: alone[agent].mean or 0.0)
    if len(better) > 1 and is_better(together := compare(better)):
        return Decision(kept=tuple(better), differences=alone, together=together, comparisons=comparisons)
    return Decision(kept=(best,), differences=alone, together=alone[best], comparisons=comparisons)


def is_better(found: Estimate) -> bool:
    """Whether an interval is above 0."""
    return found.low is not None and found.low > 0
