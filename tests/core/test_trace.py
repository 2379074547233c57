"""One attempt as a tree: one model call is one chat node, whatever is missing, late, doubled or wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_conformance.stores.samples import a_call, a_reward, a_rollout, a_span, an_id
from lightning_spans.adapter.nodes import MissingHalf
from lightning_spans.adapter.trace import Node, Trace, count_joins
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.spans import (
    CHAT,
    EXECUTE_TOOL,
    FRAMEWORK,
    INVOKE_AGENT,
    REQUEST,
    RESPONSE,
    RESPONSE_ID,
    Span,
)
from lightning_spans.store.sql.store import SqlStore
from lightning_spans.store.traces import newest_traces, traces_of

T = "0af7651916cd43dd8448eb211c80319c"


def span(span_id: str, parent_id: str | None = None, operation: str = CHAT, **changes: Any) -> Span:
    """A span named by its id; starts count up."""
    start = changes.pop("start_ns", None)
    start = next(_clock) if start is None else start
    values = {"operation": operation, "name": span_id, "trace_id": T, "span_id": span_id, "parent_id": parent_id}
    return Span(**{**values, "start_ns": start, "end_ns": start + 1, "status": "ok", **changes})


def _count() -> Iterator[int]:
    at = 0
    while True:
        at += 10
        yield at


_clock = _count()


def chat(span_id: str, parent_id: str | None = None, response_id: str | None = None, **changes: Any) -> Span:
    attributes = {**({RESPONSE_ID: response_id} if response_id else {}), **changes.pop("attributes", {})}
    return span(span_id, parent_id, attributes=attributes, **changes)


def call(response_id: str, span_id: str | None = None, **changes: Any) -> Call:
    trace_id = T if span_id else None
    values = {"response_id": response_id, "trace_id": trace_id, "span_id": span_id, "start_ns": next(_clock)}
    return a_call(**{**values, **changes})


def shape(node: Node) -> Any:
    assert all(child.parent is node for child in node.children)
    return (node.span.span_id, [shape(child) for child in node.children])


def ids(nodes: Sequence[Node]) -> list[str]:
    return [node.span.span_id for node in nodes]


def test_spans_become_a_tree_in_the_order_of_their_start() -> None:
    root = span("root", operation=INVOKE_AGENT)
    first, tool, second = chat("first", "root"), span("tool", "root", EXECUTE_TOOL), chat("second", "root")
    inner = chat("inner", "tool")
    trace = Trace.build([inner, second, tool, first, root])
    assert [shape(node) for node in trace.roots] == [
        ("root", [("first", []), ("tool", [("inner", [])]), ("second", [])])
    ]
    assert ids(list(trace)) == ["root", "first", "tool", "second", "inner"]
    assert (ids(trace.chats), ids(trace.tools), trace.orphans) == (["first", "second", "inner"], ["tool"], ())
    assert trace.chats[2].parent is trace.tools[0]


def test_of_equal_starts_the_parent_comes_first() -> None:
    spans = [span("c", "b", start_ns=5), span("b", "a", start_ns=5), span("a", start_ns=5)]
    assert ids(list(Trace.build(spans))) == ["a", "b", "c"]


def test_an_orphan_hangs_at_the_root_and_keeps_what_is_below_it() -> None:
    trace = Trace.build([span("tool", "never delivered", EXECUTE_TOOL), chat("inner", "tool"), span("root")])
    assert ids(trace.roots) == ["tool", "root"]
    assert ids(trace.orphans) == ["tool"]
    assert trace.to_json_lines()[0]["parent_id"] == "never delivered"


def test_parents_are_looked_for_in_the_same_trace_only() -> None:
    trace = Trace.build([span("a"), span("b", "a", trace_id="f" * 32)])
    assert ids(trace.orphans) == ["b"]


def test_a_cycle_is_cut_at_its_earliest_span() -> None:
    spans = [span("a", "c"), span("b", "a"), span("c", "b"), span("tail", "b"), span("self", "self")]
    trace = Trace.build(spans)
    assert [shape(node) for node in trace.roots] == [("a", [("b", [("c", []), ("tail", [])])]), ("self", [])]
    assert ids(trace.orphans) == ["a", "self"]
    assert [line["parent_id"] for line in trace.to_json_lines()] == [None, "a", "b", "b", None]


def test_a_span_delivered_twice_is_one_node() -> None:
    first = span("a")
    trace = Trace.build([first, span("b", "a"), replace(first, name="again")])
    assert ids(list(trace)) == ["a", "b"]
    assert trace.nodes[0].span is first


@given(st.lists(st.integers(0, 12), max_size=12), st.randoms())
def test_any_parents_at_all_give_each_span_one_place(parents: list[int], rng: random.Random) -> None:
    spans = [
        span(f"{n}", f"{parent}" if parent else None, start_ns=rng.randrange(5)) for n, parent in enumerate(parents)
    ]
    trace = Trace.build(spans)
    assert sorted(ids(list(trace))) == sorted(each.span_id for each in spans)
    seen: list[str] = []
    stack = list(trace.roots)
    while stack:
        node = stack.pop()
        seen.append(node.span.span_id)
        stack += node.children
        assert all(child.parent is node for child in node.children)
        starts = [child.span.start_ns for child in node.children]
        assert starts == sorted(starts)
    assert sorted(seen) == sorted(ids(list(trace)))


def test_a_thousand_nested_and_ten_thousand_flat_are_no_trouble() -> None:
    nested = [chat(f"{n}", f"{n - 1}" if n else None, f"r{n}") for n in range(1000)]
    calls = [call(f"r{n}", f"{n}") for n in range(1000)]
    trace = Trace.build(nested, calls)
    assert len(trace.chats) == len(trace.to_json_lines()) == 1000
    assert len(Trace.build([chat(f"{n}", "0" if n else None, f"r{n}") for n in range(10_000)]).chats) == 10_000
    cycle = [chat(f"{n}", f"{(n + 1) % 1000}") for n in range(1000)]
    assert len(Trace.build(cycle).orphans) == 1


def test_a_call_joins_the_span_that_its_traceparent_names() -> None:
    calls = [call("r1", "b"), call("r2", "a")]  # even where the response ids say otherwise
    trace = Trace.build([chat("a", None, "r1"), chat("b", None, "r2")], calls)
    assert [node.call for node in trace.chats] == [calls[1], calls[0]]
    assert trace.unjoined == ()


def test_a_call_without_traceparent_joins_by_response_id() -> None:
    calls = [call("r2"), call("r1", trace_id="f" * 32, span_id="of another program")]
    trace = Trace.build([chat("a", None, "r1"), chat("b", None, "r2"), chat("c", None, "r3")], calls)
    assert [node.call for node in trace.chats] == [calls[1], calls[0], None]
    assert [(half.node, half.call) for half in trace.unjoined] == [(trace.chats[2], None)]
    assert "not recorded by the gateway" in trace.unjoined[0].reason


def test_a_server_that_gives_every_answer_one_id_loses_no_call() -> None:
    spans = [chat(f"{n}", None, "same", attributes={FRAMEWORK: "openai"}) for n in range(3)]
    calls = [call("same") for _ in range(4)]
    trace = Trace.build(spans, calls)
    assert [node.call for node in trace.chats] == calls


def test_a_call_that_no_span_tells_of_is_a_chat_node_of_its_own() -> None:
    lone = call("r1", agent="writer", rollout_id="r", attempt_id="a", origin="live")
    trace = Trace.build([], [lone])
    (node,) = trace.chats
    assert (node.span.operation, node.span.agent, node.span.parent_id, node.call) == (CHAT, "writer", None, lone)
    assert (node.span.rollout_id, node.span.attempt_id, len(node.span.trace_id)) == ("r", "a", 32)
    assert node.span.origin == "live"
    assert trace.agents == ("writer",)
    assert [half.call for half in trace.unjoined] == [lone]
    assert ids(Trace.build([], [lone]).chats) == ids(trace.chats)  # its id is the same each time


def test_a_call_of_its_own_hangs_under_its_trace_parent() -> None:
    agent = span("agent", operation=INVOKE_AGENT, agent="writer")
    later = span("later", "agent", EXECUTE_TOOL, start_ns=10**6)
    trace = Trace.build([agent, later], [call("r1", "agent"), call("r2", "never delivered")])
    under, beside = trace.chats
    assert (under.parent, under.span.agent) == (trace.nodes[0], "writer")
    assert trace.nodes[0].children[0] is under
    assert (beside.parent, beside.span.parent_id) == (None, "never delivered")
    assert trace.orphans == (beside,)


def test_a_clients_retries_are_one_chat_node() -> None:
    failed, timed_out, answered = call("x", "a", error="500"), call("r1", "a"), call("r2", "a")
    trace = Trace.build([chat("a", None, "r2")], [failed, timed_out, answered])
    assert [node.call for node in trace.chats] == [answered]
    assert [half.call for half in trace.unjoined] == [failed, timed_out]
    assert all(half.node is None for half in trace.unjoined)
    stray = call("r3", "a")
    assert Trace.build([chat("a", None, "r2")], [answered, stray]).chats[0].call == answered  # the one it holds
    unsaid = Trace.build([chat("a")], [answered, replace(failed, call_id=an_id(), start_ns=10**9)])
    assert unsaid.chats[0].call == answered  # the last that was answered


def test_a_gateways_own_span_of_a_call_is_merged_into_the_agents() -> None:
    mine = chat("mine", None, "r1", agent="writer", end_ns=10**6)
    server = span("server", "mine", "http")
    theirs = chat("theirs", "server", "r1", attributes={"gateway": 1, FRAMEWORK: "proxy"})
    inner = span("inner", "theirs", "http")
    trace = Trace.build([mine, server, theirs, inner], [call("r1", "mine")])
    assert [shape(node) for node in trace.roots] == [("mine", [("server", []), ("inner", [])])]
    (node,) = trace.chats
    assert (node.span.agent, node.span.attributes["gateway"], node.call is not None) == ("writer", 1, True)
    assert node.merged == ("theirs",)
    assert next(line for line in trace.to_json_lines() if line["span_id"] == "inner")["parent_id"] == "mine"
    assert trace.unjoined == ()


def test_another_instrumentations_span_around_ours_is_the_same_call() -> None:
    """Its stream gave it no response id; ours, right below, has one, the request and the agent."""
    theirs = chat("theirs", attributes={FRAMEWORK: "other"})
    ours = chat("ours", "theirs", "r1", agent="writer", attributes={FRAMEWORK: "openai"})
    trace = Trace.build([theirs, ours], [call("r1", "ours")])
    (node,) = trace.chats
    assert (node.span.span_id, node.span.agent, node.answer.response_id) == ("theirs", "writer", "r1")
    assert node.call is not None
    failed = Trace.build([theirs, chat("ours", "theirs", status="error", attributes={FRAMEWORK: "openai"})])
    assert len(failed.chats) == 1


def test_spans_of_one_call_in_two_traces_are_merged() -> None:
    mine = chat("mine", None, "r1", agent="writer", start_ns=10, end_ns=90, attributes={FRAMEWORK: "openai"})
    theirs = chat("theirs", None, "r1", start_ns=20, end_ns=80, trace_id="f" * 32)
    assert ids(Trace.build([theirs, mine]).chats) == ["mine"]
    below = replace(theirs, trace_id=T, parent_id="mine", end_ns=10**6)
    assert len(Trace.build([mine, below]).chats) == 1  # below the agent's: whatever the clocks say
    at_once = replace(theirs, attributes=mine.attributes)
    assert len(Trace.build([mine, at_once]).chats) == 2  # one source never tells of a call twice
    apart = replace(theirs, start_ns=100, end_ns=110)
    assert len(Trace.build([mine, apart]).chats) == 2  # one id for two calls: a careless server


def test_what_was_below_a_merged_span_has_the_agent_of_the_one_that_stays() -> None:
    other = "f" * 32
    theirs = [
        span("proxy", operation="http", trace_id=other, start_ns=0),
        chat("theirs", "proxy", "r1", trace_id=other),
    ]
    below = span("below", "theirs", "http", trace_id=other)
    agent = span("agent", operation=INVOKE_AGENT, agent="writer", start_ns=3)
    mine = chat("mine", "agent", "r1", start_ns=5, end_ns=10**9)
    trace = Trace.build([*theirs, below, agent, mine])
    assert next(node.span for node in trace if node.span.span_id == "below").agent == "writer"


def test_nested_model_calls_stay_apart() -> None:
    outer = chat("outer", None, "r1", end_ns=10**6, attributes={FRAMEWORK: "openai"})
    tool = span("tool", "outer", EXECUTE_TOOL)
    plain = chat("plain", "tool", attributes={FRAMEWORK: "openai"})
    direct = chat("direct", "outer", "r2", attributes={FRAMEWORK: "other"})
    assert len(Trace.build([outer, tool, plain, direct]).chats) == 3
    wrapper = chat("wrapper", attributes={FRAMEWORK: "other"})
    inside = [chat(f"in{n}", "wrapper", f"r{n}", attributes={FRAMEWORK: "openai"}) for n in range(2)]
    assert len(Trace.build([wrapper, *inside]).chats) == 3


def test_equal_prompts_are_all_kept() -> None:
    votes = [call(f"r{n}", f"{n}", request={"messages": ["same"]}) for n in range(4)]
    assert len(Trace.build([chat(f"{n}", None, f"r{n}") for n in range(4)], votes).chats) == 4


def test_what_a_span_lacks_it_has_from_its_ancestors() -> None:
    root = span("root", operation="graph", rollout_id="r", attempt_id="a")
    agent = span("agent", "root", INVOKE_AGENT, agent="writer")
    trace = Trace.build([root, agent, chat("x", "agent"), span("tool", "agent", EXECUTE_TOOL), chat("y", "tool")])
    by_id = {node.span.span_id: node.span for node in trace}
    assert [by_id[name].agent for name in ("root", "agent", "x", "tool", "y")] == [None] + ["writer"] * 4
    assert {(each.rollout_id, each.attempt_id) for each in by_id.values()} == {("r", "a")}
    assert (trace.rollout_id, trace.attempt_id, trace.agents) == ("r", "a", ("writer",))


def test_the_name_on_the_span_goes_before_its_ancestors_and_its_calls() -> None:
    spans = [span("agent", operation=INVOKE_AGENT, agent="outer"), chat("named", "agent", "r1", agent="inner")]
    spans += [chat("unnamed", "agent", "r2"), chat("alone", None, "r3")]
    calls = [call(f"r{n}", agent="from the key") for n in (1, 2, 3)]
    assert [node.span.agent for node in Trace.build(spans, calls).chats] == ["inner", "outer", "from the key"]


def test_json_lines_have_the_keys_of_the_interface() -> None:
    root = span("root", operation=INVOKE_AGENT, rollout_id="r", attempt_id="a", agent="writer")
    tool = span("tool", "root", EXECUTE_TOOL, status="error", status_message="no such city", attributes={"a": [1]})
    calls = [call("r1", "x", call_id="c1")]
    lines = Trace.build([root, tool, chat("x", "root", "r1"), chat("y", "root")], calls).to_json_lines()
    keys = {
        "operation", "name", "agent", "trace_id", "span_id", "parent_id", "rollout_id", "attempt_id", "start_ns",
        "end_ns", "status", "attributes",
    }  # fmt: skip
    tokens = {"call_id", "response_id", "prompt_token_ids", "response_token_ids", "logprobs", "policy_version"}
    assert [set(line) for line in lines] == [keys, keys | {"status_message"}, keys | tokens, keys | tokens]
    assert lines[0]["parent_id"] is None
    assert lines[1]["attributes"] == {"a": [1]}
    joined, unseen = ({name: line[name] for name in tokens} for line in lines[2:])
    assert joined == {
        "call_id": "c1", "response_id": "r1", "prompt_token_ids": [1, 2], "response_token_ids": [3, 4],
        "logprobs": [-0.1, -0.2], "policy_version": 3,
    }  # fmt: skip
    assert unseen == dict.fromkeys(tokens)
    assert json.loads(json.dumps(lines)) == lines


def test_json_lines_lose_no_choice() -> None:
    choices = tuple(Choice(n, (n, 9), (-0.5, -0.25), "stop", {"content": str(n)}) for n in range(3))
    (line,) = Trace.build([chat("a", None, "r1")], [call("r1", choices=choices)]).to_json_lines()
    assert line["response_token_ids"] == [0, 9]
    assert [choice["response_token_ids"] for choice in line["choices"]] == [[0, 9], [1, 9], [2, 9]]
    assert [choice["index"] for choice in line["choices"]] == [0, 1, 2]


def response(**changes: Any) -> str:
    content = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]
    choice = {"index": 0, "message": {"role": "assistant", "content": "ab"}, "finish_reason": "stop"}
    choice |= {"token_ids": [7, 8], "logprobs": {"content": content}}
    return json.dumps({"id": "r1", "model": "m", "prompt_token_ids": [1, 2, 3], "choices": [choice], **changes})


@pytest.mark.parametrize("inside", [False, True])
def test_without_a_gateway_tokens_come_from_the_response_as_vllm_sends_them(inside: bool) -> None:
    body = json.loads(response())
    if inside:
        body["choices"][0]["prompt_token_ids"] = body.pop("prompt_token_ids")
    (line,) = Trace.build([chat("a", attributes={RESPONSE: json.dumps(body)})]).to_json_lines()
    assert (line["response_id"], line["prompt_token_ids"], line["response_token_ids"], line["logprobs"]) == (
        "r1", [1, 2, 3], [7, 8], [-0.5, -0.25],
    )  # fmt: skip
    assert line["policy_version"] is None


def test_a_gateways_record_goes_before_the_response() -> None:
    recorded = call("r1", "a", choices=(Choice(0, (5,), (-1.0,), "stop"),))
    (line,) = Trace.build([chat("a", attributes={RESPONSE: response()})], [recorded]).to_json_lines()
    assert (line["prompt_token_ids"], line["response_token_ids"]) == ([1, 2], [5])


@pytest.mark.parametrize(
    "text",
    [
        "no json", "[]", "3", 3, "{}", '{"choices": 3, "id": 4}', '{"choices": [null, 3]}',
        '{"choices": [{"token_ids": ["a"], "logprobs": {"content": [{}]}, "message": 3, "index": null}]}',
        '{"choices": [{"token_ids": [1.5], "logprobs": {"content": null}}], "prompt_token_ids": [null]}',
        '{"choices": [{"token_ids": 5, "logprobs": 5, "finish_reason": 3}], "prompt_token_ids": {"a": 1}}',
    ],
)  # fmt: skip
def test_a_malformed_response_is_no_tokens_and_no_error(text: Any) -> None:
    (line,) = Trace.build([chat("a", attributes={RESPONSE: text})]).to_json_lines()
    names = ("response_id", "prompt_token_ids", "response_token_ids", "logprobs")
    assert [line[name] for name in names] == [None] * 4


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqlStore]:
    store = SqlStore(f"sqlite:///{tmp_path}/lightning.db")
    yield store
    store.close()


def test_traces_are_read_one_for_each_attempt(store: SqlStore) -> None:
    store.enqueue([a_rollout(rollout_id="r1", max_attempts=2), a_rollout(rollout_id="r2"), a_rollout(rollout_id="r3")])
    first, second, silent = store.claim("worker", limit=3)
    ours = {"rollout_id": "r1", "attempt_id": first.attempt_id}
    store.add_spans([span("root", operation=INVOKE_AGENT, agent="writer", **ours), chat("x", "root", "c1", **ours)])
    store.add_spans([chat("foreign", "root", "c2")])  # another instrumentation's: does not know the attempt
    store.add_calls([call("c1", "x", **ours), call("c2", "foreign"), call("c3", rollout_id="r2", attempt_id="r2.1")])
    store.add_rewards([a_reward(**ours)])
    one, two, three = traces_of(store)
    assert [trace.attempt_id for trace in (one, two, three)] == ["r1.1", "r2.1", "r3.1"]
    assert (len(one.chats), len(one.rewards), one.unjoined) == (2, 1, ())
    assert {node.span.agent for node in one} == {"writer"}
    assert (len(two.chats), two.rollout_id) == (1, "r2")
    assert (len(three), three.rollout_id) == (0, "r3")
    for filters in ({"attempt_ids": [first.attempt_id]}, {"rollout_ids": ["r1"]}):
        (again,) = traces_of(store, **filters)
        assert (ids(list(again)), len(again.rewards)) == (ids(list(one)), 1)
    assert [trace.rollout_id for trace in traces_of(store, rollout_ids=["r2", "r3"])] == ["r2", "r3"]
    assert traces_of(store, attempt_ids=[]) == []
    assert {second.attempt_id, silent.attempt_id} == {"r2.1", "r3.1"}


def test_a_retry_is_another_trace(store: SqlStore) -> None:
    store.enqueue([a_rollout(rollout_id="r")])
    for _ in range(2):
        (attempt,) = store.claim("worker")
        store.add_spans([span(an_id(), rollout_id="r", attempt_id=attempt.attempt_id, trace_id=an_id())])
        store.finish(attempt.attempt_id, attempt.fence, status="failed")
    assert [len(trace) for trace in traces_of(store, rollout_ids=["r"])] == [1, 1]


def test_spans_of_no_attempt_give_a_trace_for_each_trace_id(store: SqlStore) -> None:
    store.add_spans([span("a"), chat("b", "a"), span("c", trace_id="f" * 32)])
    store.add_calls([call("r1", "b"), call("r2")])
    assert sorted(len(trace) for trace in traces_of(store)) == [1, 1, 2]
    assert all(trace.attempt_id is None for trace in traces_of(store))


def test_the_newest_traces_come_first_and_the_others_are_not_read(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.enqueue([a_rollout(rollout_id=f"r{number}") for number in range(2)])
    store.claim("worker", limit=2)  # attempts of now, with nothing recorded
    for number in range(500):
        name = f"a{number}" if number % 2 else None
        store.add_spans([a_span(start_ns=number, end_ns=number, trace_id=f"{number:032}", attempt_id=name)])
    store.add_calls([call("alone")])
    store.add_rewards([a_reward(attempt_id="a1"), a_reward(attempt_id="only a reward")])
    newest = list(newest_traces(store))
    assert sorted(map(content, newest)) == sorted(map(content, traces_of(store)))
    assert [trace.attempt_id for trace in newest[:2]] == ["r1.1", "r0.1"]
    spans = [node.span.start_ns for trace in newest for node in trace if trace.chats == []]
    assert spans == sorted(spans, reverse=True)
    assert newest[-1].attempt_id == "only a reward"
    read: list[int] = []
    page = SqlStore.page

    def count(*args: Any, **given: Any) -> Any:
        found = page(*args, **given)
        read.append(len(found.records))
        return found

    monkeypatch.setattr(SqlStore, "page", count)
    assert len(list(islice(newest_traces(store), 5))) == 5
    assert sum(read) < 250


def content(trace: Trace) -> tuple[str, list[str], int]:
    return trace.attempt_id or "", ids(list(trace)), len(trace.rewards)


def test_several_attempts_under_one_outer_span_are_told_apart(store: SqlStore) -> None:
    store.add_spans([span("outer", operation="user's own")])
    for name in ("a", "b"):
        store.add_spans([span(name, "outer", INVOKE_AGENT, attempt_id=name, rollout_id=name), chat(f"{name}1", name)])
    traces = {trace.attempt_id: ids(list(trace)) for trace in traces_of(store)}
    assert traces == {"a": ["a", "a1"], "b": ["b", "b1"], None: ["outer"]}
    (only,) = traces_of(store, attempt_ids=["a"])
    assert ids(list(only)) == ["a", "a1"]


def test_an_outer_span_around_one_attempt_belongs_to_it(store: SqlStore) -> None:
    store.add_spans([span("outer", operation="user's own"), span("a", "outer", attempt_id="a", rollout_id="r")])
    assert [ids(list(trace)) for trace in traces_of(store)] == [["outer", "a"]]
    assert [ids(list(trace)) for trace in traces_of(store, rollout_ids=["r"])] == [["outer", "a"]]


ASKED = '{"messages": [{"role": "user", "content": "hi"}]}'


def asked(span_id: str, agent: str | None = "writer", request: str = ASKED, **changes: Any) -> Span:
    """A chat span that had no answer, such as one whose stream was left."""
    return chat(span_id, agent=agent, attributes={REQUEST: request}, **changes)


def named(response_id: str, agent: str | None = "writer", **changes: Any) -> Call:
    return call(response_id, agent=agent, request={"messages": [{"role": "user", "content": "hi"}]}, **changes)


def test_without_traceparent_and_response_id_the_key_and_the_agents_name_join() -> None:
    calls = [named("r1"), named("r2")]
    trace = Trace.build([asked("a"), asked("b"), asked("c", "editor")], calls)
    assert [node.call for node in trace.chats] == [*calls, None]
    above = span("agent", operation=INVOKE_AGENT, agent="writer")
    assert Trace.build([above, asked("a", None, parent_id="agent")], [calls[0]]).chats[0].call == calls[0]


def test_a_name_that_leaves_a_choice_joins_nothing_and_says_so() -> None:
    tried, calls = asked("a"), [named("r1"), named("r2")]
    trace = Trace.build([tried], calls)
    assert [node.call for node in trace.chats] == [None, *calls]
    assert [half.reason.slug for half in trace.unjoined] == ["not_recorded_by_the_gateway", *["several_spans"] * 2]
    failed = named("x", error="500")
    trace = Trace.build([asked("a")], [failed, calls[0]])
    assert [node.call for node in trace.chats] == [calls[0]]
    assert [(half.reason, half.call) for half in trace.unjoined] == [(MissingHalf.SPARE, failed)]


@pytest.mark.parametrize(
    ("spans", "lone", "why"),
    [
        ([asked("a", request='{"messages": []}')], named("r1"), MissingHalf.NO_SPAN),
        ([asked("a", "editor")], named("r1"), MissingHalf.NO_SPAN),
        ([asked("a")], named("r1", None), MissingHalf.UNNAMED),
        ([asked("a")], named("r1", span_id="never delivered"), MissingHalf.NO_SPAN),
        ([chat("a", None, "r9", agent="writer", attributes={REQUEST: ASKED})], named("r1"), MissingHalf.NO_SPAN),
    ],
)
def test_what_does_not_fit_is_not_joined_by_name(spans: list[Span], lone: Call, why: str) -> None:
    trace = Trace.build(spans, [lone])
    assert len(trace.chats) == 2
    assert trace.chats[0].call is None or trace.chats[1].call is None
    assert why in [half.reason for half in trace.unjoined]


@given(st.data())
def test_every_call_is_one_chat_node_or_a_try_of_one(data: st.DataObject) -> None:
    """Whatever headers, ids and names calls come with, each is told once: at one node, or as a spare try."""
    some = st.sampled_from([None, "r1", "r2", "r3"])
    agents = st.sampled_from([None, "writer", "editor"])
    spans = [
        chat(
            f"s{n}",
            data.draw(st.sampled_from([None, "s0", "s1", "lost"])),
            data.draw(some),
            agent=data.draw(agents),
            attributes={FRAMEWORK: data.draw(st.sampled_from(["openai", "proxy"])), REQUEST: ASKED},
        )
        for n in range(data.draw(st.integers(0, 4)))
    ]
    calls = [
        named(
            data.draw(some) or "r0",
            data.draw(agents),
            span_id=data.draw(st.sampled_from([None, "s0", "s1", "lost"])),
            error=data.draw(st.sampled_from([None, "500"])),
        )
        for _ in range(data.draw(st.integers(0, 5)))
    ]
    trace = Trace.build(spans, calls)
    at_nodes = [node.call.call_id for node in trace.chats if node.call is not None]
    spare = [half.call.call_id for half in trace.unjoined if half.reason == MissingHalf.SPARE and half.call is not None]
    assert sorted(at_nodes + spare) == sorted(each.call_id for each in calls)
    counted = count_joins([trace])
    assert counted.calls == len(trace.chats)
    both = [n for n in trace.chats if n.call is not None and n.span.attributes.get(FRAMEWORK) != "gateway"]
    assert counted.joined == len(both)


def test_a_forged_traceparent_reaches_no_other_attempt(store: SqlStore) -> None:
    victim = span("victim", rollout_id="r", attempt_id="b", agent="writer")
    theirs = call("r1", "victim", rollout_id="r", attempt_id="b")
    forged = call("r2", "victim", rollout_id="r", attempt_id="a", agent="thief")
    store.add_spans([victim])
    store.add_calls([theirs, forged])
    for read in ({"attempt_ids": ["a"]}, {"attempt_ids": ["b"]}, {}):
        by_attempt = {trace.attempt_id: trace for trace in traces_of(store, **read)}
        for attempt, own in (("a", forged), ("b", theirs)):
            if attempt in by_attempt:
                (node,) = by_attempt[attempt].chats
                assert node.call == own
                assert node.span.attempt_id == attempt
    (lone,) = traces_of(store, attempt_ids=["a"])[0].unjoined
    assert lone.reason == MissingHalf.NO_SPAN
