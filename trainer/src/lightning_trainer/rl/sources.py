"""Each automatic rule's part of the credit of a call, compared separately and weighted afterwards.

If parts are added before the comparison, a rule's weight has no effect: if the final rewards of a group are equal, only
the rule's findings differ, and the division by the deviation makes weight 0.001 as strong as 0.5. So each source is
compared and normalised separately, and then weighted: group reward-decoupled normalisation, GDPO, arXiv 2601.05242.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

import numpy as np

from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.transitions import Transition
from lightning_trainer.rl.advantages import FloatArray
from lightning_trainer.rl.credit.assigners import CreditAssigner
from lightning_trainer.rl.credit.values import levels_of

_ROUNDING: Final = 1e-9  # of sums of a few rewards, as shares of the largest

Parts: TypeAlias = tuple[tuple[float, ...], ...]  # for each comparison of the credit, (M,) a part of the values


@dataclass(frozen=True, slots=True)
class Shares:
    """The credit of an attempt, split by source.

    Attributes:
        rest: all other sources: the final reward, and what programs and evaluators emit.
        by_source: each automatic rule's part.
    """

    rest: Parts
    by_source: Mapping[str, Parts] = field(default_factory=dict)


def take_apart(
    credit: CreditAssigner, transitions: Sequence[Transition], rewards: Sequence[Reward], sources: Collection[str]
) -> Shares:
    """Return what each of these sources adds to the credit of an attempt.

    A source's part is the credit of its rewards alone. If the parts of an assigner do not add up, as with `per_agent`,
    which depends on which agents have rewards, credit is computed with and without the source instead.

    Args:
        credit: assigns rewards.
        transitions: (M,) all of one attempt.
        rewards: of that attempt.
        sources: names of the automatic rules.

    Returns:
        Parts that add up to the credit; 0, not NaN, if a source has no reward for a call.
    """

    def of(wanted: Callable[[str], bool]) -> Parts:
        its = [replace(t, rewards=tuple(r for r in t.rewards if wanted(r.source))) for t in transitions]
        levels = levels_of(credit(its, [reward for reward in rewards if wanted(reward.source)]))
        return tuple(tuple(0.0 if math.isnan(value) else value for value in level.values) for level in levels)

    given = {reward.source for reward in (*rewards, *(reward for t in transitions for reward in t.rewards))}
    found = sorted(given & set(sources))
    rest = of(lambda source: source not in found)
    if not found:
        return Shares(rest)
    alone = {name: of(lambda source, name=name: source == name) for name in found}  # type: ignore[misc]
    whole = np.array(of(lambda _: True))
    parts = [np.array(part) for part in (rest, *alone.values())]
    largest = max(float(abs(part).max(initial=0.0)) for part in parts)
    if np.allclose(sum(parts), whole, rtol=_ROUNDING, atol=_ROUNDING * largest):
        return Shares(rest, alone)
    left, by_source = whole, {}
    for number, name in enumerate(found, 1):
        gone = frozenset(found[:number])
        less: Parts = of(lambda source, gone=gone: source not in gone)  # type: ignore[misc]
        without: FloatArray = np.array([list(values) for values in less], dtype=np.float64)
        by_source[name] = tuple(map(tuple, (left - without).tolist()))
        left = without
    return Shares(rest, by_source)
