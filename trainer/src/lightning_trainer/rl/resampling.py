"""Dynamic sampling: groups that teach nothing are replaced by groups of other tasks (DAPO, arXiv 2503.14476, 3.2).

The paper fills the batch until it is full, however long it takes; here a number of rounds limits it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from lightning_trainer.rl.account import UntrainedReason
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.rollouts import Outcome


def other_tasks(count: int, taken: Sequence[int], tasks: int, name: str) -> list[int]:
    """Sample tasks that are not in the step yet, if there are enough of them; the same for the same name.

    Args:
        count: how many.
        taken: indices of those sampled before in this step.
        tasks: in the data set.
        name: of the step and the round, with the run's seed.
    """
    numbers = random.Random(name)
    fresh = sorted(set(range(tasks)) - set(taken))
    drawn = numbers.sample(fresh, min(count, len(fresh)))
    return drawn + numbers.choices(range(tasks), k=count - len(drawn))


def with_contrast(
    outcomes: Sequence[Outcome],
    rounds: int,
    judge: Callable[[Sequence[Outcome]], Batch],
    roll: Callable[[int, int], Sequence[Outcome]],
) -> tuple[Batch, list[Outcome]]:
    """Create a batch of groups whose rewards differ, not counting automatic rules.

    Args:
        outcomes: of whole groups.
        rounds: how often groups may be replaced. Those of the last round that teach nothing are left out, unless no
            group teaches anything.
        judge: creates a batch of groups.
        roll: runs so many groups of other tasks, in the round of that number.

    Returns:
        The batch, which includes the calls of replaced groups in its account, their automatic rewards and their
        numbers, and all outcomes, including replaced ones.
    """
    judged = first = judge(outcomes)
    rolled, kept = list(outcomes), _without(outcomes, first.tied_groups)
    seen, compared, flat = first.account.seen, first.compared_groups, first.flat_groups
    automatic = {reward.reward_id: reward for reward in first.automatic}
    for number in range(1, rounds + 1):
        if not judged.tied_groups:
            break
        new = list(roll(len(judged.tied_groups), number))
        judged = judge(new)
        rolled += new
        kept += _without(new, judged.tied_groups)
        seen += judged.account.seen
        compared, flat = compared | judged.compared_groups, flat | judged.flat_groups
        automatic |= {reward.reward_id: reward for reward in judged.automatic}
    if len(rolled) == len(outcomes):
        return first, rolled
    final = judge(kept) if kept else first
    whole = replace(
        final,
        account=final.account.plus_dropped(UntrainedReason.RESAMPLED, seen - final.account.seen),
        automatic=tuple(automatic.values()),
        flat_groups=flat | final.flat_groups,  # a crash earns the lowest reward of the batch, which is another one now
        replaced_groups=compared - final.compared_groups,
    )
    return whole, rolled


def _without(outcomes: Sequence[Outcome], groups: frozenset[str]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.rollout.group_id not in groups]
