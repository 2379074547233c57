"""Credit: who gets which reward, and that silence is never a 0."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans import hooks
from lightning_spans.errors import ConfigError
from lightning_spans.hooks import hookimpl
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.transitions import Transition, select
from lightning_trainer.rl.advantages import transition_advantages
from lightning_trainer.rl.credit.assigners import (
    credit_by_name,
    discounted,
    identical,
    last,
    per_agent,
    unclaimed_rewards,
)
from lightning_trainer.rl.credit.values import levels_of, lost_in


def call(turn, agent="writer", *, choice=0, rewards=()):
    return Transition(
        rollout_id="r",
        attempt_id="a",
        agent=agent,
        turn=turn,
        choice=choice,
        span_id=f"s{turn}",
        rewards=tuple(rewards),
    )


def reward(value, agent=None, span_id=None):
    return Reward(rollout_id="r", attempt_id="a", value=value, agent=agent, span_id=span_id)


TWO_AGENTS = [call(0, "writer"), call(1, "rewriter"), call(2, "writer")]


def test_the_attempts_reward_goes_to_every_call():
    assert identical(TWO_AGENTS, [reward(0.7)]) == [0.7, 0.7, 0.7]


def test_an_agents_reward_goes_to_its_own_calls_only():
    assert identical(TWO_AGENTS, [reward(1.0, "writer"), reward(0.25, "rewriter")]) == [1.0, 0.25, 1.0]


def test_several_rewards_add_up():
    assert identical(TWO_AGENTS, [reward(1.0), reward(0.5), reward(0.25, "writer")]) == [1.75, 1.5, 1.75]


def test_a_reward_of_one_call_goes_to_that_call():
    assert identical(TWO_AGENTS, [reward(1.0), reward(-0.5, span_id="s1")]) == [1.0, 0.5, 1.0]
    assert identical([call(0, rewards=[reward(0.5)]), call(1)], [reward(1.0)]) == [1.5, 1.0]


def test_a_reward_that_is_given_twice_over_counts_once():
    own = reward(0.5, span_id="s0")
    assert identical([call(0, rewards=[own])], [own, reward(1.0)]) == [1.5]


def test_a_reward_of_a_span_that_is_no_call_goes_to_its_agent_or_to_all():
    assert identical(TWO_AGENTS, [reward(1.0, "writer", span_id="tool"), reward(0.0, "rewriter")]) == [1.0, 0.0, 1.0]
    assert identical(TWO_AGENTS, [reward(1.0, span_id="tool")]) == [1.0, 1.0, 1.0]


def test_the_final_reward_is_kept_with_step_rewards_and_a_selection():
    transitions = [call(0, "writer"), call(1, "rewriter", rewards=[reward(-0.5)]), call(2, "writer")]
    values = identical(transitions, [reward(1.0)])
    chosen = {id(transition) for transition in select(transitions, ["writer"])}
    assert [v for t, v in zip(transitions, values, strict=True) if id(t) in chosen] == [1.0, 1.0]


@pytest.mark.parametrize("assign", [identical, discounted])
def test_a_call_that_no_reward_concerns_is_nan_and_never_0(assign):
    assert all(math.isnan(value) for value in assign(TWO_AGENTS, []))
    values = assign(TWO_AGENTS, [reward(1.0, "writer")])
    assert [math.isnan(value) for value in values] == [False, True, False]


def test_an_agent_with_a_step_reward_has_0_for_its_other_steps():
    assert identical([call(0), call(1, rewards=[reward(0.5)])], []) == [0.0, 0.5]


def test_a_reward_for_an_agent_that_made_no_call_is_told():
    lost = reward(1.0, "reviewer")
    assert unclaimed_rewards(TWO_AGENTS, [reward(1.0), lost, reward(1.0, "writer")]) == [lost]
    assert unclaimed_rewards([], [lost]) == [lost]
    assert unclaimed_rewards(TWO_AGENTS, [reward(1.0, "reviewer", span_id="s1")]) == []  # the call itself has it


def test_later_calls_are_worth_more_when_discounted():
    assert discounted(TWO_AGENTS, [reward(1.0)], gamma=0.5) == [0.25, 0.5, 1.0]


def test_an_agents_reward_comes_at_its_last_turn():
    assert discounted(TWO_AGENTS, [reward(1.0, "rewriter"), reward(0.0)], gamma=0.5) == [0.0, 1.0, 0.0]


def test_a_calls_own_reward_counts_for_its_agents_earlier_calls():
    transitions = [call(0), call(1, "rewriter"), call(2, rewards=[reward(1.0)]), call(3)]
    assert discounted(transitions, [reward(0.0)], gamma=0.5) == [0.25, 0.0, 1.0, 0.0]


def test_a_reward_of_a_call_with_several_choices_comes_once():
    transitions = [call(0), call(1, choice=0), call(1, choice=1)]
    assert discounted(transitions, [reward(1.0, span_id="s1")], gamma=0.5) == [0.5, 1.0, 1.0]


def test_discounting_takes_turns_in_any_order():
    assert discounted(TWO_AGENTS[::-1], [reward(1.0)], gamma=0.5) == [1.0, 0.5, 0.25]


def test_gamma_0_rewards_the_last_call_alone():
    assert discounted(TWO_AGENTS, [reward(1.0)], gamma=0.0) == [0.0, 0.0, 1.0]


@given(
    st.lists(st.sampled_from(["x", "y", None]), min_size=1, max_size=8),
    st.lists(st.tuples(st.floats(-9, 9), st.sampled_from(["x", "y", None])), max_size=5),
)
def test_without_discount_and_step_rewards_both_are_the_same(agents, given_rewards):
    transitions = [call(turn, agent) for turn, agent in enumerate(agents)]
    rewards = [reward(value, agent) for value, agent in given_rewards]
    assert discounted(transitions, rewards, gamma=1.0) == pytest.approx(identical(transitions, rewards), nan_ok=True)


@given(st.lists(st.tuples(st.sampled_from("xy"), st.floats(-9, 9)), min_size=1, max_size=8), st.floats(0, 1))
def test_discounted_step_rewards_are_the_returns_of_the_textbook(steps, gamma):
    transitions = [call(turn, agent, rewards=[reward(value)]) for turn, (agent, value) in enumerate(steps)]
    expected = [
        sum(gamma ** (k - t) * value for k, (other, value) in enumerate(steps) if k >= t and other == agent)
        for t, (agent, _) in enumerate(steps)
    ]
    assert discounted(transitions, [], gamma=gamma) == pytest.approx(expected)


@pytest.mark.parametrize("gamma", [-0.1, 1.1, math.nan])
def test_a_discount_out_of_range_is_an_error(gamma):
    with pytest.raises(ConfigError, match="from 0 to 1"):
        discounted(TWO_AGENTS, [], gamma=gamma)


def test_credit_is_found_by_name_with_its_options():
    assert credit_by_name("identical")(TWO_AGENTS, [reward(1.0)]) == [1.0, 1.0, 1.0]
    assert credit_by_name("discounted", gamma=0.5)(TWO_AGENTS, [reward(1.0)]) == [0.25, 0.5, 1.0]


def test_an_unknown_credit_or_option_lists_what_there_is():
    with pytest.raises(ConfigError, match="discounted, gigpo, identical, last, per-agent, turn"):
        credit_by_name("discount")
    with pytest.raises(ConfigError, match="It has: gamma"):
        credit_by_name("discounted", lam=0.5)
    with pytest.raises(ConfigError, match="It has: none"):
        credit_by_name("identical", gamma=0.5)


def test_a_plugin_registers_its_own_credit():
    class Plugin:
        @hookimpl
        def lightning_register_credit(self, register):
            register("final", lambda transitions, rewards: [0.0] * (len(transitions) - 1) + [rewards[0].value])

    hooks.register(Plugin(), "test-credit")
    try:
        assert credit_by_name("final")(TWO_AGENTS, [reward(1.0)]) == [0.0, 0.0, 1.0]
    finally:
        hooks.unregister("test-credit")


def ended(turn, agent="writer", *, at):
    return replace(call(turn, agent), ended_ns=at)


def given_at(value, ns, agent=None):
    return replace(reward(value, agent), given_ns=ns)


THREE_CALLS = [ended(0, at=10), ended(1, "rewriter", at=20), ended(2, at=30)]


def test_a_reward_on_the_way_goes_to_the_calls_that_had_ended():
    rewards = [given_at(1.0, 15), reward(0.5)]
    assert identical(THREE_CALLS, rewards) == [1.5, 0.5, 0.5]
    assert per_agent(THREE_CALLS, rewards) == [1.5, 0.5, 0.5]
    assert last(THREE_CALLS, rewards) == [1.0, 0.0, 0.5]
    assert discounted(THREE_CALLS, rewards, gamma=0.5) == [1.0 + 0.5 * 0.25, 0.25, 0.5]


def test_an_agents_reward_on_the_way_goes_to_its_own_calls_before():
    assert identical(THREE_CALLS, [given_at(1.0, 25, "writer"), reward(0.0)]) == [1.0, 0.0, 0.0]


def test_a_call_that_was_under_way_when_a_reward_was_given_did_not_earn_it():
    together = [ended(0, at=30), ended(1, at=10)]  # the second to start was the first to end
    assert identical(together, [given_at(1.0, 20)]) == [0.0, 1.0]


def test_a_reward_before_any_call_reaches_nobody_and_is_counted():
    early = given_at(1.0, 5)
    values = identical(THREE_CALLS, [early, reward(0.5)])
    assert values == [0.5, 0.5, 0.5]
    assert lost_in(values) == (early,)


def test_a_reward_at_the_end_is_as_one_with_no_time():
    values = identical(THREE_CALLS, [given_at(1.0, 30)])
    assert values == [1.0, 1.0, 1.0]
    assert levels_of(values)[0].places is None


@pytest.mark.parametrize("name", ["identical", "discounted", "last", "per-agent", "turn"])
def test_equal_attempts_with_a_reward_on_the_way_have_no_advantages(name):
    """Compared with the calls before it, those after a reward would seem worse, though all attempts are equal."""
    level = levels_of(credit_by_name(name)(THREE_CALLS[::2], [given_at(1.0, 15), reward(1.0)]))[0]
    advantages = transition_advantages(
        [*level.values] * 4, [n // 2 for n in range(8)], [0] * 8, agent_M=level.places * 4
    )
    assert list(advantages) == [0.0] * 8


def test_what_earned_a_reward_on_the_way_is_better_than_what_did_not():
    with_it = levels_of(identical(THREE_CALLS[::2], [given_at(1.0, 15), reward(0.0)]))[0]
    without = levels_of(identical(THREE_CALLS[::2], [reward(0.0)]))[0]
    places = [*with_it.places, *(without.places or ["", ""])]
    advantages = transition_advantages([*with_it.values, *without.values], [0, 0, 1, 1], [0] * 4, agent_M=places)
    assert advantages[0] > 0.0
    assert advantages[1] == 0.0
    assert (advantages[2:] < 0.0).all()
