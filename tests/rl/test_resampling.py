"""Dynamic sampling: groups without contrast are replaced, within a bound, and every call is accounted for."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lightning_trainer.report.step_metrics import count_compared
from lightning_trainer.rl.algorithms.grpo import GRPO
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.resampling import other_tasks, with_contrast
from lightning_trainer.rl.rollouts import Outcome
from support.rl.world import World, options_of


class Rolling(World):
    """Groups on demand: each a pair of rewards."""

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[int] = []

    def groups(self, *pairs: tuple[float | None, float | None]) -> list[Outcome]:
        before = len(self.outcomes)
        for number, pair in enumerate(pairs):
            for value in pair:
                self.rollout(f"g{before}-{number}", [("writer", "w")], None if value is None else {None: value})
        return self.outcomes[before:]

    def judge(self, outcomes: Sequence[Outcome]) -> Batch:
        return GRPO.batch(options_of(failed="exclude"), outcomes, self.traces)


def test_groups_without_contrast_are_replaced_until_there_are_none() -> None:
    world = Rolling()
    first = world.groups((1.0, 0.0), (1.0, 1.0), (0.0, 0.0))
    answers = {1: [(0.0, 0.0), (1.0, 0.0)], 2: [(0.5, 1.0)]}

    def roll(count: int, number: int) -> list[Outcome]:
        assert count == len(answers[number])
        world.rounds.append(number)
        return world.groups(*answers[number])

    batch, rolled = with_contrast(first, 5, world.judge, roll)
    assert world.rounds == [1, 2]
    assert len(batch.rows) == 6
    assert not batch.flat_groups & {row.group_id for row in batch.rows}
    assert all(row.has_gradient for row in batch.rows)
    assert len(rolled) == 12
    assert count_compared(batch) == (6, 3)
    assert batch.account.dropped == {"group replaced: all its rewards were equal": 6}
    assert batch.account.seen == 12


def test_rounds_are_bounded_and_what_still_teaches_nothing_is_left_out() -> None:
    world = Rolling()
    first = world.groups((1.0, 0.0), (1.0, 1.0))
    batch, rolled = with_contrast(first, 2, world.judge, lambda count, number: world.groups(*[(0.0, 0.0)] * count))
    assert (len(batch.rows), len(rolled)) == (2, 8)
    assert batch.account.dropped == {"group replaced: all its rewards were equal": 6}
    assert count_compared(batch) == (4, 3)


def test_a_group_that_is_flat_once_another_is_replaced_is_counted() -> None:
    """A crash earns the lowest reward of the batch: -1 at first, and 0 without the second group."""

    class Lowest(Rolling):
        def judge(self, outcomes: Sequence[Outcome]) -> Batch:
            return GRPO.batch(options_of(failed="lowest"), outcomes, self.traces)

    world = Lowest()
    first = world.groups((None, 0.0), (-1.0, -1.0))
    batch, _ = with_contrast(first, 1, world.judge, lambda *_: world.groups((1.0, 0.0)))
    assert count_compared(batch) == (3, 2)


def test_where_no_group_teaches_anything_the_first_ones_stay() -> None:
    world = Rolling()
    first = world.groups((1.0, 1.0), (0.0, 0.0))
    batch, rolled = with_contrast(first, 1, world.judge, lambda count, number: world.groups(*[(0.0, 0.0)] * count))
    assert (len(batch.rows), len(rolled)) == (4, 8)
    assert (batch.account.seen, batch.account.dropped) == (8, {"group replaced: all its rewards were equal": 4})
    assert count_compared(batch) == (4, 4)


def test_without_rounds_nothing_is_rolled_again() -> None:
    world = Rolling()
    first = world.groups((1.0, 1.0), (1.0, 0.0))
    batch, rolled = with_contrast(first, 0, world.judge, lambda count, number: 1 / 0)  # type: ignore[arg-type,return-value]
    assert (len(batch.rows), rolled) == (4, first)


def test_failed_rollouts_of_replaced_groups_are_counted() -> None:
    world = Rolling()
    first = world.groups((1.0, 0.0), (1.0, 1.0))
    world.rollout(first[-1].rollout.group_id, [("writer", "w")], None)
    batch, _ = with_contrast(world.outcomes[:], 1, world.judge, lambda count, number: world.groups((1.0, 0.0)))
    assert batch.account.dropped == {"group replaced: all its rewards were equal": 3}


@given(st.integers(0, 9), st.sets(st.integers(0, 7)), st.text())
def test_other_tasks_are_new_where_there_are_enough(count: int, taken: set[int], name: str) -> None:
    drawn = other_tasks(count, sorted(taken), 8, name)
    assert drawn == other_tasks(count, sorted(taken), 8, name)
    assert len(drawn) == count
    fresh = 8 - len(taken)
    assert len(set(drawn[:fresh]) - taken) == min(count, fresh)
    assert all(0 <= place < 8 for place in drawn)
