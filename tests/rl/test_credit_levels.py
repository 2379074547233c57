"""Credit that is compared by place: the last call, the same turn, the same state; and what is conserved."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans.errors import ConfigError
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.transitions import Tokens, Transition
from lightning_trainer.rl.credit.assigners import credit_by_name, last, per_agent
from lightning_trainer.rl.credit.levels import gigpo, state_of, turn
from lightning_trainer.rl.credit.values import CreditedValues, Level, levels_of, lost_in

NAMES = ["identical", "discounted", "last", "per-agent", "turn", "gigpo"]


def call(number, agent="writer", *, choice=0, messages=None, prompt=None, tokens=None, rewards=()):
    return Transition(
        rollout_id="r",
        attempt_id="a",
        agent=agent,
        turn=number,
        choice=choice,
        span_id=f"s{number}",
        request={k: v for k, v in {"messages": messages, "prompt": prompt}.items() if v is not None},
        tokens=tokens,
        rewards=tuple(rewards),
    )


def reward(value, agent=None, span_id=None):
    return Reward(rollout_id="r", attempt_id="a", value=value, agent=agent, span_id=span_id)


TEAM = [call(0, "writer"), call(1, "rewriter"), call(2, "writer"), call(3, "checker")]

teams = st.lists(st.tuples(st.sampled_from(["x", "y", None]), st.integers(1, 3)), min_size=1, max_size=8)
values = st.floats(-9, 9)


def attempt(team):
    return [call(n, agent, choice=c) for n, (agent, choices) in enumerate(team) for c in range(choices)]


def once(transitions, credit):
    """Credit of each call, its choices counted once, calls that no reward concerns left out."""
    by_call = {t.turn: value for t, value in zip(transitions, credit, strict=True) if not math.isnan(value)}
    return sum(by_call.values())


@given(teams, st.lists(st.tuples(values, st.sampled_from(["x", "y", None]), st.none() | st.integers(0, 8)), max_size=6))
def test_last_conserves_credit(team, given_rewards):
    transitions = attempt(team)
    agents, calls = {t.agent for t in transitions}, {t.span_id for t in transitions}
    rewards = [reward(v, agent, None if at is None else f"s{at}") for v, agent, at in given_rewards]
    reached = [r.value for r in rewards if r.agent is None or r.agent in agents or r.span_id in calls]
    assert once(transitions, last(transitions, rewards)) == pytest.approx(sum(reached), abs=1e-9)


@given(teams, st.lists(st.tuples(values, st.sampled_from(["x", "y"])), max_size=6))
def test_per_agent_conserves_credit_over_agents(team, given_rewards):
    transitions = attempt(team)
    agents = {t.agent for t in transitions}
    rewards = [reward(v, agent) for v, agent in given_rewards]
    by_agent = {t.agent: v for t, v in zip(transitions, per_agent(transitions, rewards), strict=True)}
    got = sum(v for v in by_agent.values() if not math.isnan(v))
    assert got == pytest.approx(sum(r.value for r in rewards if r.agent in agents), abs=1e-9)


@given(teams, st.lists(values, min_size=1, max_size=3))
def test_without_a_discount_turn_and_identical_give_everybody_the_return(team, given_rewards):
    transitions, rewards = attempt(team), [reward(v) for v in given_rewards]
    for credit in (turn(transitions, rewards), gigpo(transitions, rewards), per_agent(transitions, rewards)):
        assert credit == pytest.approx([sum(given_rewards)] * len(transitions))


@given(st.sampled_from(NAMES), teams)
def test_a_call_that_no_reward_concerns_is_nan_and_never_0(name, team):
    transitions = attempt(team)
    assert all(math.isnan(v) for level in levels_of(credit_by_name(name)(transitions, [])) for v in level.values)
    some = credit_by_name(name)(transitions, [reward(1.0, "x")])
    assert [math.isnan(v) for v in some] == [t.agent != "x" for t in transitions]


@given(st.sampled_from(NAMES), teams, values)
def test_a_transition_more_or_less_in_order_changes_nothing(name, team, value):
    transitions, rewards = attempt(team), [reward(value), reward(0.5, "x")]
    credit = credit_by_name(name)
    assert list(credit(transitions[::-1], rewards)) == pytest.approx(list(credit(transitions, rewards))[::-1])


def test_last_gives_each_reward_to_one_call():
    rewards = [reward(1.0), reward(0.5, "writer"), reward(0.25, span_id="s0")]
    credit = last(TEAM, rewards)
    assert credit == [0.25, 0.0, 0.5, 1.0]
    assert levels_of(credit)[0].places == ["earlier", "last", "last", "end"]


def test_an_agent_with_rewards_of_its_own_is_judged_by_those_alone():
    rewards = [reward(1.0), reward(0.0, "checker"), reward(0.3, "writer")]
    assert per_agent(TEAM, rewards) == [0.3, 1.0, 0.3, 0.0]


def test_the_attempts_reward_reaches_nobody_where_all_agents_are_named_and_that_is_told():
    whole = reward(1.0)
    named = [reward(0.0, "checker"), reward(0.3, "writer"), reward(0.2, "rewriter")]
    credit = per_agent(TEAM, [whole, *named])
    assert credit == [0.3, 0.2, 0.3, 0.0]
    assert lost_in(credit) == (whole,)
    assert lost_in(per_agent(TEAM, [whole, *named[1:]])) == lost_in(per_agent([], [whole])) == lost_in([1.0]) == ()


def test_a_step_reward_is_no_verdict_on_its_agent():
    assert per_agent(TEAM, [reward(1.0), reward(-0.1, "writer", "s0")]) == pytest.approx([0.9, 1.0, 1.0, 1.0])


def test_turns_are_counted_for_each_agent_by_itself():
    credit = turn(TEAM, [reward(1.0)], gamma=0.5)
    assert credit == [0.125, 0.25, 0.5, 1.0]
    assert levels_of(credit)[0].places == ["0", "0", "1", "0"]
    choices = [call(0), call(4, choice=0), call(4, choice=1)]
    assert levels_of(turn(choices, [reward(1.0)]))[0].places == ["0", "1", "1"]


def test_gigpo_compares_attempts_and_states():
    episode, steps = levels_of(gigpo(TEAM, [reward(1.0)], gamma=0.5, omega=0.7))
    assert (episode.places, episode.weight, episode.by_step) == (None, 1.0, False)
    assert list(episode.values) == [1.0] * 4
    assert list(steps.values) == [0.125, 0.25, 0.5, 1.0]
    assert (steps.weight, steps.by_step, len(set(steps.places))) == (0.7, True, 4)  # nothing kept: states of their own


def test_gigpo_counts_step_rewards_in_the_return_of_the_whole_attempt():
    episode, steps = levels_of(gigpo(TEAM, [reward(1.0), reward(0.5, "writer", "s2"), reward(0.2, "writer", "s0")]))
    assert list(episode.values) == pytest.approx([1.7, 1.0, 1.7, 1.0])
    assert steps.values[3] == 1.0


def test_gigpo_gives_agents_of_the_same_name_their_own_rewards():
    paths = ["billing/extract", "shipping/extract"]
    calls = [replace(call(n, "extract"), agent_path=path) for n, path in enumerate(paths)]
    for own in ([reward(1.0, paths[0]), reward(-1.0, paths[1])], [reward(1.0, paths[0]), reward(-1.0, span_id="s1")]):
        credit = gigpo(calls, own)
        assert list(credit) == list(levels_of(credit)[1].values) == [1.0, -1.0]
    for level in levels_of(gigpo(calls, [reward(1.0, paths[0])])):
        assert level.values == pytest.approx([1.0, math.nan], nan_ok=True)


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def tool_call(name):
    return say("assistant", None, tool_calls=[{"id": name, "function": {"name": "look", "arguments": "{}"}}])


def test_a_state_is_what_came_since_the_last_answer():
    there = [say("user", "find it"), tool_call("x"), say("tool", "a door", tool_call_id="x")]
    by_a_detour = [*there[:2], say("tool", "a wall"), tool_call("y"), say("tool", "a door", tool_call_id="y")]
    elsewhere = [*there[:2], say("tool", "a wall")]
    assert state_of(call(1, messages=there)) == state_of(call(4, messages=by_a_detour))
    assert state_of(call(1, messages=there)) != state_of(call(1, messages=elsewhere))
    assert state_of(call(1, messages=there), "prompt") != state_of(call(1, messages=by_a_detour), "prompt")


def test_prompts_of_text_are_states():
    assert state_of(call(1, prompt="a door")) == state_of(call(2, prompt="a door"))
    assert state_of(call(1, prompt="a door")) != state_of(call(2, prompt="a wall"))
    assert state_of(call(1, prompt=[1, 2])) != state_of(call(2, prompt=[1, 3]))


def test_ids_of_tool_calls_are_no_part_of_a_state():
    one = [say("user", "go"), tool_call("x"), say("tool", "a door", tool_call_id="x")]
    other = [say("user", "go"), tool_call("y"), say("tool", "a door", tool_call_id="y")]
    assert state_of(call(1, messages=one), "prompt") == state_of(call(1, messages=other), "prompt")


def test_a_state_of_a_responses_request_is_its_newest_items():
    old = [say("user", "go"), {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "1"}]
    new = {"type": "function_call_output", "output": "a door"}
    one = replace(call(1), request={"input": [*old, {**new, "call_id": "1"}]})
    assert state_of(one) == state_of(replace(one, request={"input": [{**new, "call_id": "2"}]}))
    assert state_of(replace(one, request={"input": "hello"})) == state_of(call(0, messages=[say("user", "hello")]))


def test_without_a_request_the_prompts_tokens_are_the_state():
    tokens = Tokens((1, 2, 3), (4,), (-1.0,))
    one, other = call(0, tokens=tokens), call(5, tokens=replace(tokens, response=(9,)))
    assert state_of(one) == state_of(other)
    assert state_of(one) != state_of(call(0, tokens=replace(tokens, prompt=(1, 2))))
    assert state_of(call(0)) != state_of(call(1))


@pytest.mark.parametrize("request_body", [{"messages": "hello"}, {"messages": [1, None, "x"]}, {"input": {"a": 1}}])
def test_a_request_of_an_odd_shape_is_a_state_too(request_body):
    assert state_of(replace(call(0), request=request_body))


def test_an_option_out_of_range_is_an_error():
    for options in ({"omega": -1.0}, {"omega": math.nan}, {"anchor": "screen"}, {"gamma": 2.0}):
        with pytest.raises(ConfigError):
            gigpo(TEAM, [reward(1.0)], **options)
    with pytest.raises(ConfigError, match="It has: gamma, omega, anchor"):
        credit_by_name("gigpo", lam=1.0)


def test_a_plain_list_is_compared_over_all_calls():
    assert levels_of([1.0, 2.0]) == (Level(values=[1.0, 2.0]),)
    assert CreditedValues([1.0, 2.0]) == [1.0, 2.0]
