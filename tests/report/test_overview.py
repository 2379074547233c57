from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_spans.adapter.nodes import MissingHalf
from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import (
    CHAT,
    ENDPOINT,
    EXECUTE_TOOL,
    FRAMEWORK,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    REQUEST,
    REROUTABLE,
    REROUTED,
    UNASKABLE,
    Span,
)
from lightning_trainer.cli.training.agent_rows import print_joins, print_rows
from lightning_trainer.report.agents import explain_no_calls, explain_no_rewards, misspelt_rewards, overview
from lightning_trainer.report.step_notes import no_rows
from lightning_trainer.rl.account import Account, UntrainedReason
from lightning_trainer.rl.batch.batch import Batch


def trace(*spans: tuple[str, str | None, dict[str, Any]], rewards: dict[str | None, float] | None = None) -> Trace:
    ids = {"rollout_id": "r", "attempt_id": "a"}
    made = [
        Span(
            operation=operation,
            name="x",
            trace_id="1" * 32,
            start_ns=number,
            end_ns=number,
            agent=agent,
            **{"status": "ok", "span_id": f"{number:016x}", **more},
            **ids,
        )
        for number, (operation, agent, more) in enumerate(spans, 1)
    ]
    earned = [Reward(agent=agent, value=value, **ids) for agent, value in (rewards or {}).items()]
    return Trace.build(made, (), earned, **ids)


COUNTED = {"attributes": {INPUT_TOKENS: 10, OUTPUT_TOKENS: 3}}
FAILED = {"status": "error", "status_message": "no such model"}


def test_calls_tokens_tools_and_rewards_are_counted_by_agent() -> None:
    one = trace(
        (CHAT, "writer", COUNTED), (CHAT, "writer", FAILED), (EXECUTE_TOOL, "writer", {}),
        (EXECUTE_TOOL, "writer", {"status": "error"}), (CHAT, "checker", COUNTED),
        rewards={"writer": 1.0, None: 0.5},
    )  # fmt: skip
    two = trace((CHAT, "writer", COUNTED), rewards={None: 0.0})
    checker, writer = overview([one, two], None)
    assert (writer.agent, writer.calls, writer.failed_calls) == ("writer", 3, 1)
    assert (writer.prompt_tokens, writer.response_tokens) == (20, 6)
    assert (writer.tool_calls, writer.tool_errors, writer.reward) == (2, 1, 0.75)
    assert (checker.agent, checker.reward, checker.trained) == ("checker", 0.5, True)


def test_exact_tokens_go_before_the_servers_count() -> None:
    ids = {"trace_id": "1" * 32, "span_id": "2" * 16, "rollout_id": "r", "attempt_id": "a"}
    span = Span(operation=CHAT, name="x", start_ns=1, end_ns=2, agent="writer", **COUNTED, **ids)
    call = Call(
        call_id="c", response_id="c", start_ns=1, end_ns=2, policy="p", policy_version=0, prompt_token_ids=(1, 2),
        choices=(Choice(0, (3,), (0.0,), "stop"), Choice(1, (4, 5), (0.0, 0.0), "stop")), **ids,
    )  # fmt: skip
    [row] = overview([Trace.build([span], [call])], None)
    assert (row.prompt_tokens, row.response_tokens) == (2, 3)


def test_each_reason_against_training_is_told() -> None:
    rows = {
        row.agent: row
        for row in overview(
            [
                trace(
                    (CHAT, "writer", {}), (CHAT, "rewriter", {}), (CHAT, "broken", FAILED), (CHAT, None, {}),
                    (EXECUTE_TOOL, "tooler", {}), rewards={"writer": 1.0, "broken": 1.0},
                )
            ],
            ("writer", "broken", "tooler", "silent*"),
        )
    }  # fmt: skip
    assert {name: row.trained for name, row in rows.items()} == {
        "broken": False, "rewriter": False, "tooler": False, "writer": True, None: False,
    }  # fmt: skip
    assert "every call failed: no such model" in rows["broken"].why
    assert rows["rewriter"].why == "not among --agents"
    assert rows["tooler"].why == "it made no model call"
    assert "no agent's name" in rows[None].why


def test_agent_that_earned_nothing_is_told_so() -> None:
    rows = {row.agent: row for row in overview([trace((CHAT, "a", {}), (CHAT, "b", {}), rewards={"a": 1.0})], None)}
    assert rows["a"].trained
    assert rows["b"].why == "no reward: the rewards name only a. Give b one too"
    assert list(rows["b"].to_json())[:2] == ["agent", "calls"]


def test_an_agent_that_earned_the_same_in_all_rollouts_says_in_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    traces = [trace((CHAT, "a", {}), (CHAT, "b", {}), rewards={"a": 0.0, "b": value}) for value in (0.0, 1.0)]
    rows = overview(traces, None)
    assert [(row.agent, row.rewarded, row.constant) for row in rows] == [("a", 2, True), ("b", 2, False)]
    print_rows(rows, as_json=False)
    assert "it earned 0.000 in all 2 rollouts: no signal so far" in capsys.readouterr().out


def test_a_reward_of_attempts_in_which_an_agent_never_spoke_is_not_its_own() -> None:
    apart = [trace((CHAT, "a", {}), rewards={None: 1.0}), trace((CHAT, "b", {}))]
    rows = {row.agent: row for row in overview(apart, None)}
    assert rows["b"].why == "no reward: return one from run(), or give --reward"


def test_why_attempts_got_no_reward_is_one_line_of_the_table() -> None:
    why = "reward is nan.\nThe task was {'n': 0}."
    [row] = overview([trace((CHAT, "a", {}))], None, reward_error=why)
    assert row.why == "no reward: reward is nan."  # the whole of it is the error that ends the command


def test_agents_of_which_every_reward_names_somebody_else_have_nothing_to_learn_from() -> None:
    missed = trace((CHAT, "writer", {}), rewards={"wroter": 1.0})
    assert "'wroter'" in (explain_no_rewards([missed]) or "")
    assert explain_no_rewards([missed, trace((CHAT, "writer", {}), rewards={"writer": 1.0})]) is None


def test_of_many_rewards_for_agents_that_never_spoke_the_first_are_named() -> None:
    missed = trace((CHAT, "writer", {}), rewards={f"agent{n:04}": 1.0 for n in range(3000)})
    for told in (misspelt_rewards([missed]) or "", explain_no_rewards([missed]) or ""):
        assert "'agent0000'" in told
        assert "2,990 more" in told
        assert len(told) < 1000


def test_what_to_do_depends_on_whether_anything_is_attached() -> None:
    assert "lightning_langchain.attach()" in explain_no_calls(8, ())
    assert "although langchain is attached" in explain_no_calls(8, ["langchain"])


def test_a_command_is_told_where_to_ask_and_not_to_attach_in_python() -> None:
    told = explain_no_calls(8, (), "node agent.js")
    assert "OPENAI_BASE_URL" in told
    assert "attach" not in told


def test_calls_that_only_a_gateway_saw_are_not_said_to_be_at_their_own_endpoint(capsys) -> None:
    ids = {"rollout_id": "r", "attempt_id": "a"}
    call = Call(call_id="c", response_id="c", start_ns=1, end_ns=2, policy="p", policy_version=0, agent="shell", **ids)
    print_joins([Trace.build([], [call])], as_json=False)
    told = capsys.readouterr().err
    assert "1 model call recorded, by the gateway alone: the program is not attached.\n" in told
    assert "tools are not visible" in told
    print_joins([trace((CHAT, "writer", {}))], as_json=False)
    told = capsys.readouterr().err
    assert "1 model call recorded, at their own endpoint" in told
    assert "attach its plugin, or write one" in told
    print_joins([trace((CHAT, "writer", {})), Trace.build([], [call])], as_json=False)
    assert "0 of 1 model calls are joined" in capsys.readouterr().out


def test_calls_at_an_untrained_agents_own_endpoint_are_not_called_unjoined(capsys) -> None:
    sent = {"attributes": {REROUTED: True}, "span_id": "a" * 16}
    calls = trace((CHAT, "writer", sent), (CHAT, "checker", {}), (CHAT, "checker", {}), (CHAT, "checker", FAILED))
    ids = {"rollout_id": "r", "attempt_id": "a", "trace_id": "1" * 32, "span_id": "a" * 16}
    call = Call(call_id="c", response_id="c", start_ns=1, end_ns=2, policy="p", policy_version=0, agent="writer", **ids)
    whole = Trace.build([node.span for node in calls], [call])
    print_joins([whole], as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "1 of 2 model calls are joined with the gateway's records",
        f"1 not joined: {MissingHalf.NOT_SEEN}",
        "2 calls of checker went to its own endpoint, where no tokens are recorded",
    ]


ELSEWHERE = {"attributes": {FRAMEWORK: "langchain"}}
WIRED = {"attributes": {FRAMEWORK: "openai"}}
HELLO = {"role": "user", "content": "hello"}


def test_an_agent_whose_model_is_reached_without_the_openai_client_is_not_trained_and_says_why() -> None:
    [row] = overview([trace((CHAT, "writer", ELSEWHERE), rewards={None: 1.0})], None)
    assert not row.trained
    assert row.why.startswith("no tokens: langchain reaches x without the openai client.")


@pytest.mark.parametrize("told", [{FRAMEWORK: "httpx"}, {FRAMEWORK: "langchain", REROUTABLE: True}])
def test_an_agent_whose_models_client_is_followed_is_trained(told) -> None:
    [row] = overview([trace((CHAT, "writer", {"attributes": told}), rewards={None: 1.0})], None)
    assert row.trained, row.why


def test_an_agent_whose_calls_no_policy_can_be_asked_is_told_what_they_name() -> None:
    refused = {"attributes": {FRAMEWORK: "httpx", UNASKABLE: ["documents", "safety_mode"]}}
    [row] = overview([trace((CHAT, "writer", refused), rewards={None: 1.0})], None)
    assert not row.trained
    assert row.why.startswith("its policy answers chat completions, which have no documents, safety_mode")
    [row] = overview([trace((CHAT, "writer", refused), (CHAT, "writer", WIRED), rewards={None: 1.0})], None)
    assert row.trained
    assert "1 of 2 are errors then: its policy answers chat completions, which have no documents" in row.why


@pytest.mark.parametrize(
    ("endpoint", "field", "told"),
    [
        ("/responses", {"conversation": "conv_1"}, "conversation"),
        ("/responses", {"background": True}, "background"),
        ("/responses", {"prompt": {"id": "p"}}, "prompt"),
        ("/responses", {"max_tool_calls": 3}, "max_tool_calls"),
        ("/responses", {"truncation": "auto"}, "truncation"),
        ("/responses", {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}, None),
        ("/responses", {"input": [HELLO, {"type": "item_reference", "id": "msg_1"}]}, None),
        ("/chat/completions", {"audio": {"voice": "x"}}, "audio"),
        ("/chat/completions", {"provider": {"sort": "price"}, "usage": {"include": True}, "models": ["a"]}, None),
        ("/chat/completions", {"prompt_cache_options": {"ttl": "24h"}, "trace": {"a": 1}, "fallbacks": ["a"]}, None),
        ("/chat/completions", {"enable_search": False, "transforms": [], "include_reasoning": True}, None),
        ("/messages", {"speed": "fast", "diagnostics": {}, "workspace_id": "w", "fallbacks": "default"}, None),
        ("/messages", {"messages": [{"role": "assistant", "content": "{"}]}, "prefill"),
        ("/messages", {"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
        ("/chat/completions", {"enable_thinking": False}, "Use chat_template_kwargs.enable_thinking"),
        ("/chat/completions", {"enable_search": True}, "enable_search"),
    ],
)
def test_what_the_gateway_would_refuse_is_known_in_advance(endpoint, field, told) -> None:
    asked = {"model": "m", "input": "hello"} if endpoint == "/responses" else {"model": "m", "messages": [HELLO]}
    asked |= {"max_tokens": 10} if endpoint == "/messages" else {}
    facts = {FRAMEWORK: "openai", ENDPOINT: endpoint, REQUEST: json.dumps(asked | field)}
    [row] = overview([trace((CHAT, "writer", {"attributes": facts}), rewards={None: 1.0})], None)
    assert row.trained is (told is None), row.why
    if told is not None:
        assert row.why.startswith("the gateway would refuse them: ")
        assert told in row.why


def test_an_agent_some_of_whose_calls_have_no_tokens_says_how_many() -> None:
    [row] = overview([trace((CHAT, "writer", ELSEWHERE), (CHAT, "writer", WIRED), rewards={None: 1.0})], None)
    assert row.trained
    assert "1 of 2 have no tokens: langchain reaches x without the openai client" in row.why


def test_a_batch_whose_rewards_are_for_a_misspelt_agent_is_told_whose_it_likely_is() -> None:
    account = Account(seen=4, dropped={UntrainedReason.NO_REWARD: 4}, unclaimed={"wroter": 4})
    told = no_rows(Batch([], account, {"writer": 4}))
    assert "'wroter' (did you mean 'writer'?). Use the agents' names as listed." in told
    assert "without a name" not in told
    assert "without a name" in no_rows(Batch([], Account(seen=4, dropped={UntrainedReason.NO_REWARD: 4}), {None: 4}))
