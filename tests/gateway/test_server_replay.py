"""Replays at the gateway: every surface, streams, choices, errors and tools get their recorded answers."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from lightning_spans.errors import ConfigError
from lightning_spans.schema import spans as names
from lightning_spans.schema.replays import Replay
from lightning_spans.schema.spans import Span
from lightning_trainer.gateway.replay.record import read_record
from lightning_trainer.gateway.replay.requests import difference, read_request
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.kits.forks import RecordedAttempt, plan
from lightning_trainer.naming import parse_rules
from support.fakes import FakeEngine, served

USER = [{"role": "user", "content": "What is 12+7?"}]
MORE = [*USER, {"role": "assistant", "content": "19"}, {"role": "user", "content": "And 1 more?"}]
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression":"12+7"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("replay"), FakeEngine(version=7)) as running:
        yield running


@pytest.fixture
def record(request, server):
    """The name of an attempt to be replayed."""
    server.engine.play(())
    server.engine.prompts.clear()
    server.app.state.routing = Routing(agents=("*",), seed=1)
    return request.node.name


def client(server, attempt, *, agent="writer", replay=None, **options):
    key = server.key(attempt, agent=agent, replay=replay)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=2, **options)


def again(server, record, *, agent="writer", **asked):
    """A client of a replay of the record; by default of all of it."""
    name = f"{record} again {json.dumps(asked, sort_keys=True)}"
    return client(server, name, agent=agent, replay=Replay(attempt_id=record, **asked))


def plain(reply: Any) -> dict[str, Any]:
    told: dict[str, Any] = reply.model_dump()
    return {name: value for name, value in told.items() if name not in {"created", "created_at", "completed_at"}}


def ask(model: openai.OpenAI, **more: Any) -> Any:
    return model.chat.completions.create(**{"model": "policy", "messages": USER, **more})


def test_a_chat_completion_is_given_again_with_its_tokens(server, record):
    server.engine.play([f"Let me count. {CALL}", "12+7 is 19"])
    with client(server, record) as live, again(server, record) as replay:
        asked = {"tools": TOOLS, "logprobs": True, "extra_body": {"return_token_ids": True}, "n": 2}
        first, second = ask(live, **asked), ask(replay, **asked)
        assert plain(first) == plain(second)
    assert len(server.engine.prompts) == 2  # two choices, drawn once
    old, new = server.calls(record), [c for c in server.store.calls() if c.sampling.get("replayed")]
    assert old[0].choices == new[-1].choices
    assert old[0].prompt_token_ids == new[-1].prompt_token_ids
    assert new[-1].sampling == {**old[0].sampling, "replayed": old[0].call_id}


def test_streams_give_the_same_on_every_surface(server, record):
    server.engine.play(lambda prompt: f"Let me count. {CALL}" if "calculator" in prompt else "two words")
    with client(server, record) as live, again(server, record) as replay:
        told = []
        for each in (live, replay):
            with each.chat.completions.stream(model="policy", messages=USER, tools=TOOLS) as stream:
                chat = stream.get_final_completion().choices[0].message
            events = list(each.responses.create(model="policy", input="Hello", stream=True))
            texts = each.completions.create(model="policy", prompt="Once", stream=True, max_tokens=9)
            text = "".join(chunk.choices[0].text for chunk in texts if chunk.choices)
            told.append((chat.content, chat.tool_calls, events[-1].response.output, events[-1].response.usage, text))
        assert told[0] == told[1]
    assert len(server.engine.prompts) == 3


def test_messages_responses_and_completions_are_given_again_whole(server, record):
    server.engine.play(["one answer", "two answer", "three answer"])
    for replay in (None, Replay(attempt_id=record)):
        name = record if replay is None else f"{record} again"
        with client(server, name, replay=replay) as mine:
            body = {"model": "policy", "max_tokens": 20, "messages": USER}
            found = httpx.post(f"{server.url}/v1/messages", json=body, headers={"x-api-key": mine.api_key}).json()
            found.pop("created", None)
            response = mine.responses.create(model="policy", input="Hello")
            then = mine.responses.create(model="policy", input="Again", previous_response_id=response.id)
            if replay is None:
                first = (found, response.output_text, then.output_text, response.id)
    assert first == (found, response.output_text, then.output_text, response.id)
    assert first[0]["content"][0]["text"] == "one answer"
    assert first[1:3] == ("two answer", "three answer")


def test_a_recorded_error_is_given_again_once(server, record):
    with client(server, record) as live, again(server, record) as replay:
        errors = []
        for each in (live, replay):
            with pytest.raises(openai.BadRequestError) as raised:
                ask(each, temperature=1000)
            errors.append((raised.value.status_code, raised.value.code, raised.value.body))
            ask(each)
        assert errors[0] == errors[1]


def test_the_forked_call_is_drawn_after_the_tokens_of_those_before_it(server, record):
    server.engine.play(["19", "20"])
    with client(server, record) as live:
        ask(live)
        ask(live, messages=MORE)
    old = server.calls(record)
    server.engine.play(["21"])
    with again(server, record, call=1) as fork:
        assert ask(fork).choices[0].message.content == "19"
        assert ask(fork, messages=MORE).choices[0].message.content == "21"
    new = [call for call in server.store.calls() if call.sampling.get("forked") == old[1].call_id]
    assert new[0].prompt_token_ids == old[1].prompt_token_ids
    assert new[0].sampling["seeds"] != old[1].sampling["seeds"]


def test_alternatives_draw_differently_and_repeat(server, record):
    with client(server, record) as live:
        ask(live)
    seeds = []
    for number in (0, 0, 1):
        key = f"{record} {len(seeds)}"
        with client(server, key, replay=Replay(attempt_id=record, call=0, draw=number)) as fork:
            ask(fork)
        seeds.append(server.calls(key)[0].sampling["seeds"])
    assert seeds[0] == seeds[1] != seeds[2]


def test_after_the_fork_equal_requests_are_answered_from_the_record_where_coupled(server, record):
    with client(server, record) as live:
        server.engine.play(["19", "other"])
        ask(live)
        ask(live, messages=[{"role": "user", "content": "Something else"}])
    for coupled in (True, False):
        server.engine.play(["18", "drawn anew"])
        with again(server, record, call=0, coupled=coupled) as fork:
            assert ask(fork).choices[0].message.content == "18"
            told = ask(fork, messages=[{"role": "user", "content": "Something else"}]).choices[0].message.content
            assert told == ("other" if coupled else "drawn anew")


def test_another_policy_stands_in_for_an_agent_and_says_the_same_to_the_same_in_every_replay(server, record):
    server.engine.play(["of one", "of two"])
    headers = [{"x-lightning-agent": name} for name in ("one", "two")]
    with client(server, record, agent=None) as live:
        for each in headers:
            ask(live, extra_headers=each)
    seeds = []
    for fresh in (("one",), ("one", "two")):
        server.engine.play(["drawn anew", "and this"])
        with again(server, record, agent=None, beyond="sample", fresh=fresh, model="policy") as replay:
            told = [ask(replay, extra_headers=each).choices[0].message.content for each in headers]
        assert told == (["drawn anew", "of two"] if fresh == ("one",) else ["drawn anew", "and this"])
        calls = [c for c in server.store.calls() if c.agent == "one" and c.sampling.get("seeds")]
        seeds.append(calls[-1].sampling["seeds"])
    assert seeds[0] == seeds[1] != server.calls(record)[0].sampling["seeds"]
    with again(server, record, agent=None, beyond="sample", fresh=("two",), model="nowhere") as replay:
        assert ask(replay, extra_headers=headers[0]).choices[0].message.content == "of one"
        with pytest.raises(openai.NotFoundError, match="no model 'nowhere' here"):
            ask(replay, extra_headers=headers[1])


def test_a_text_stands_in_the_place_of_an_answer(server, record):
    with client(server, record) as live:
        ask(live)
    with again(server, record, call=0, say="my own words") as fork:
        assert ask(fork).choices[0].message.content == "my own words"
        assert server.store.calls()[-1].choices[0].token_ids is None


def test_a_text_stands_in_the_place_of_a_response_to_a_conversation_of_another_endpoint(server, record):
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed"}
    message["content"] = [{"type": "output_text", "text": "theirs", "annotations": []}]
    answer = {"id": "resp_theirs", "object": "response", "created_at": 1, "status": "completed", "model": "gpt"}
    answer |= {"output": [message], "tools": [], "tool_choice": "auto", "parallel_tool_calls": True}
    asked = {"model": "gpt", "input": "And?", "previous_response_id": "resp_before"}
    server.store.add_spans([a_chat(record, "/responses", asked, answer)])
    with again(server, record, call=0, say="mine") as fork:
        assert fork.responses.create(**asked).output_text == "mine"


def test_the_first_difference_ends_a_replay_for_good(server, record):
    with client(server, record) as live:
        ask(live)
    with again(server, record) as replay:
        other = [{"role": "user", "content": "What is 12+8?"}]
        with pytest.raises(openai.ConflictError, match=r"message 1 \(user\) differs: a number, now '12\+8"):
            ask(replay, messages=other)
        with pytest.raises(openai.ConflictError, match="message 1"):
            ask(replay)  # as recorded, and too late


def test_agents_are_told_apart(server, record):
    server.engine.play(["of one", "of two"])
    with client(server, record, agent=None) as live:
        for name in ("one", "two"):
            ask(live, extra_headers={"x-lightning-agent": name})
    with again(server, record, agent=None) as replay:
        found = [
            ask(replay, extra_headers={"x-lightning-agent": name}).choices[0].message.content for name in ("two", "one")
        ]
        with pytest.raises(openai.ConflictError, match="the record has no call of `three`; it has calls of one, two"):
            ask(replay, extra_headers={"x-lightning-agent": "three"})
    assert found == ["of two", "of one"]


@pytest.mark.parametrize(
    ("path", "titled"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "You are a title generator."}, *USER]}),
        ("/v1/messages", {"messages": USER, "system": "You are a title generator."}),
    ],
)
def test_agents_that_rules_name_are_told_apart(server, record, path, titled):
    rules = parse_rules(["title=system:title generator"])
    server.app.state.routing = Routing(agents=("*",), seed=1, unnamed="agent", name_by=rules)
    server.engine.play(["a title", "an answer"])

    def told(attempt, replay=None):
        headers = {"authorization": f"Bearer {server.key(attempt, agent='agent', replay=replay)}"}
        for body in (titled, {"messages": USER}):
            asked = {"model": "policy", "max_tokens": 20, **body}
            reply = httpx.post(f"{server.url}{path}", json=asked, headers=headers)
            assert reply.status_code == 200, reply.text
        return [(call.agent, call.choices[0].message["content"]) for call in server.calls(attempt)]

    recorded = told(record)
    assert recorded == [("title", "a title"), ("agent", "an answer")]
    assert told(f"{record} again", Replay(attempt_id=record)) == recorded


def test_namesakes_are_told_apart_by_where_they_stand(server, record):
    server.engine.play(["of billing", "of profile"])
    paths = ["billing/extract", "profile/extract"]
    with client(server, record, agent=None) as live:
        for path in paths:
            ask(live, extra_headers={"x-lightning-agent": path})
    with again(server, record, agent=None) as replay:
        found = {
            path: ask(replay, extra_headers={"x-lightning-agent": path}).choices[0].message.content
            for path in reversed(paths)
        }
    assert found == {"billing/extract": "of billing", "profile/extract": "of profile"}


def test_calls_of_other_agents_are_left_to_their_own_endpoint_after_the_fork(server, record):
    server.app.state.routing = Routing(agents=("writer",))
    with client(server, record) as live:
        ask(live)
    with again(server, record, call=0) as fork:
        ask(fork)
        headers = {"x-lightning-agent": "stranger", "x-lightning-replay": "asks"}
        with pytest.raises(openai.APIStatusError) as raised:
            ask(fork, messages=MORE, extra_headers=headers)
        assert raised.value.status_code == 421
        assert raised.value.response.headers["x-lightning-replay"] == "own"


def a_chat(attempt: str, path: str, request: Any, response: Any) -> Span:
    """The span of a call that an agent's own endpoint answered."""
    now = time.time_ns()
    told = {
        names.FRAMEWORK: "openai",
        names.ENDPOINT: path,
        names.REQUEST: json.dumps(request),
        names.RESPONSE: json.dumps(response),
        names.RESPONSE_ID: response["id"],
    }
    known = {"trace_id": "ab" * 16, "span_id": f"{now % 2**64:016x}", "start_ns": now, "end_ns": now + 1}
    return Span(operation="chat", name="gpt", agent="writer", attempt_id=attempt, attributes=told, status="ok", **known)


def test_an_own_endpoints_responses_come_back_as_they_were(server, record):
    tool = {"type": "web_search"}  # which no gateway takes
    output = [
        {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "found it here", "annotations": [], "logprobs": []}],
        }
    ]
    answer = {"id": "resp_own", "object": "response", "created_at": 1, "status": "completed", "model": "gpt"}
    answer |= {"output": output, "tools": [tool], "tool_choice": "auto", "parallel_tool_calls": True}
    asked = {"model": "gpt", "input": "Search", "tools": [tool]}
    server.store.add_spans([a_chat(record, "/responses", asked, answer)])
    server.store.add_spans([a_chat(record, "/responses", {**asked, "previous_response_id": "resp_own"}, answer)])
    with again(server, record) as replay:
        whole = replay.responses.create(**asked)
        assert (whole.id, whole.output_text) == ("resp_own", "found it here")
        events = list(replay.responses.create(**asked, previous_response_id="resp_own", stream=True))
        assert events[-1].response.output_text == "found it here"
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "found it here"


def test_a_call_of_a_client_that_no_gateway_sees_can_not_be_given_again(server, record):
    body = {"model": "claude", "messages": USER}
    answer = {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": "19"}}]}
    for framework, given in (("openai", True), ("litellm", True), ("langchain", False)):
        attempt = f"{record} {framework}"
        span = a_chat(attempt, "/chat/completions", body, answer)
        server.store.add_spans([replace(span, attributes={**span.attributes, names.FRAMEWORK: framework})])
        whole = RecordedAttempt(read_record(server.store, attempt), task={})
        if given:
            assert plan(whole, name="all", replay=Replay(attempt_id=attempt))
            continue
        with pytest.raises(
            ConfigError, match=r"call 0 \(writer\) can't be replayed: it was made with langchain, whose"
        ):
            plan(whole, name="all", replay=Replay(attempt_id=attempt))
        with pytest.raises(ConfigError, match="has no recorded tokens"):  # the forked call itself is not given
            plan(whole, name="it", replay=Replay(attempt_id=attempt, call=0))
        assert plan(whole, name="it", replay=Replay(attempt_id=attempt, call=0), tokens=False)


def a_tool(attempt: str, name: str, arguments: Any, **told: Any) -> Span:
    now = time.time_ns()
    known = {"trace_id": "cd" * 16, "span_id": f"{now % 2**64:016x}", "start_ns": now, "end_ns": now + 1}
    failed = told.pop("error", None)
    about = {names.TOOL_NAME: name, names.TOOL_ARGUMENTS: json.dumps(arguments), **told}
    status: Any = {"status": "error", "status_message": failed} if failed else {"status": "ok"}
    return Span(operation="execute_tool", name=name, attempt_id=attempt, attributes=about, **status, **known)


def tool(server, key, name, arguments, **more):
    asked = {"agent": "writer", "name": name, "call_id": None, "arguments": arguments, **more}
    return httpx.post(f"{server.url}/v1/replay/tool", json=asked, headers={"authorization": f"Bearer {key}"})


def test_tools_get_their_recorded_results_once_each(server, record):
    with client(server, record) as live:
        ask(live)
    results = {names.TOOL_RESULT: "sunny"}
    server.store.add_spans([a_tool(record, "weather", {"at": "Rome", "day": 1}, **results)])
    server.store.add_spans([a_tool(record, "fails", {}, error="no such thing")])
    key = server.key(f"{record} again", replay=Replay(attempt_id=record))
    given = tool(server, key, "weather", '{"day": 1, "at": "Rome"}').json()
    assert (given["do"], given["status"], given["result"]) == ("give", "ok", "sunny")
    failed = tool(server, key, "fails", "").json()
    assert (failed["status"], failed["error"]) == ("error", "no such thing")
    refused = tool(server, key, "weather", '{"day": 1, "at": "Rome"}')
    assert refused.status_code == 409
    assert "once more than in the record" in refused.json()["error"]["message"]
    key = server.key(f"{record} run", replay=Replay(attempt_id=record, run_tools=("wea*",)))
    assert tool(server, key, "weather", '{"at": "Oslo"}').json() == {"do": "run"}
    key = server.key(
        f"{record} fork", agent="writer", replay=Replay(attempt_id=record, call=0, refuse_tools=("fails",))
    )
    assert tool(server, key, "weather", '{"at": "Oslo"}').status_code == 409  # before the fork


def test_after_the_fork_a_tool_that_is_not_recorded_runs_unless_it_is_refused(server, record):
    with client(server, record) as live:
        ask(live)
    key = server.key(f"{record} fork", agent="writer", replay=Replay(attempt_id=record, call=0))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key) as fork:
        ask(fork)
    assert tool(server, key, "weather", "{}").json() == {"do": "run"}
    assert tool(server, key, "mark", "{}", side_effects=True).status_code == 409
    assert "`mark`, which is not in the record" in tool(server, key, "weather", "{}").json()["error"]["message"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "it is 12:03:04",
            "it is 12:03:09",
            "message 1 (user) differs: a time of day, now '12:03:09' and was '12:03:04'",
        ),
        ("on 2026-01-02 all", "on 2026-02-03 all", "a date"),
        ("at 2026-01-02T03:04:05.1 now", "at 2026-01-02T03:04:06.2 now", "a time of day"),
        ("at 2026-01-02 23:59:59 now", "at 2026-01-03 00:00:01 now", "a date and time"),
        ("p is 0.1952059302602206", "p is 0.9516579435372651", "a number"),
        ("run 3f2a9c1b", "run 77be01d4", "an id"),
        ("one of red, blue, green", "one of green, red, blue", "the order of the same words"),
        ("at 0x7f0012345678", "at 0x7f00abcdef99", "an address in memory"),
        ("id 123e4567-e89b-12d3-a456-426614174000", "id 923e4567-e89b-12d3-a456-426614174009", "an id"),
        ("two cats", "two dogs", "it is 'dogs' and was 'cats'"),
    ],
)
def test_the_difference_says_what_it_is(old, new, said):
    one, other = (read_request({"messages": [{"role": "user", "content": text}]}) for text in (old, new))
    assert said in difference(one, other)


def test_what_does_not_matter_is_no_difference():
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1, "b": 2}'}}
    one = {"model": "a", "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "stream": True}
    moved = {**call, "id": "call_9", "function": {"name": "f", "arguments": '{"b":2,"a":1}'}}
    other = {"model": "b", "messages": [{"role": "assistant", "content": "", "tool_calls": [moved]}], "seed": 5, "n": 1}
    assert read_request(one).key == read_request(other).key
    hot = read_request({**one, "temperature": 0.5})
    assert difference(read_request(one), hot) == "its parameters differ: temperature is new"


def test_results_of_tools_count_in_whatever_order_they_were_told():
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in "ab"]
    first = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": name, "content": f"of {name}"} for name in "ab"]
    exchanged = [{**results[0], "content": "of b"}, {**results[1], "content": "of a"}]
    one, moved, other = (read_request({"messages": [first, *told]}) for told in (results, results[::-1], exchanged))
    assert one.key == moved.key != other.key
