from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_spans import hooks
from lightning_spans.adapter.trace import Trace
from lightning_spans.errors import ConfigError, UnknownAgentError
from lightning_spans.hooks import hookimpl
from lightning_spans.schema.rewards import Reward
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.batch.sharing import calls_of
from lightning_trainer.rl.credit.played import AcrossAttempts
from lightning_trainer.rl.credit.values import CreditedValues
from lightning_trainer.rl.rows import Row
from support.rl.world import World, options_of


def advantages(batch: Batch) -> dict[str, float]:
    """One advantage for each row, by attempt and agent."""
    found = {}
    for row in batch.rows:
        values = set(row.advantages[row.mask])
        assert len(values) == 1
        found[f"{row.attempt_id} {row.agent}"] = values.pop()
    return found


def test_rewards_become_normalised_advantages_within_each_group() -> None:
    world = World()
    for group, value in (("a", 1.0), ("a", 0.0), ("b", 5.0), ("b", 3.0)):
        world.rollout(group, [("writer", "text")], {None: value})
    half = 0.5 / (math.sqrt(0.5) + 1e-4)
    one = 1.0 / (math.sqrt(2) + 1e-4)
    assert advantages(world.batch()) == pytest.approx(
        {"r0.1 writer": half, "r1.1 writer": -half, "r2.1 writer": one, "r3.1 writer": -one}
    )
    assert advantages(world.batch(normalise_std=False)) == pytest.approx(
        {"r0.1 writer": 0.5, "r1.1 writer": -0.5, "r2.1 writer": 1.0, "r3.1 writer": -1.0}
    )


def test_groups_are_compared_before_calls_without_tokens_are_dropped() -> None:
    world = World()
    world.rollout("a", [("writer", "text")], {None: 1.0})
    world.rollout("a", [("writer", "")], {None: 0.0})  # its tokens were lost
    world.rollout("a", [("writer", "text")], {None: 0.5})
    batch = world.batch(normalise_std=False)
    assert advantages(batch) == pytest.approx({"r0.1 writer": 0.5, "r2.1 writer": 0.0})
    assert batch.account.dropped == {"no tokens recorded": 1}


def test_a_call_that_was_answered_from_a_record_is_never_trained_on_whatever_credit_says() -> None:
    world = World()
    world.rollout("a", [("writer", "draft"), ("judge", "good")], {None: 1.0})
    world.rollout("a", [("writer", "draft"), ("judge", "bad")], {None: 0.0}, replays=("r0.1", 1))
    found = calls_of(
        world.outcomes,
        world.traces,
        credit=AcrossAttempts(
            lambda attempts: [CreditedValues([its.earned] * len(its.transitions)) for its in attempts]
        ),
        failed="exclude",
        agents=None,
        weights={},
        apart=False,
    )
    kept = [(call.transition.attempt_id, call.transition.agent) for call in found.compared]
    assert kept == [("r0.1", "writer"), ("r0.1", "judge"), ("r1.1", "judge")]
    assert found.account.dropped == {"answered from a record": 1}


def test_selection_keeps_the_named_agents_and_the_rewards_of_the_whole_attempt() -> None:
    world = World()
    for value in (1.0, 0.0):
        world.rollout("a", [("writer", "w"), ("rewriter", "rw"), (None, "x")], {None: value})
    batch = world.batch(agents=("writer",), normalise_std=False)
    assert advantages(batch) == pytest.approx({"r0.1 writer": 0.5, "r1.1 writer": -0.5})
    assert batch.account.dropped == {"agent not selected": 4}
    assert batch.agents == {"writer": 2, "rewriter": 2, None: 2}


@pytest.mark.parametrize(
    ("said", "agents", "unjoined"),
    [
        pytest.param("answerer", ("writer",), 0, id="left out: its own endpoint answered, as is meant"),
        pytest.param("answerer", ("writer", "answerer"), 2, id="trained, and the gateway saw nothing of it"),
        pytest.param(None, ("writer",), 2, id="nobody knows whose it was"),
    ],
)
def test_calls_at_their_own_endpoint_are_missed_of_trained_agents_only(said, agents, unjoined) -> None:
    world = World()
    for value in (1.0, 0.0):
        world.rollout("a", [("writer", "w"), (said, "")], {None: value})
    account = world.batch(agents=agents).account
    assert sum(account.unjoined.values()) == unjoined
    assert account.seen == 4


def test_without_a_selection_all_named_agents_are_trained() -> None:
    world = World()
    for value in (1.0, 0.0):
        world.rollout("a", [("writer", "w"), ("rewriter", "rw"), (None, "x")], {None: value})
    assert {row.agent for row in world.batch().rows} == {"writer", "rewriter"}


def test_rewards_by_agent_reach_their_agents_alone() -> None:
    world = World()
    world.rollout("a", [("caller", "c"), ("answerer", "a")], {"caller": 1.0, "answerer": 0.0})
    world.rollout("a", [("caller", "c"), ("answerer", "a")], {"caller": 0.0, "answerer": 0.0})
    assert advantages(world.batch(normalise_std=False)) == pytest.approx(
        {"r0.1 caller": 0.5, "r1.1 caller": -0.5, "r0.1 answerer": 0.0, "r1.1 answerer": 0.0}
    )


def test_agent_is_compared_over_the_attempts_in_which_it_spoke() -> None:
    world = World()
    world.rollout("a", [("caller", "c"), ("answerer", "a")], {None: 1.0})
    world.rollout("a", [("caller", "c"), ("answerer", "a")], {None: 0.0})
    world.rollout("a", [("caller", "c")], {None: -1.0})
    found = advantages(world.batch(normalise_std=False))
    assert (found["r0.1 answerer"], found["r1.1 answerer"]) == (0.5, -0.5)
    assert (found["r0.1 caller"], found["r1.1 caller"], found["r2.1 caller"]) == (1.0, 0.0, -1.0)


def test_agent_that_no_reward_concerns_is_not_trained_as_zero() -> None:
    world = World()
    for value in (1.0, 0.0):
        world.rollout("a", [("caller", "c"), ("answerer", "a")], {"caller": value})
    batch = world.batch()
    assert {row.agent for row in batch.rows} == {"caller"}
    assert batch.account.dropped == {"no reward for this agent": 2}


def test_rewards_for_an_agent_that_made_no_call_are_counted() -> None:
    world = World()
    for value in (1.0, 0.0):
        world.rollout("a", [("writer", "text")], {"writer": value, "writter": value})
    batch = world.batch()
    assert len(batch.rows) == 2
    assert batch.account.unclaimed == {"writter": 2}


def test_failed_rollouts_are_excluded_and_counted() -> None:
    world = World()
    world.rollout("a", [("writer", "w")], {None: 1.0})
    world.rollout("a", [("writer", "w")], {None: 0.0})
    world.rollout("a", [("writer", "w"), ("writer", "w")], None)
    batch = world.batch(normalise_std=False)
    assert advantages(batch) == pytest.approx({"r0.1 writer": 0.5, "r1.1 writer": -0.5})
    assert batch.account.dropped == {"attempt failed": 2}


def test_failed_rollouts_are_scored_where_asked() -> None:
    world = World()
    world.rollout("a", [("writer", "w")], {None: 1.0})
    world.rollout("a", [("writer", "w")], None)
    assert advantages(world.batch(failed=-1.0, normalise_std=False)) == pytest.approx(
        {"r0.1 writer": 1.0, "r1.1 writer": -1.0}
    )


@pytest.mark.parametrize("credit", ["identical", "per-agent"])
def test_a_crash_is_no_better_than_the_worst_that_its_agent_was_given(credit: str) -> None:
    world = World()
    for _ in range(3):
        world.rollout("a", [("writer", "bad"), ("checker", "good")], {"writer": -1.0, "checker": 1.0})
    world.rollout("a", [("writer", "crashes")], None)
    found = advantages(world.batch(failed="lowest", credit=credit))
    assert found["r3.1 writer"] <= found["r0.1 writer"]


def test_failed_first_try_is_left_out_and_the_second_counts() -> None:
    world = World()
    world.rollout("a", [("writer", "w")], {None: 1.0}, failed_before=[("writer", "w")])
    world.rollout("a", [("writer", "w")], {None: 0.0})
    batch = world.batch(normalise_std=False)
    assert advantages(batch) == pytest.approx({"r0.2 writer": 0.5, "r1.1 writer": -0.5})
    assert batch.account.dropped == {"attempt failed": 1}


def test_group_with_one_attempt_left_is_incomplete() -> None:
    world = World()
    world.rollout("a", [("writer", "w")], {None: 1.0})
    world.rollout("a", [("writer", "w")], None)
    batch = world.batch()
    assert batch.rows == []
    assert batch.account.dropped == {"attempt failed": 1, "group incomplete": 1}


def test_account_adds_up_over_everything_seen() -> None:
    world = World()
    world.rollout("a", [("writer", "w"), ("rewriter", "rw"), (None, "x")], {None: 1.0}, failed_before=[("writer", "w")])
    world.rollout("a", [("writer", ""), ("rewriter", "rw")], {None: 0.0})
    world.rollout("a", [("writer", "w")], None)
    account = world.batch(agents=("writer",)).account
    assert (account.seen, account.trained) == (7, 1)
    assert sum(account.dropped.values()) == 6


def test_misspelt_agent_is_refused_with_the_names_that_were_seen() -> None:
    world = World()
    world.rollout("a", [("writer", "w"), ("rewriter", "rw")], {None: 1.0})
    with pytest.raises(UnknownAgentError, match=r"'wirter' was never seen, but 'writer' was.*seen: rewriter, writer"):
        world.batch(agents=("wirter",))
    assert world.batch(agents=("wirter",), known_agents=["wirter"]).rows == []


def test_prefix_of_a_name_is_another_name() -> None:
    world = World()
    world.rollout("a", [("rewriter", "rw")], {None: 1.0})
    assert world.batch(agents=("writer",)).account.dropped == {"agent not selected": 1}


def test_agent_that_does_not_speak_in_a_batch_stops_nobody() -> None:
    world = World()
    for value in (0.0, 1.0):
        world.rollout("a", [("writer", "w")], {None: value})
    assert len(world.batch(agents=("writer", "editor")).rows) == 2


def test_equal_prompts_and_repeated_calls_are_all_kept() -> None:
    world = World()
    for value in (0.0, 1.0):
        world.rollout("a", [("voter", "yes")] * 4, {None: value})
    account = world.batch().account
    assert (account.seen, account.trained) == (8, 8)


class Automatic:
    @hookimpl
    def lightning_rewards(self, trace: Trace, transitions: Sequence[Any]) -> list[Reward]:
        first = transitions[0]
        value = float(first.rollout_id == "r0")
        return [Reward(rollout_id=first.rollout_id, attempt_id=first.attempt_id, value=value, source="air")]


class Broken:
    @hookimpl
    def lightning_rewards(self, trace: Trace, transitions: Sequence[Any]) -> list[Reward]:
        raise RuntimeError("this rule is broken")


@pytest.fixture
def rules() -> Iterator[None]:
    hooks.register(Automatic(), "automatic")
    hooks.register(Broken(), "broken")
    yield
    hooks.unregister("automatic")
    hooks.unregister("broken")


@pytest.mark.usefixtures("rules")
def test_automatic_rewards_are_added_and_a_broken_rule_starves_no_other() -> None:
    world = World()
    world.rollout("a", [("writer", "w")], {None: 0.0})
    world.rollout("a", [("writer", "w")], {None: 0.0})
    assert advantages(world.batch(normalise_std=False)) == pytest.approx({"r0.1 writer": 0.5, "r1.1 writer": -0.5})


def test_discounted_credit_reaches_the_rows() -> None:
    world = World()
    for value in (1.0, 0.0):
        world.rollout("a", [("writer", "one"), ("writer", "two")], {None: value})
    batch = world.batch(credit="discounted", gamma=0.5, normalise_std=False)
    first = [row.advantages[row.mask][0] for row in batch.rows if row.attempt_id == "r0.1"]
    assert first == pytest.approx([0.5 - 0.375, 1.0 - 0.375])


def test_returns_stay_in_double_precision() -> None:
    world = World()
    tiny = 1e-9
    world.rollout("a", [("writer", "w")], {None: 1000.0})
    world.rollout("a", [("writer", "w")], {None: 1000.0 + tiny})
    found = advantages(world.batch(normalise_std=False))
    assert found["r1.1 writer"] == pytest.approx(tiny / 2, rel=1e-3)
    assert all(row.advantages.dtype == np.float64 for row in world.batch().rows)


def test_algorithm_is_chosen_by_name_and_unknown_names_and_options_are_errors() -> None:
    config = options_of()
    world = World()
    for value in (1.0, 0.0):
        world.rollout("a", [("writer", "w")], {None: value})
    algorithm = algorithm_by_name(config.algorithm)
    assert len(algorithm.batch(config, world.outcomes, world.traces).rows) == 2
    with pytest.raises(ConfigError, match="unknown algorithm 'a2c'"):
        options_of(algorithm="a2c")
    with pytest.raises(ConfigError, match="unknown credit 'magic'"):
        world.batch(credit="magic")


def test_episode_without_calls_changes_nothing() -> None:
    world = World()
    for value in (1.0, 0.0):
        world.rollout("a", [("writer", "w")], {None: value})
    before = advantages(world.batch())
    world.outcomes.append(
        replace(
            world.outcomes[0],
            rollout=replace(world.outcomes[0].rollout, rollout_id="r9"),
            attempt=None,
            attempts=(),
            rewards=(),
        )
    )
    assert advantages(world.batch()) == before


def credited(world: World, name: str, **settings: Any) -> dict[tuple[str, int], float]:
    """Advantage of each call, by rollout and turn."""
    options = settings.pop("options", {})
    batch = world.batch(credit=name, credit_options=options, normalise_std=False, **settings)
    return {(call.transition.rollout_id, call.transition.turn): call.advantage for call in batch.calls}


def test_turn_credit_compares_calls_at_the_same_turn() -> None:
    world = World()
    world.rollout("a", [("writer", "one"), ("writer", "two")], {None: 1.0})
    world.rollout("a", [("writer", "one")], {None: 0.0})
    world.rollout("a", [("writer", "one"), ("writer", "two")], {None: 0.5})
    found = credited(world, "turn")
    assert [found[r, 0] for r in ("r0", "r1", "r2")] == pytest.approx([0.5, -0.5, 0.0])
    assert [found[r, 1] for r in ("r0", "r2")] == pytest.approx([0.25, -0.25])


def test_last_credit_does_not_blame_earlier_calls_for_being_early() -> None:
    world = World()
    for value in (1.0, 1.0, 0.0):
        world.rollout("a", [("writer", "one"), ("writer", "two")], {None: value})
    found = credited(world, "last")
    assert [found[r, 0] for r in ("r0", "r1", "r2")] == [0.0, 0.0, 0.0]
    assert [found[r, 1] for r in ("r0", "r1", "r2")] == pytest.approx([1 / 3, 1 / 3, -2 / 3])


def test_gigpo_adds_what_an_action_was_worth_in_its_state() -> None:
    world = World()  # the prompt (turn, 7) is the state: both first calls of a group meet in it
    world.rollout("a", [("writer", "one"), ("writer", "two")], {None: 1.0})
    world.rollout("a", [("writer", "one")], {None: 0.0})
    found = credited(world, "gigpo", options={"gamma": 0.5, "omega": 2.0})
    assert found["r0", 0] == pytest.approx(0.5 + 2.0 * 0.25)  # returns to go 0.5 and 0
    assert found["r1", 0] == pytest.approx(-0.5 - 2.0 * 0.25)
    assert found["r0", 1] == pytest.approx(0.5)  # a state met once
    assert credited(world, "gigpo", options={"omega": 0.0})["r0", 1] == pytest.approx(0.5)


def test_an_agent_judged_by_itself_is_compared_with_itself() -> None:
    world = World()
    world.rollout("a", [("worker", "w"), ("rider", "r")], {None: 1.0, "rider": 0.0})
    world.rollout("a", [("worker", "w"), ("rider", "r")], {None: 0.0, "rider": 0.0})
    found = credited(world, "per-agent")
    assert [found["r0", 0], found["r1", 0]] == [0.5, -0.5]
    assert [found["r0", 1], found["r1", 1]] == [0.0, 0.0]


def test_each_algorithm_compares_as_its_paper_says() -> None:
    world = World()
    for value in (1.0, 0.0, 0.0):
        world.rollout("a", [("writer", "w")], {None: value})
    for value in (5.0, 3.0):
        world.rollout("b", [("writer", "w")], {None: value})

    def found(name: str) -> list[float]:
        batch = world.batch(algorithm=name, failed="exclude")
        return [call.advantage for call in batch.calls]

    assert found("dr-grpo") == pytest.approx([2 / 3, -1 / 3, -1 / 3, 1.0, -1.0])
    assert found("rloo") == pytest.approx([1.0, -0.5, -0.5, 2.0, -2.0])
    assert found("ppo") == [1.0, 0.0, 0.0, 5.0, 3.0]
    for name in ("grpo", "dapo", "gspo", "cispo"):
        assert found(name) == pytest.approx([1.1545, -0.5773, -0.5773, 0.7071, -0.7071], abs=2e-3)
    for name in ("reinforce++", "reinforce++-baseline"):
        assert np.mean(found(name)) == pytest.approx(0.0, abs=1e-9)
        assert np.std(found(name), ddof=1) == pytest.approx(1.0)
    assert found("reinforce++")[0] < 0 < found("reinforce++-baseline")[0]  # 1 is little in the batch, much in its group


def test_whitening_counts_each_attempt_once() -> None:
    world = World()
    world.rollout("a", [("writer", "w")] * 9, {None: 0.0})
    world.rollout("a", [("writer", "w")], {None: 1.0})
    world.rollout("b", [("writer", "w")], {None: 2.0})
    batch = world.batch(algorithm="reinforce++")
    by_attempt = {call.transition.attempt_id: call.advantage for call in batch.calls}
    assert list(by_attempt.values()) == pytest.approx([-1.0, 0.0, 1.0])


def test_a_rollout_alone_in_its_group_is_left_out_unless_the_batch_is_the_baseline() -> None:
    world = World()
    world.rollout("a", [("writer", "w")], {None: 1.0})
    world.rollout("a", [("writer", "w")], None)
    world.rollout("b", [("writer", "w")], {None: 0.0})
    for name, kept in (("grpo", 0), ("rloo", 0), ("reinforce++-baseline", 0), ("reinforce++", 2), ("ppo", 2)):
        batch = world.batch(algorithm=name, failed="exclude")
        assert (name, len(batch.rows)) == (name, kept)


def test_groups_without_contrast_are_named() -> None:
    world = World()
    for group, value in (("a", 1.0), ("a", 0.0), ("b", 1.0), ("b", 1.0), ("c", 0.0), ("c", 0.0)):
        world.rollout(group, [("writer", "w")], {None: value})
    assert world.batch().flat_groups == {"b", "c"}
    assert {row.has_gradient for row in world.batch().rows if row.group_id != "a"} == {False}


def test_groups_with_equal_rewards_have_a_signal_if_groups_are_not_compared() -> None:
    world, solved = World(), World()
    for group, value in (("a", 1.0), ("a", 0.0), ("b", 1.0), ("b", 1.0), ("c", 0.0), ("c", 0.0)):
        world.rollout(group, [("writer", "w")], {None: value})
        solved.rollout(group, [("writer", "w")], {None: 1.0})
    for name in ("reinforce++", "ppo", "rae"):
        batch = world.batch(algorithm=name)
        assert (name, batch.flat_groups, batch.account.rows_without_gradient) == (name, set(), 0)
        assert not any("teach nothing" in line for line in batch.account.lines())
    assert solved.batch(algorithm="reinforce++").flat_groups == {"a", "b", "c"}  # the whole batch is equal
    assert solved.batch(algorithm="reinforce++").account.rows_without_gradient == 6
    assert solved.batch(algorithm="reinforce++", whole=False).flat_groups == set()  # one group of a batch, with verl
    assert solved.batch(algorithm="ppo").flat_groups == solved.batch(algorithm="rae").flat_groups == set()


def test_equal_rewards_that_were_added_up_in_another_order_are_equal() -> None:
    world = World()
    for order in ((0.1, 0.2, 0.3), (0.3, 0.2, 0.1), (0.2, 0.3, 0.1), (0.1, 0.3, 0.2)):
        world.rollout("a", [("writer", "w")], {None: order[0] + order[1] + order[2]})
    assert len({reward.value for outcome in world.outcomes for reward in outcome.rewards}) == 2
    batch = world.batch()
    assert batch.flat_groups == batch.tied_groups == {"a"}
    assert not any(row.has_gradient for row in batch.rows)


@pytest.mark.parametrize("algorithm", ["dapo", "reinforce++-baseline"])
def test_a_group_that_penalties_alone_tell_apart_is_tied(algorithm: str) -> None:
    world = World()
    for group, value in (("a", 1.0), ("a", 1.0), ("b", 1.0), ("b", 0.0)):
        world.rollout(group, [("writer", "w")], {None: value})

    def penalty(rows: Sequence[Row]) -> list[Any]:
        return [np.full(int(row.mask.sum()), 0.001 * number) for number, row in enumerate(rows)]

    batch = world.batch(algorithm=algorithm, kl_coef=0.001, kl_in="reward", penalty=penalty)
    assert (batch.flat_groups, batch.tied_groups) == (set(), {"a"})


def test_penalties_are_taken_off_before_the_group_is_compared() -> None:
    world = World()
    for answer in ("long answer", "w"):
        world.rollout("a", [("writer", answer), ("writer", "x")], {None: 1.0})

    def penalty(rows: Sequence[Row]) -> list[Any]:
        return [np.full(int(row.mask.sum()), 0.1) for row in rows]

    batch = world.batch(algorithm="reinforce++-baseline", whole=False, penalty=penalty)
    found = {(call.transition.rollout_id, call.transition.turn): call.advantage for call in batch.calls}
    # Credits less 0.1 a token: 1 - 1.1 and 1 - 0.1 against 1 - 0.1 and 1 - 0.1; the baseline is 0.65.
    assert found["r0", 0] == pytest.approx(-0.1 - 0.65)
    assert [found["r0", 1], found["r1", 0], found["r1", 1]] == pytest.approx([0.25] * 3)


def test_last_credit_finds_no_difference_in_equal_returns_whoever_speaks_last() -> None:
    world = World()
    for agents in (("a", "b"), ("b", "a"), ("a", "b"), ("b", "a")):
        world.rollout("g", [(agent, f"{agent} said") for agent in agents], {None: 1.0})
    assert set(advantages(world.batch(credit="last")).values()) == {0.0}


@pytest.mark.parametrize("algorithm", ["grpo", "rloo", "reinforce++-baseline"])
def test_an_agent_alone_in_its_group_learns_from_the_batch_where_asked(algorithm: str) -> None:
    world = World()
    for group, reward in (("g0", 1.0), ("g1", 0.0)):  # the checker speaks once in each group
        world.rollout(group, [("writer", "a"), ("checker", "b")], {None: reward})
        world.rollout(group, [("writer", "c")], {None: reward})
    skipped = _advantages(world, "checker", algorithm=algorithm)
    compared = _advantages(world, "checker", algorithm=algorithm, alone="batch")
    assert skipped == [0.0, 0.0]
    assert compared[0] > 0.0 > compared[1]
    # Whoever is not alone is compared with the group, as ever.
    assert _advantages(world, "writer", algorithm=algorithm, alone="batch") == [0.0] * 4


def test_a_rollout_left_alone_in_its_group_is_compared_with_the_batch_where_asked() -> None:
    world = World()
    for group, reward in (("g0", 1.0), ("g1", 0.0)):
        world.rollout(group, [("writer", "a")], {None: reward})
    assert _advantages(world, "writer") == []
    first, second = _advantages(world, "writer", alone="batch")
    assert first > 0.0 > second


def _advantages(world: World, agent: str, **options: Any) -> list[float]:
    batch = world.batch(**options)
    return [call.advantage for call in batch.calls if call.transition.agent == agent and call.left_out is None]
