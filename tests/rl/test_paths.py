"""Agents of one name, told apart by their paths, from the trace to policies, rewards and rows of tables."""

from __future__ import annotations

from lightning_spans.adapter.adapt import adapt
from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import AGENT_PATH, CHAT, INVOKE_AGENT, Span
from lightning_trainer.policies import parse
from lightning_trainer.report.agents import overview
from lightning_trainer.rl.batch.attempts import transitions_by_attempt
from lightning_trainer.rl.credit.assigners import identical, per_agent, unclaimed_rewards

PATHS = ("billing/extract", "profile/extract")


def span(number, operation, agent, *, parent=None, path=None):
    return Span(
        operation=operation, name=agent, trace_id="t", span_id=f"s{number}", parent_id=parent, start_ns=number,
        end_ns=number, agent=agent, rollout_id="r", attempt_id="a", attributes={AGENT_PATH: path} if path else {},
    )  # fmt: skip


def trace(*rewards):
    """Two calls of an `extract`: one says where it stands, of the other only the agent's own span does."""
    spans = [
        span(1, CHAT, "extract", path=PATHS[0]),
        span(2, INVOKE_AGENT, "extract", path=PATHS[1]),
        span(3, CHAT, "extract", parent="s2"),
        span(4, INVOKE_AGENT, "__start__", path="__start__"),
    ]
    given = [Reward(rollout_id="r", attempt_id="a", value=value, agent=agent) for agent, value in rewards]
    return Trace.build(spans, rewards=given)


def test_a_call_stands_where_its_agent_does():
    assert [(t.agent, t.path) for t in adapt(trace())] == [("extract", path) for path in PATHS]
    assert trace().agents == ("extract",)
    assert trace().agent_paths == PATHS


def test_a_header_names_a_path():
    call = Call(call_id="c", response_id="x", start_ns=1, end_ns=2, policy="p", policy_version=0, attempt_id="a",
                rollout_id="r", agent="billing/QA//extract")  # fmt: skip
    (found,) = adapt(Trace.build([], [call]))
    assert (found.agent, found.path) == ("QA/extract", "billing/QA//extract")


def test_agents_are_called_by_their_path_where_it_selects_them():
    def names(agents):
        found, _ = transitions_by_attempt([trace()], agents)["a"]
        return [(t.agent, t.path) for t in found]

    assert names(None) == names(("extract",)) == [("extract", path) for path in PATHS]
    assert names(("billing/**",)) == [(PATHS[0], PATHS[0]), ("extract", PATHS[1])]


def test_a_reward_by_path_is_for_one_of_two_namesakes():
    for known in (adapt(trace()), transitions_by_attempt([trace()], PATHS)["a"][0]):
        rewards = trace((PATHS[0], 1.0), ("profile/*", 0.5)).rewards
        assert list(per_agent(known, rewards)) == [1.0, 0.5]
        assert list(identical(known, trace(("extract", 2.0)).rewards)) == [2.0, 2.0]
        assert not unclaimed_rewards(known, rewards)
        assert len(unclaimed_rewards(known, trace(("other/extract", 1.0)).rewards)) == 1


def test_a_policy_by_path():
    policies = parse({"extract": "lora:all", "billing/extract": "lora:billing", "*": "base"})
    assert [policies.of(path) for path in (*PATHS, "writer")] == ["billing", "all", "base"]


def test_the_overview_tells_namesakes_apart_where_one_is_selected():
    traces = [trace((PATHS[0], 1.0))]
    (row,) = overview(traces, None)
    assert (row.agent, row.calls, row.paths) == ("extract", 2, PATHS)
    rows = overview(traces, (PATHS[0],))
    assert [(row.agent, row.calls, row.trained, row.reward) for row in rows] == [
        (PATHS[0], 1, True, 1.0),
        ("extract", 1, False, None),
    ]
