"""Automatic rewards: what each rule finds, to whom it goes, and that differences of a potential move no optimum."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans import hooks
from lightning_spans.adapter.adapt import adapt
from lightning_spans.adapter.trace import Trace
from lightning_spans.errors import ConfigError
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.spans import (
    AGENT_PATH,
    CHAT,
    FRAMEWORK,
    OUTPUT_TOKENS,
    REQUEST,
    RESPONSE,
    RESPONSE_ID,
    TOOL_RESULT,
    Span,
)
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.rl.credit.assigners import identical
from lightning_trainer.rl.rewards.judge import installed, judge, read_rules
from lightning_trainer.rl.rewards.potential import shaping
from lightning_trainer.rl.rewards.rules import Finding
from lightning_trainer.rl.rewards.shown import with_automatic
from support.rl.attempts import ADD, CHAT_TOOLS, Attempt, found


def test_tools_that_worked_and_failed_count_for_the_call_that_asked_for_them():
    attempt = Attempt().chat("w", ("add", "{}", "A"), ("add", "{}", "B")).tool("w", "A").tool("w", "B", status="error")
    attempt.chat("w", ("add", "{}", "C")).tool(None, "C", status="error").chat("other").tool("other")
    assert found(attempt, "tool_status", 0.3) == {("w", 1): 0.0, ("w", 4): -0.1, ("other", 6): 0.3}


def test_a_tool_without_an_id_belongs_to_the_last_call_of_its_agent_that_had_ended():
    attempt = Attempt().chat("w").chat("other").tool("w").tool(None)
    assert found(attempt, "tool_status") == {("w", 1): 1.0, ("other", 2): 1.0}


def test_a_tool_that_nothing_asked_for_is_its_agents():
    attempt = Attempt().tool("w", status="error").chat("w")
    assert found(attempt, "tool_status") == {("w", 1): -1.0}


def test_an_agent_gets_no_more_for_more_tools():
    many = Attempt()
    for number in range(20):
        many.chat("w", ("add", "{}", str(number))).tool("w", str(number))
    (chosen,) = read_rules({"tool_status": 0.1})
    assert sum(r.value for r in judge(chosen, many.trace, "r", "at")) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "arguments", "fits"),
    [
        ("add", '{"x": 1}', 1.0),
        ("add", '{"x": "one"}', -1.0),
        ("add", "{}", -1.0),
        ("add", '{"x": 1', -1.0),
        ("add", "", -1.0),
        ("subtract", '{"x": 1}', -1.0),
        ("add", '{"x": 1, "y": 2}', 1.0),
    ],
)
def test_arguments_fit_the_schema_that_the_model_was_given_or_not(name, arguments, fits):
    assert found(Attempt().chat("w", (name, arguments, "A")), "tool_arguments") == {("w", 1): fits}


def test_schemas_and_calls_are_read_in_every_dialect():
    responses = {
        "id": "r",
        "output": [{"type": "function_call", "name": "add", "arguments": '{"x": 1}', "call_id": "A"}],
    }
    flat = {"input": "go", "tools": [{"type": "function", "name": "add", "parameters": ADD}]}
    attempt = Attempt().span(CHAT, "w", **{REQUEST: json.dumps(flat), RESPONSE: json.dumps(responses)}).tool("w", "A")
    assert found(attempt, "tool_arguments") == {("w", 1): 1.0}
    assert found(attempt, "tool_status") == {("w", 1): 1.0}
    content = [{"type": "tool_use", "id": "A", "name": "add", "input": {"x": "no"}}]
    call = Call(
        call_id="1", response_id="m", trace_id="a" * 32, span_id=f"{1:016x}", start_ns=10, end_ns=15, attempt_id="at",
        rollout_id="r", policy="p", policy_version=0, request={"tools": [{"name": "add", "input_schema": ADD}]},
        choices=(Choice(0, None, None, "tool_use", {"content": content}),),
    )  # fmt: skip
    trace = Trace.build(Attempt().span(CHAT, "w").spans, [call], ())
    (chosen,) = read_rules({"tool_arguments": 1.0})
    assert [r.value for r in judge(chosen, trace, "r", "at")] == [-1.0]


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"properties": 3}])
def test_a_schema_that_is_none_is_fitted_by_nothing(schema):
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    assert found(Attempt().chat("w", ("add", "{}", "A"), tools=tools), "tool_arguments") == {("w", 1): -1.0}


@pytest.mark.parametrize("tools", [None, "add", [None, 3, {"function": "add"}]])
def test_tools_of_an_odd_shape_are_no_tools(tools):
    assert found(Attempt().chat("w", ("add", "{}", "A"), tools=tools), "tool_arguments") == {("w", 1): -1.0}


def test_a_repeated_call_is_found_whatever_the_order_of_its_arguments():
    attempt = Attempt().chat("w", ("add", '{"x": 1, "y": 2}', "A")).chat("w", ("add", '{"y":2,"x":1}', "B"))
    attempt.chat("w", ("add", '{"x": 2}', "C")).chat("other", ("add", '{"x": 2}', "D"))
    assert found(attempt, "repeated_calls") == {("w", 1): 0.0, ("w", 2): -1 / 3, ("w", 3): 0.0, ("other", 4): 0.0}


def test_empty_results_are_found_and_failed_tools_are_not_called_empty():
    attempt = Attempt().chat("w", *(("add", "{}", str(n)) for n in range(5)))
    for number, result in enumerate(["", "[]", "null", "0"]):
        attempt.tool("w", str(number), result=result)
    attempt.tool("w", "4", result="", status="error")
    assert found(attempt, "empty_results") == {("w", 1): -3 / 5}


def test_the_last_answer_of_each_agent_has_the_format_or_not():
    attempt = Attempt().chat("w", text="no").chat("w", text="Answer: 3").chat("other", text='{"x": 1}')
    assert found(attempt, "answer_format", {"weight": 1, "pattern": r"^Answer: \d+$"}) == {
        ("w", 2): 1.0,
        ("other", 3): -1.0,
    }
    assert found(attempt, "answer_format", {"weight": 1, "schema": ADD}) == {("w", 2): -1.0, ("other", 3): 1.0}
    only = {"weight": 0.5, "schema": {}, "agents": ["oth*"]}
    assert found(attempt, "answer_format", only) == {("other", 3): 0.5}


def test_budgets_are_of_the_attempt_and_hurt_by_as_much_as_they_are_exceeded():
    attempt = Attempt().chat("w", **{OUTPUT_TOKENS: 30}).chat("w", **{OUTPUT_TOKENS: 30})  # 15 ns in all
    for budget_s, value in ((20e-9, 0.0), (10e-9, -0.5), (1e-9, -1.0)):
        assert found(attempt, "latency", {"weight": 1, "budget_s": budget_s}) == {(None, None): value}
    for budget, value in ((60, 0.0), (40, -0.5), (1, -1.0)):
        assert found(attempt, "cost", {"weight": 1, "budget": budget}) == {(None, None): value}
    assert found(attempt, "cost", {"weight": 1, "budget": 1.0, "response": 0.02}) == {(None, None): -0.2}


def test_overlong_answers_are_punished_softly():
    attempt = Attempt()
    for tokens in (50, 80, 90, 100, 500):
        attempt.chat("w", **{OUTPUT_TOKENS: tokens})
    found_values = found(attempt, "overlong", {"weight": 5, "max_tokens": 100, "buffer": 20})
    assert list(found_values.values()) == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_each_of_several_answers_is_as_long_as_it_is():
    lengths = (50, 50, 90, 50)
    call = Call(
        call_id="1", response_id="m", trace_id="a" * 32, span_id=f"{1:016x}", start_ns=10, end_ns=15, attempt_id="at",
        rollout_id="r", policy="p", policy_version=0,
        choices=tuple(Choice(at, (7,) * length, None, "stop", {}) for at, length in enumerate(lengths)),
    )  # fmt: skip
    trace = Trace.build(Attempt().span(CHAT, "w").spans, [call], ())
    (chosen,) = read_rules({"overlong": {"weight": 1, "max_tokens": 100, "buffer": 20, "average": False}})
    assert [(r.choice, r.value) for r in judge(chosen, trace, "r", "at")] == [(0, 0.0), (1, 0.0), (2, -0.5), (3, 0.0)]


def test_namesakes_are_told_apart_by_their_paths():
    attempt = Attempt()
    for path, text in (("billing/extract", "no number"), ("profile/extract", "42")):
        attempt.chat("extract", ("add", "{}", path), text=text, **{AGENT_PATH: path})
    assert found(attempt, "answer_format", {"weight": 1, "pattern": "42", "agents": ["billing/extract"]}) == {
        ("extract", 1): -1.0
    }
    assert found(attempt, "repeated_calls") == {("extract", 1): 0.0, ("extract", 2): 0.0}


def of_the_attempt(trace):
    return [Finding(1.0)]


def test_a_rule_of_ones_own_about_the_attempt_is_no_agents():
    chosen = replace(*read_rules({"tool_status": {"weight": 1, "agents": ["w"]}}), rule=of_the_attempt)
    with pytest.raises(ConfigError, match="Leave agents out"):
        judge(chosen, Attempt().chat("w").trace, "r", "at")


def test_an_attempt_without_spans_gets_nothing():
    for name, value in (
        ("tool_status", 1),
        ("latency", {"weight": 1, "budget_s": 1}),
        ("cost", {"weight": 1, "budget": 1}),
    ):
        assert found(Attempt(), name, value) == {}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"tool_state": 0.1}, "unknown rule 'tool_state'"),
        ({"tool_status": "much"}, "Give a weight"),
        ({"tool_status": True}, "Give a weight"),
        ({"tool_status": {"potential": True}}, "Give a weight"),
        ({"tool_status": float("nan")}, "finite"),
        ({"tool_status": {"weight": 1, "budget": 1}}, "has no option 'budget'. It has: weight, agents, potential"),
        ({"latency": 0.1}, "needs the option budget_s"),
        ({"latency": {"weight": 1, "budget_s": "fast"}}, "must be a number above 0"),
        ({"overlong": {"weight": 1, "max_tokens": "many", "buffer": 9}}, "can't use its options"),
        ({"latency": {"weight": 1, "budget_s": 0}}, "above 0"),
        ({"latency": {"weight": 1, "budget_s": 1, "agents": ["w"]}}, "latency is about the whole attempt"),
        ({"cost": {"weight": 1, "budget": 1, "agents": ["w"]}}, "Leave agents out"),
        ({"answer_format": 1.0}, "either a pattern or a schema"),
        ({"answer_format": {"weight": 1, "pattern": "("}}, "not a regular expression"),
        ({"overlong": {"weight": 1, "max_tokens": 5, "buffer": 9}}, "at most max_tokens"),
        ({"latency": {"weight": 1, "budget_s": 1, "potential": True}}, "known only at the end"),
        ({"tool_status": {"weight": 1, "potential": True}}, "set credit to discounted or turn, not identical"),
        ({"no_such_module:rule": 1.0}, "no_such_module"),
    ],
)
def test_wrong_rules_are_refused_before_anything_runs(table, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_rules(table, credit="identical")


def test_rules_are_off_until_they_are_configured():
    config = TrainConfig(target="a:b", data="x.jsonl", model="m")
    assert read_rules(config.rewards) == []
    trace = Attempt().chat("w").tool("w").trace
    assert hooks.notify("lightning_rewards", trace=trace, transitions=[]) == []


def test_installed_rules_answer_the_hook_with_their_source_and_go_again():
    trace = Attempt().chat("w", ("add", "{}", "A")).tool("w", "A").trace
    transitions = hooks.manager().hook.lightning_adapt(trace=trace)
    with installed(read_rules({"tool_status": 0.1, "tool_arguments": 0.2})):
        (rewards,) = hooks.notify("lightning_rewards", trace=trace, transitions=transitions)
        again = hooks.notify("lightning_rewards", trace=trace, transitions=transitions)[0]
    assert [(r.source, r.value, r.agent, r.attempt_id) for r in rewards] == [
        ("tool_status", 0.1, "w", "at"), ("tool_arguments", -0.2, "w", "at"),
    ]  # fmt: skip
    assert [r.reward_id for r in rewards] == [r.reward_id for r in again]
    assert hooks.notify("lightning_rewards", trace=trace, transitions=transitions) == []


def test_rewards_are_shown_once_whether_kept_or_not():
    trace = Attempt().chat("w").tool("w").trace
    rules = read_rules({"tool_status": 0.1})
    (once,) = with_automatic([trace], rules)
    (twice,) = with_automatic([once], rules)
    assert [r.value for r in once.rewards] == [r.value for r in twice.rewards] == [0.1]


DOCS = Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md"


def test_the_rule_in_the_documentation_works(tmp_path, monkeypatch):
    text = DOCS.read_text(encoding="utf-8")
    code = re.search(r"```python\n# my_rules\.py\n(.*?)```", text, re.DOTALL).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    (tmp_path / "my_rules.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rules", raising=False)
    attempt = Attempt().chat("w", text="As an AI, I can't.").chat("w", text="3").chat("other", text="4")
    assert found(attempt, "my_rules:no_excuses", 0.2) == {("w", 1): -0.1, ("w", 2): 0.0, ("other", 3): 0.0}


# Potentials.

potentials = st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 4)), min_size=1, max_size=8)


@given(potentials, st.floats(0, 1))
def test_what_comes_after_a_state_sums_to_minus_its_potential(states, gamma):
    values, steps = [value for value, _ in states], np.cumsum([wait for _, wait in states]).tolist()
    rewards = shaping(values, steps, gamma)
    for t, value in enumerate(values):
        to_go = sum(gamma ** (steps[k] - steps[t]) * rewards[k] for k in range(t, len(values)))
        assert to_go == pytest.approx(-value, abs=1e-6)


@given(st.lists(st.tuples(st.sampled_from(["w", "other"]), st.booleans()), min_size=1, max_size=8), st.floats(0.1, 1))
def test_a_rule_with_potential_adds_to_no_return_but_what_the_state_decides(calls, gamma):
    from lightning_trainer.rl.credit.assigners import discounted

    attempt = Attempt()
    for number, (agent, works) in enumerate(calls):
        attempt.chat(agent, ("add", "{}", str(number))).tool(agent, str(number), status="ok" if works else "error")
    trace = attempt.trace
    (chosen,) = read_rules({"tool_status": {"weight": 0.5, "potential": True}}, credit="discounted", gamma=gamma)
    rewards = judge(chosen, trace, "r", "at")
    transitions = hooks.manager().hook.lightning_adapt(trace=trace)
    seen: dict[str, list[float]] = {"w": [], "other": []}
    for (agent, works), value in zip(calls, discounted(transitions, rewards, gamma=gamma), strict=True):
        state = 0.5 * sum(seen[agent]) / len(seen[agent]) if seen[agent] else 0.0  # known before the call is made
        assert value == pytest.approx(-state, abs=1e-9)
        seen[agent].append(1.0 if works else -1.0)


def solve(transition_SAS, reward_SAS, gamma):
    """Q-values of a Markov decision process whose last state ends it, by value iteration."""
    value = np.zeros(len(transition_SAS))
    for _ in range(2000):
        quality = (transition_SAS * (reward_SAS + gamma * value)).sum(-1)
        quality[-1] = 0.0
        value = quality.max(1)
    return quality


@given(st.integers(0, 10_000))
def test_potentials_leave_the_best_policy_of_a_small_process_where_it_is(seed):
    random = np.random.default_rng(seed)
    states, actions, gamma = 5, 3, 0.9
    moves = random.dirichlet(np.ones(states), (states, actions))
    reward = random.normal(size=(states, actions, states))
    phi = random.normal(scale=5.0, size=states)
    phi[-1] = 0.0  # where it ends
    step = np.array([[shaping([here, there], [0, 1], gamma)[0] for there in phi] for here in phi])
    plain, shaped = solve(moves, reward, gamma), solve(moves, reward + step[:, None, :], gamma)
    assert shaped[:-1] == pytest.approx(plain[:-1] - phi[:-1, None], abs=1e-6)  # corollary 2 of the paper
    assert (shaped[:-1].argmax(1) == plain[:-1].argmax(1)).all()


def test_a_bonus_that_is_no_potential_moves_the_best_policy():
    # State 0: act 0 goes round and comes back, act 1 ends with reward 1. Coming back looks good.
    moves = np.zeros((2, 2, 2))
    moves[0, 0, 0] = moves[0, 1, 1] = moves[1, :, 1] = 1.0
    reward = np.zeros((2, 2, 2))
    reward[0, 1, 1] = 1.0
    assert solve(moves, reward, 0.9)[0].argmax() == 1
    bonus = reward.copy()
    bonus[0, 0, 0] = 0.2  # 0.2 / (1 - 0.9) = 2 > 1
    assert solve(moves, bonus, 0.9)[0].argmax() == 0
    phi = np.array([0.2, 0.0])
    step = np.array([[shaping([here, there], [0, 1], 0.9)[0] for there in phi] for here in phi])
    assert solve(moves, reward + step[:, None, :], 0.9)[0].argmax() == 1


def test_one_failure_among_many_successes_counts_whole_where_nothing_is_averaged():
    attempt = Attempt().chat("w", ("add", "{}", "bad")).tool("w", "bad", status="error")
    for number in range(9):
        attempt.chat("w", ("add", "{}", str(number))).tool("w", str(number))
    assert found(attempt, "tool_status", 0.1)["w", 1] == -0.01
    assert found(attempt, "tool_status", {"weight": 0.1, "average": False})["w", 1] == -0.1
    with pytest.raises(ConfigError, match="Leave average out"):
        read_rules({"tool_status": {"weight": 1, "average": False, "potential": True}}, credit="turn")


SHARED = {
    "tool_arguments": 1,
    "repeated_calls": 1,
    "cost": {"weight": 1, "budget": 10},
    "overlong": {"weight": 1, "max_tokens": 2, "buffer": 1},
    "answer_format": {"weight": 1, "pattern": "7"},
}


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("layout", ["one span", "nested", "two traces"])
def test_calls_that_share_a_span_are_judged_like_calls_that_do_not(name, layout):
    """A program could show its best answer only; the gateway has recorded all of them."""
    (chosen,) = read_rules({name: SHARED[name]})
    apart = Trace.build([_span_of(n) for n in range(3)], [_answered(n) for n in range(3)])
    own, other = _span_of(1), _span_of(2, response_id="r1", end_ns=15)
    spans, calls = [own], [_answered(n, span_id=own.span_id) for n in range(3)]
    if layout != "one span":
        other = replace(other, attributes={**other.attributes, FRAMEWORK: "proxy"}, start_ns=11)
        other = replace(other, parent_id=own.span_id) if layout == "nested" else replace(other, trace_id="b" * 32)
        calls[2] = replace(calls[2], span_id=other.span_id, trace_id=other.trace_id)
        spans.append(other)
    together = Trace.build(spans, calls)
    assert (len(apart.chats), len(together.chats)) == (3, 1)
    honest, hidden = (judge(chosen, trace, "r", "at") for trace in (apart, together))
    assert {reward.agent for reward in hidden} == {reward.agent for reward in honest}
    assert sum(reward.value for reward in hidden) == pytest.approx(sum(reward.value for reward in honest))
    assert sum(reward.value for reward in hidden) < 0


def test_tries_of_one_call_do_not_repeat_each_other_and_cost_what_they_took():
    span = _span_of(1)
    tries = [replace(_answered(0, span_id=span.span_id), call_id=f"c{n}", response_id=f"r{n}") for n in range(2)]
    trace = Trace.build([span], [*tries, replace(tries[0], call_id="failed", error="500", choices=())])
    assert [node.call for node in trace.chats] == [tries[1]]
    values = {name: _values(name, trace) for name in SHARED}
    assert values["repeated_calls"] == [0.0]
    assert values["tool_arguments"] == [-1.0]
    assert values["cost"] == _values("cost", Trace.build([_span_of(n) for n in range(2)], tries))


def _values(name, trace):
    (chosen,) = read_rules({name: SHARED[name]})
    return [pytest.approx(reward.value) for reward in judge(chosen, trace, "r", "at")]


def _span_of(number, response_id=None, **changes):
    values = {
        "operation": CHAT, "name": "chat", "trace_id": "a" * 32, "span_id": f"{number:016x}", "agent": "w",
        "start_ns": number * 10, "end_ns": number * 10 + 5, "status": "ok",
    }  # fmt: skip
    return Span(**{**values, **changes}, attributes={RESPONSE_ID: response_id or f"r{number}"})


def _answered(number, span_id=None):
    """A call as the gateway records it. Its answer is bad, except for number 1."""
    is_good = number == 1
    tool = {
        "id": f"t{number}",
        "type": "function",
        "function": {"name": "add", "arguments": '{"x": 1}' if is_good else "{}"},
    }
    message = {"role": "assistant", "content": "7" if is_good else "", "tool_calls": [tool]}
    ids, logprobs = ((3,), (-0.5,)) if is_good else ((3, 4), (-0.5, -0.5))
    return Call(
        call_id=f"c{number}", response_id=f"r{number}", trace_id="a" * 32, span_id=span_id or f"{number:016x}",
        start_ns=number * 10, end_ns=number * 10 + 5, policy="policy", policy_version=0, prompt_token_ids=(1, 2),
        request={"messages": [{"role": "user", "content": str(number)}], "tools": CHAT_TOOLS},
        choices=(Choice(0, ids, logprobs, "stop", message),),
    )  # fmt: skip


def _two_answers(*, tools):
    """A call of two answers that asks for A and B; then the tools that ran."""
    attempt, choices = Attempt(), []
    for index, (call_id, arguments) in enumerate((("A", '{"x": 1}'), ("B", '{"y": 1}'))):
        asked = {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [asked]}
        choices.append({"index": index, "finish_reason": "tool_calls", "message": message})
    request = {"messages": [], "tools": CHAT_TOOLS}
    attempt.span(CHAT, "w", **{REQUEST: json.dumps(request), RESPONSE: json.dumps({"id": "c", "choices": choices})})
    for call_id, status in tools:
        attempt.tool("w", call_id, status=status)
    return attempt


@pytest.mark.parametrize("name", ["tool_status", "tool_arguments", "empty_results"])
def test_what_a_tool_did_is_of_the_answer_that_asked_for_it(name):
    attempt = _two_answers(tools=[("A", "ok"), ("B", "error")])
    if name == "empty_results":
        attempt = _two_answers(tools=[("A", "ok"), ("B", "ok")])
        attempt.spans[2] = replace(attempt.spans[2], attributes={**attempt.spans[2].attributes, TOOL_RESULT: ""})
    trace = attempt.trace
    (chosen,) = read_rules({name: 1.0})
    rewards = judge(chosen, trace, "r", "at")
    with_them = Trace.build(attempt.spans, (), rewards)
    good, bad = identical(adapt(with_them), rewards)
    assert good > bad
    assert sum(reward.value for reward in rewards) == pytest.approx(good + bad)


def test_answers_of_one_call_do_not_repeat_each_other():
    attempt = _two_answers(tools=[])
    same = json.loads(attempt.spans[0].attributes[RESPONSE].replace('\\"y\\"', '\\"x\\"'))
    attempt.spans[0] = replace(attempt.spans[0], attributes={**attempt.spans[0].attributes, RESPONSE: json.dumps(same)})
    (chosen,) = read_rules({"repeated_calls": 1.0})
    assert [reward.value for reward in judge(chosen, attempt.trace, "r", "at")] == [0.0, 0.0]
