"""Automatic rewards beside final ones: each source is compared by itself and weighed after."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.transitions import Transition
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.credit.assigners import credit_by_name
from lightning_trainer.rl.credit.values import levels_of
from lightning_trainer.rl.resampling import with_contrast
from lightning_trainer.rl.rewards import installed, read_rules
from lightning_trainer.rl.rewards.rules import Finding
from lightning_trainer.rl.sources import take_apart
from support.rl.world import World, options_of

FOUND: dict[str, tuple[float, float]] = {}  # by attempt: what each of the two rules finds


def rule_a(trace: Trace) -> list[Finding]:
    return [Finding(FOUND[trace.attempt_id or ""][0], trace.chats[0])]


def rule_b(trace: Trace) -> list[Finding]:
    return [Finding(FOUND[trace.attempt_id or ""][1], trace.chats[0])]


@contextmanager
def judged(weights: dict[str, float]) -> Iterator[dict[str, float]]:
    table = {f"test_sources:rule_{name}": weight for name, weight in weights.items()}
    with installed(read_rules(table)):
        yield table


def group(*attempts: tuple[float, float, float], name: str = "g", world: World | None = None) -> World:
    """One group; each attempt has a final reward and what the two rules find."""
    world = World() if world is None else world
    for final, *found in attempts:
        FOUND[f"r{len(world.outcomes)}.1"] = (found[0], found[1])
        world.rollout(name, [("writer", "w")], {None: final})
    return world


def batch(world: World, table: dict[str, float], algorithm: str = "grpo", **options: Any) -> Batch:
    config = options_of(algorithm=algorithm, rewards=table, **options)
    return algorithm_by_name(algorithm).batch(config, world.outcomes, world.traces)


def advantages(found: Batch) -> list[float]:
    rows = sorted(found.rows, key=lambda row: row.rollout_id)
    return [float(row.advantages[row.mask][0]) for row in rows]


ONE = 1.0 / math.sqrt(4 / 3)  # four values of -1 and 1, two each, under the sample's deviation


@pytest.mark.parametrize("weight", [0.5, 0.1, 0.001])
def test_weight_holds_where_the_final_rewards_tie(weight: float) -> None:
    world = group((1.0, 1.0, 0.0), (1.0, 1.0, 0.0), (1.0, -1.0, 0.0), (1.0, -1.0, 0.0))
    with judged({"a": weight}) as table:
        found = advantages(batch(world, table))
    # Added up first, these were 0.87 for 0.5, 0.86 for 0.1 and 0.80 for 0.001.
    assert found == pytest.approx([weight * ONE, weight * ONE, -weight * ONE, -weight * ONE], rel=0.1)


def test_weights_of_two_rules_stand_to_each_other_as_configured() -> None:
    world = group((0.0, 1.0, 0.3), (0.0, 1.0, -0.3), (0.0, -1.0, 0.3), (0.0, -1.0, -0.3))
    with judged({"a": 0.5, "b": -0.01}) as table:
        first, second, third, fourth = advantages(batch(world, table))
    assert (first - third) / (first - second) == pytest.approx(0.5 / -0.01, rel=0.05)
    assert first - second == pytest.approx(third - fourth)


def test_final_rewards_decide_where_they_differ() -> None:
    world = group((1.0, -1.0, 0.0), (0.0, 1.0, 0.0), (1.0, -1.0, 0.0), (0.0, 1.0, 0.0))
    with judged({"a": 0.1}) as table:
        found = advantages(batch(world, table))
    assert found == pytest.approx([0.9 * ONE, -0.9 * ONE, 0.9 * ONE, -0.9 * ONE], rel=0.01)


def test_without_a_division_values_are_added_up_as_before() -> None:
    world = group((1.0, 1.0, 0.0), (1.0, -1.0, 0.0))
    with judged({"a": 0.1}) as table:
        assert advantages(batch(world, table, "dr-grpo")) == pytest.approx([0.1, -0.1])
        assert advantages(batch(world, table, "rloo")) == pytest.approx([0.2, -0.2])


@pytest.mark.parametrize("algorithm", ["reinforce++", "reinforce++-baseline"])
def test_weight_holds_where_the_whole_batch_is_the_comparison(algorithm: str) -> None:
    world = group((1.0, 1.0, 0.0), (1.0, -1.0, 0.0), (1.0, 1.0, 0.0), (1.0, -1.0, 0.0))
    with judged({"a": 0.001}) as table:
        assert advantages(batch(world, table, algorithm)) == pytest.approx(
            [0.001 * x for x in (ONE, -ONE, ONE, -ONE)], rel=0.02
        )


def test_sums_that_round_make_no_contrast_of_equal_rewards() -> None:
    world = group((0.7, 0.3, 0.1), (0.7, 0.3, 0.1), (0.7, 0.3, 0.1))
    with judged({"a": 0.1, "b": 0.3}) as table:
        found = batch(world, table)
    assert advantages(found) == [0.0, 0.0, 0.0]
    assert found.flat_groups == found.tied_groups == {"g"}


def test_groups_that_only_a_rule_tells_apart_are_replaced_where_groups_are_sampled_anew() -> None:
    world = group((1.0, 1.0, 0.0), (1.0, -1.0, 0.0), name="dust")
    group((1.0, 1.0, 0.0), (0.0, 1.0, 0.0), name="alive", world=world)
    with judged({"a": 0.001}) as table:

        def judge(outcomes: Any) -> Batch:
            config = options_of(algorithm="dapo", rewards=table)
            return algorithm_by_name("dapo").batch(config, outcomes, world.traces)

        asked = []

        def roll(count: int, number: int) -> Any:
            asked.append(count)
            before = len(world.outcomes)
            group((0.0, 0.0, 0.0), (1.0, 0.0, 0.0), name="new", world=world)
            return world.outcomes[before:]

        whole = judge(world.outcomes)
        assert (whole.flat_groups, whole.tied_groups) == (set(), {"dust"})
        found, rolled = with_contrast(world.outcomes[:], 3, judge, roll)
    assert asked == [1]
    assert {row.group_id for row in found.rows} == {"alive", "new"}
    given = [reward.attempt_id for reward in found.automatic]  # also to what was replaced: it was rolled out
    assert sorted(given) == sorted(outcome.attempt.attempt_id for outcome in rolled)


def test_rules_alone_are_no_dust() -> None:
    """Where nobody else gives a reward, what a rule finds is what there is to learn."""
    world = group((0.0, 1.0, 0.0), (0.0, -1.0, 0.0))
    world.outcomes = [type(o)(rollout=o.rollout, attempt=o.attempt, attempts=o.attempts) for o in world.outcomes]
    with judged({"a": 0.2}) as table:
        found = batch(world, table)
    assert found.tied_groups == frozenset()
    assert advantages(found) == pytest.approx([0.2 / math.sqrt(2), -0.2 / math.sqrt(2)], rel=0.01)


@pytest.mark.parametrize("name", ["identical", "discounted", "last", "per-agent", "turn", "gigpo"])
def test_parts_add_up_to_the_credit(name: str) -> None:
    ids = {"rollout_id": "r", "attempt_id": "r.1"}
    calls = [
        Transition(turn=turn, span_id=f"s{turn}", agent=agent, **ids) for turn, agent in enumerate(["w", "v", "w", "v"])
    ]
    rewards = [
        Reward(value=1.0, **ids), Reward(value=0.25, agent="v", source="score", **ids),
        Reward(value=-0.1, source="latency", **ids), Reward(value=0.3, agent="w", span_id="s2", source="tool", **ids),
    ]  # fmt: skip
    credit = credit_by_name(name)
    parts = take_apart(credit, calls, rewards, {"latency", "tool", "absent"})
    assert parts.by_source.keys() == {"latency", "tool"}
    whole = [level.values for level in levels_of(credit(calls, rewards))]
    for number, values in enumerate(whole):
        total = np.sum([parts.rest[number], *(part[number] for part in parts.by_source.values())], axis=0)
        assert total == pytest.approx(values)
