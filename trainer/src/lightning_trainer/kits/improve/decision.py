"""The final decision: a change is kept only if it is better than the base on all held-out tasks.

Half of these tasks chose each agent's candidate among several states of several methods. The intervals hold together
for all states of all agents that could have been chosen (see `selection`), and for the candidates together. If no state
is better than the base, the base is replaced in at most 2.5 % of cases: 5 % outside of all intervals together, half of
them above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_trainer.intervals import Declared, Estimate, estimate_difference
from lightning_trainer.kits.improve.halving import Rewards

UNCHANGED: Final = Estimate(0.0, 0.0, 0.0)  # the difference between the base and itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The final decision.

    Attributes:
        kept: agents whose candidate replaces the base.
        differences: by agent, the difference between its candidate alone and the base.
        together: the difference between everything kept and the base; 0 if nothing is kept.
        comparisons: number of independent comparisons for which each interval is corrected (Bonferroni).
    """

    kept: tuple[str, ...] = ()
    differences: Mapping[str, Estimate] = field(default_factory=dict)
    together: Estimate = UNCHANGED
    comparisons: float = 1.0


def decide(
    candidates: Sequence[str],
    measure: Callable[[Sequence[str]], tuple[Rewards, Rewards]],
    *,
    declared: Declared = None,
    choices: Callable[[Sequence[str]], float] = len,
) -> Decision:
    """Compare candidates with the base: first each alone, then the better ones together.

    If they are not significantly better together, only the best one is kept.

    Args:
        candidates: agents that have a candidate.
        measure: returns the rewards of the unchanged agents on all held-out tasks, and those with the candidates of the
            given agents, and the other agents unchanged. A failure counts as the same reward in both.
        declared: range of the rewards.
        choices: number of comparisons that choosing the candidates was equivalent to, see `equivalent_comparisons`.
            Default: one for each candidate, as if nothing had been chosen.
    """
    if not candidates:
        return Decision()
    comparisons = float(choices(candidates)) + (len(candidates) > 1)

    def compare(agents: Sequence[str]) -> Estimate:
        unchanged, rewards = measure(agents)
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
