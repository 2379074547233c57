"""The gateway over the embedded engine, seen through the real openai client."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace

import httpx
import openai
import pytest

from lightning_spans.errors import StoreError
from lightning_trainer.gateway.settings import Routing
from support.fakes import PLAIN_TEMPLATE, ByteTokenizer, FakeEngine, fake_logprob, served

USER = [{"role": "user", "content": "What is 12+7?"}]
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression":"12+7"}}\n</tool_call>'


def test_an_answer_is_recorded_with_the_engines_own_tokens(server, attempt, client):
    server.engine.play(["12+7 is 19"])
    reply = client.chat.completions.create(model="policy", messages=USER, temperature=0.5, max_tokens=50)
    (call,) = server.calls(attempt)
    (choice,) = call.choices
    ids = (*b"12+7 is 19", ByteTokenizer.eos_token_id)
    assert reply.choices[0].message.content == "12+7 is 19"
    assert reply.choices[0].finish_reason == choice.finish_reason == "stop"
    assert call.response_id == reply.id
    assert call.prompt_token_ids == server.engine.prompts[0]
    assert choice.token_ids == ids
    assert choice.logprobs == pytest.approx([fake_logprob(token) for token in ids])
    assert choice.message == {"role": "assistant", "content": "12+7 is 19"}
    assert (call.rollout_id, call.attempt_id) == (f"rollout of {attempt}", attempt)
    assert (call.policy, call.policy_version, call.error) == ("policy", 7, None)
    assert call.request["messages"] == USER
    assert (call.sampling["temperature"], call.sampling["max_tokens"], call.sampling["top_p"]) == (0.5, 50, 1.0)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(call.prompt_token_ids), len(ids))


def test_a_stream_gives_the_same_message_and_the_same_record(server, attempt, client):
    server.engine.play(lambda _: "Hello, wörld!")
    whole = client.chat.completions.create(model="policy", messages=USER)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model="policy", messages=USER, **options))
    first, second = server.calls(attempt)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) > 2
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage
    assert {c.id for c in chunks} == {second.response_id}
    assert first.choices == second.choices
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_the_async_client_streams_and_many_at_once_are_all_kept(server, attempt):
    server.engine.play(lambda prompt: prompt.split("user\n")[1].split("<|im_end|>")[0])
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key(attempt)) as client:

        async def ask(number):
            messages = [{"role": "user", "content": f"number {number}"}]
            stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        answers = await asyncio.gather(*(ask(number) for number in range(30)))
    assert answers == [f"number {number}" for number in range(30)]
    assert sorted(call.choices[0].message["content"] for call in server.calls(attempt)) == sorted(answers)


def test_n_answers_are_all_kept_each_with_a_seed_of_its_own(server, attempt, client):
    server.engine.play(["one", "two", "three"])
    reply = client.chat.completions.create(model="policy", messages=USER, n=3)
    (call,) = server.calls(attempt)
    assert [choice.message.content for choice in reply.choices] == [c.message["content"] for c in call.choices]
    assert sorted(choice.message.content for choice in reply.choices) == ["one", "three", "two"]
    assert len({sampling.seed for sampling in server.engine.samplings}) == 3
    assert call.sampling["seeds"] == [sampling.seed for sampling in server.engine.samplings]


def test_a_stream_of_n_answers_keeps_them_apart(server, attempt, client):
    server.engine.play(["first answer", CALL])
    texts, calls = {0: "", 1: ""}, {0: [], 1: []}
    for chunk in client.chat.completions.create(model="policy", messages=USER, n=2, tools=TOOLS, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            calls[choice.index] += choice.delta.tool_calls or []
    (record,) = server.calls(attempt)
    at = next(choice.index for choice in record.choices if choice.finish_reason == "tool_calls")
    assert texts == {at: "", 1 - at: "first answer"}
    assert [call.function.name for call in calls[at]] == ["calculator"]
    assert calls[1 - at] == []


def test_equal_prompts_are_all_kept(server, attempt, client):
    for _ in range(4):
        client.chat.completions.create(model="policy", messages=USER)
    assert len(server.calls(attempt)) == 4


def test_tool_calls_are_parsed_and_their_fate_is_the_agents(server, attempt, client):
    server.engine.play([f"Let me count. {CALL}{CALL}"])
    reply = client.chat.completions.create(model="policy", messages=USER, tools=TOOLS)
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me count. "
    assert [call.function.arguments for call in message.tool_calls] == ['{"expression": "12+7"}'] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    (call,) = server.calls(attempt)
    assert call.choices[0].message["tool_calls"][0]["id"] == message.tool_calls[0].id
    assert '"name": "calculator"' in ByteTokenizer().decode(call.prompt_token_ids)


def test_streamed_tool_calls_are_those_of_the_record(server, attempt, client):
    server.engine.play([f"Let me count. {CALL}"])
    with client.chat.completions.stream(model="policy", messages=USER, tools=TOOLS) as stream:
        message = stream.get_final_completion().choices[0].message
    (call,) = server.calls(attempt)
    assert message.content == call.choices[0].message["content"] == "Let me count. "
    given = [c.model_dump(include={"id", "type", "function"}) for c in message.tool_calls]
    for one in given:
        one["function"] = {"name": one["function"]["name"], "arguments": one["function"]["arguments"]}
    assert given == call.choices[0].message["tool_calls"]


def test_a_conversation_goes_on_with_the_tokens_that_were_sampled(server, attempt, client):
    strange = [
        *b'<tool_call>{"arguments":{"expression" : "',
        ByteTokenizer.merged,
        *b'"},"name":"calculator"}</tool_call>',
    ]
    server.engine.play([strange, "19"])
    first = client.chat.completions.create(model="policy", messages=USER, tools=TOOLS).choices[0].message
    arguments = json.dumps(json.loads(first.tool_calls[0].function.arguments))
    again = {"role": "assistant", "content": first.content, "tool_calls": [c.model_dump() for c in first.tool_calls]}
    again["tool_calls"][0]["function"]["arguments"] = arguments
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "19"}
    client.chat.completions.create(model="policy", messages=[*USER, again, result], tools=TOOLS)
    one, two = server.calls(attempt)
    before = one.prompt_token_ids + one.choices[0].token_ids
    assert two.prompt_token_ids[: len(before)] == before


def test_tool_choice_none_shows_no_tools(server, attempt, client):
    server.engine.play([CALL])
    reply = client.chat.completions.create(model="policy", messages=USER, tools=TOOLS, tool_choice="none")
    assert reply.choices[0].message.content == CALL
    assert reply.choices[0].message.tool_calls is None
    assert "calculator" not in ByteTokenizer().decode(server.engine.prompts[0])


def test_parallel_tool_calls_false_gives_the_first_only(server, attempt, client):
    server.engine.play([CALL + CALL])
    reply = client.chat.completions.create(model="policy", messages=USER, tools=TOOLS, parallel_tool_calls=False)
    assert len(reply.choices[0].message.tool_calls) == 1


def test_stop_and_length_end_an_answer(server, attempt, client):
    server.engine.play(["one; two", "a long answer"])
    stopped = client.chat.completions.create(model="policy", messages=USER, stop=";")
    cut = client.chat.completions.create(model="policy", messages=USER, max_completion_tokens=6)
    assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("one", "stop")
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("a long", "length")
    assert [len(call.choices[0].token_ids) for call in server.calls(attempt)] == [4, 6]


def test_sampling_parameters_reach_the_engine(server, attempt, client):
    extra = {"top_k": 5}
    client.chat.completions.create(
        model="policy", messages=USER, temperature=0, top_p=0.9, stop=["a", "b"], seed=3, max_tokens=9, extra_body=extra
    )
    (sampling,) = server.engine.samplings
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.9, 5)
    assert (sampling.stop, sampling.seed, sampling.max_tokens) == (("a", "b"), 3, 9)


def test_nothing_is_forced_in_silence(server, attempt, client):
    client.chat.completions.create(model="policy", messages=USER, temperature=0.3)
    server.app.state.routing = Routing(temperature=1.0)
    client.chat.completions.create(model="policy", messages=USER, temperature=0.3)
    first, second = server.calls(attempt)
    assert first.sampling["temperature"] == 0.3
    assert (second.sampling["temperature"], second.sampling["temperature_asked"]) == (1.0, 0.3)
    assert [sampling.temperature for sampling in server.engine.samplings] == [0.3, 1.0]


def test_logprobs_are_the_recorded_ones(server, attempt, client):
    server.engine.play([[*b"h", *"é".encode(), 257]])
    reply = client.chat.completions.create(model="policy", messages=USER, logprobs=True)
    content = reply.choices[0].logprobs.content
    (call,) = server.calls(attempt)
    assert [token.logprob for token in content] == pytest.approx(call.choices[0].logprobs)
    assert (content[0].token, content[0].bytes) == ("h", [104])
    assert content[1].bytes is None  # half a letter
    assert client.chat.completions.create(model="policy", messages=USER).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_sent_as_vllm_sends_them(server, attempt, client, stream):
    server.engine.play(["hello world"])
    reply = client.chat.completions.create(
        model="policy", messages=USER, logprobs=True, extra_body={"return_token_ids": True}, stream=stream
    )
    chunks = list(reply) if stream else []
    (call,) = server.calls(attempt)
    if stream:
        assert chunks[0].prompt_token_ids == list(call.prompt_token_ids)
        given = [i for c in chunks for choice in c.choices for i in choice.model_dump().get("token_ids", ())]
        assert given == list(call.choices[0].token_ids)
        given = [t.logprob for c in chunks for choice in c.choices if choice.logprobs for t in choice.logprobs.content]
        assert given == pytest.approx(call.choices[0].logprobs)
    else:
        assert reply.prompt_token_ids == list(call.prompt_token_ids)
        assert reply.choices[0].token_ids == list(call.choices[0].token_ids)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -1}, "frequency_penalty"),
        ({"logit_bias": {"5": 100}}, "logit_bias"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "constrained decoding"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "calculator"}}}, "constrained"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"temprature": 0.5}, "temprature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n=0"),
        ({"stop": [""]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}, "content": "x"}]}, "function_call"),
    ],
)
def test_what_the_engine_would_not_do_is_refused_and_recorded(server, attempt, client, body, says):
    with pytest.raises(openai.BadRequestError, match="(?s)" + says):
        client.chat.completions.create(model="policy", messages=USER, extra_body=body)
    (call,) = server.calls(attempt)
    assert says in call.error
    assert server.engine.prompts == []


@pytest.mark.parametrize(
    "body", [{"presence_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}, "user": "me", "seed": None}]
)
def test_parameters_that_change_nothing_are_taken(server, attempt, client, body):
    client.chat.completions.create(model="policy", messages=USER, extra_body=body)


def test_a_context_too_long_is_told_as_openai_tells_it(tmp_path):
    with served(tmp_path, FakeEngine(max_model_len=60)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key("a"), max_retries=0)
        client.chat.completions.create(model="policy", messages=USER, max_tokens=10)
        long = [{"role": "user", "content": "x" * 100}]
        for body in ({"max_tokens": 50}, {"messages": long}, {"messages": [{"role": "user", "content": "x" * 9_000}]}):
            with pytest.raises(openai.BadRequestError) as refused:
                client.chat.completions.create(**{"model": "policy", "messages": USER, **body})
            assert refused.value.code == "context_length_exceeded"
            # what frameworks search for, such as litellm and crewai, and langchain
            assert "This model's maximum context length is 60 tokens" in str(refused.value)
            assert "context_length_exceeded" in refused.value.body["message"]
        headers, body = {"x-api-key": server.key("b")}, {"model": "policy", "messages": long, "max_tokens": 10}
        reply = httpx.post(f"{server.url}/v1/messages", json=body, headers=headers)
        assert "prompt is too long" in reply.json()["error"]["message"]


def test_what_the_engine_refuses_is_not_taken_for_a_full_context(server, client):
    server.engine.play([ValueError("the answer's format can't be enforced: uniqueItems")])
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as refused:
        client.chat.completions.create(model="policy", messages=USER)
    assert refused.value.code == "invalid_value"


def test_a_template_without_tools_refuses_them(tmp_path):
    with served(tmp_path, FakeEngine(tokenizer=ByteTokenizer(PLAIN_TEMPLATE))) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key("a"), max_retries=0)
        with pytest.raises(openai.BadRequestError, match="--chat-template hermes"):
            client.chat.completions.create(model="policy", messages=USER, tools=TOOLS)
        assert client.chat.completions.create(model="policy", messages=USER).choices[0].message.content == "ok"


def test_a_call_is_joined_to_its_span_and_agent(server, attempt, client):
    trace, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{span}-01", "x-lightning-agent": "r%C3%A9dacteur%20principal"}
    client.chat.completions.create(model="policy", messages=USER, extra_headers=headers)
    client.chat.completions.create(model="policy", messages=USER, extra_headers={"traceparent": "00-junk"})
    joined, alone = server.calls(attempt)
    assert (joined.trace_id, joined.span_id, joined.agent) == (trace, span, "rédacteur principal")
    assert (alone.trace_id, alone.span_id, alone.agent) == (None, None, None)


def test_the_keys_agent_names_calls_that_no_header_names(server, attempt):
    key = server.key(attempt, agent="shell script")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key)
    client.chat.completions.create(model="policy", messages=USER)
    client.chat.completions.create(model="policy", messages=USER, extra_headers={"x-lightning-agent": "writer"})
    assert [call.agent for call in server.calls(attempt)] == ["shell script", "writer"]


def test_an_attempts_usual_model_name_is_answered_by_the_policy(server, attempt, client):
    reply = client.chat.completions.create(model="gpt-4o-mini", messages=USER)
    (call,) = server.calls(attempt)
    assert reply.model == call.policy == "policy"
    assert call.request["model"] == "gpt-4o-mini"


def test_an_admin_asking_for_an_unknown_model_hears_which_there_are(server, attempt):
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.keys.issue("admin"))
    remedy = "Models: policy. Request one of these. `lightning-rl serve --name gpt-4o-mini` serves"
    with pytest.raises(openai.NotFoundError, match=remedy):
        client.chat.completions.create(model="gpt-4o-mini", messages=USER)
    assert [model.id for model in client.models.list()] == ["policy"]


def test_an_engine_that_fails_is_a_500_is_recorded_and_shows_in_healthz(server, attempt, client, monkeypatch):
    monkeypatch.setattr("lightning_trainer.gateway.health._FRESH_S", 0.0)
    server.engine.play([RuntimeError("out of memory"), "ok"])
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        client.chat.completions.create(model="policy", messages=USER)
    (call,) = server.calls(attempt)
    assert "out of memory" in call.error
    assert call.prompt_token_ids == server.engine.prompts[0]
    health = httpx.get(f"{server.url}/healthz")
    assert health.status_code == 503
    assert "out of memory" in health.json()["engine"]["error"]
    client.chat.completions.create(model="policy", messages=USER)
    assert httpx.get(f"{server.url}/healthz").json()["status"] == "ok"


def test_an_engine_that_fails_in_a_stream_ends_it_with_an_error(server, attempt, client):
    class Breaks(FakeEngine):
        def _pieces(self, ids, text, finish):
            yield from list(super()._pieces(ids, text, finish))[:2]
            raise RuntimeError("out of memory")

    broken = Breaks(["a long answer"])
    embedded = _policy(server)
    embedded.engine, engine = broken, embedded.engine
    try:
        with pytest.raises(openai.APIError, match="out of memory"):
            list(client.chat.completions.create(model="policy", messages=USER, stream=True))
    finally:
        embedded.engine = engine
    (call,) = server.calls(attempt)
    assert "out of memory" in call.error
    assert bytes(call.choices[0].token_ids) == b"a long a"[: len(call.choices[0].token_ids)]
    assert call.choices[0].message["content"] == "a long a"
    assert call.choices[0].finish_reason is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_leaves_a_record_and_frees_the_engine(tmp_path, stream):
    engine = FakeEngine(lambda _: "x" * 4000, delay_s=0.01)
    with served(tmp_path, engine) as server:
        body = {"model": "policy", "messages": USER, "stream": stream}
        headers = {"authorization": f"Bearer {server.key('a')}"}
        if stream:
            with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers=headers) as reply:
                next(reply.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=0.3)
        call = _first(lambda: server.calls("a"))
        assert call.error == "client cut the connection"
        assert 0 < len(call.choices[0].token_ids) < 4000
        assert call.choices[0].message["content"] == "x" * len(call.choices[0].token_ids)
        assert engine.cancelled == 1


def test_the_version_is_that_of_the_start_of_the_call(tmp_path):
    engine = FakeEngine(["x" * 400], delay_s=0.005)
    with served(tmp_path, engine) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key("a"))
        for chunk in client.chat.completions.create(model="policy", messages=USER, stream=True):
            engine.version = 1
            assert chunk.system_fingerprint == "policy-0"
        assert server.calls("a")[0].policy_version == 0


class Renewed(FakeEngine):
    """Samples each further answer with newer weights."""

    async def generate(self, prompt, sampling):
        version = 3 + len(self.samplings)
        async for piece in super().generate(prompt, sampling):
            yield replace(piece, version=version)


def test_a_call_whose_answers_have_several_versions_has_the_oldest(tmp_path):
    with served(tmp_path, Renewed()) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key("a"))
        client.chat.completions.create(model="policy", messages=USER, n=2)
        assert server.calls("a")[0].policy_version == 3


def test_a_run_repeats_from_its_seed_whatever_the_order_of_arrival(server, attempt):
    server.app.state.routing = Routing(seed=5)

    def seeds(order, run):
        server.engine.samplings.clear()
        for rollout, text in order:
            key = server.key(f"{run} of {rollout} in {attempt}", rollout_id=rollout)
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key)
            client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}], n=2)
        return [s.seed for s in server.engine.samplings]

    asked = [("r1", "a"), ("r1", "a"), ("r1", "b"), ("r2", "a")]
    first, second = seeds(asked, "first"), seeds(list(reversed(asked)), "second")
    assert len(set(first)) == 8
    assert sorted(first) == sorted(second)
    server.app.state.routing = Routing(seed=6)
    assert set(first).isdisjoint(seeds(asked, "third"))


def test_the_record_is_on_disk_before_the_answers_last_byte(tmp_path):
    order = []

    class Slow:
        def __init__(self, store):
            self._store = store

        def add_calls(self, calls):
            time.sleep(0.2)
            kept = self._store.add_calls(calls)
            order.append("on disk")
            return kept

        def __getattr__(self, name):
            return getattr(self._store, name)

    from lightning_spans.store import open_store

    with served(tmp_path, FakeEngine(["a", "b"]), store=Slow(open_store(str(tmp_path / "s.db")))) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key("a"))
        client.chat.completions.create(model="policy", messages=USER)
        order.append("answered")
        for chunk in client.chat.completions.create(model="policy", messages=USER, stream=True):
            if chunk.choices[0].finish_reason:
                order.append("finished")
            elif chunk.choices[0].delta.content:
                order.append("content")
    assert order == ["on disk", "answered", "content", "on disk", "finished"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_store_that_fails_is_an_error_for_the_client_and_never_a_silent_loss(tmp_path, stream):
    class Full:
        def __init__(self, store):
            self._store = store

        def add_calls(self, calls):
            raise StoreError("disk full")

        def __getattr__(self, name):
            return getattr(self._store, name)

    from lightning_spans.store import open_store

    with served(tmp_path, store=Full(open_store(str(tmp_path / "s.db")))) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key("a"), max_retries=0)
        with pytest.raises(openai.APIError, match="disk full") as told:
            list(client.chat.completions.create(model="policy", messages=USER, stream=stream))
        assert stream or told.value.status_code == 503
        health = httpx.get(f"{server.url}/healthz")
        assert health.status_code == 503
        assert "disk full" in health.json()["store"]["error"]


def test_one_bad_record_does_not_fail_the_others(tmp_path):
    class Picky:
        def __init__(self, store):
            self._store = store

        def add_calls(self, calls):
            time.sleep(0.05)
            if any("bad" in str(call.request["messages"]) for call in calls):
                raise StoreError("a bad record")
            return self._store.add_calls(calls)

        def __getattr__(self, name):
            return getattr(self._store, name)

    from lightning_spans.store import open_store

    with served(tmp_path, store=Picky(open_store(str(tmp_path / "s.db")))) as server:

        def ask(text):
            body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
            headers = {"authorization": f"Bearer {server.key('a')}"}
            statuses[text] = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers).status_code

        statuses: dict[str, int] = {}
        threads = [threading.Thread(target=ask, args=(text,)) for text in ("1", "2", "bad", "3", "4", "5")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == {"1": 200, "2": 200, "bad": 503, "3": 200, "4": 200, "5": 200}
        assert len(server.calls("a")) == 5


def test_a_server_that_stops_keeps_what_was_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_trainer.gateway.http.serving._GRACE_S", 1)

    class Slow(FakeEngine):
        async def generate(self, prompt, sampling):
            try:
                async for piece in super().generate(prompt, sampling):
                    yield piece
            finally:
                await asyncio.sleep(0.3)  # an engine may take its time to let go of a request

    engine = Slow(lambda _: "x" * 40_000, delay_s=0.01)
    from lightning_spans.store import open_store

    with served(tmp_path, engine) as server:
        body = {"model": "policy", "messages": USER, "stream": True}
        headers = {"authorization": f"Bearer {server.key('a')}"}
        stream = httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers=headers)
        lines = stream.__enter__().iter_lines()  # kept: the connection closes with it
        next(lines)
    (call,) = open_store(str(tmp_path / "server.db")).calls()
    assert call.error == "the server stopped"
    assert call.choices[0].message["content"] == "x" * len(call.choices[0].token_ids) != ""


def _policy(server):
    return server.app.state.gateway._models._served["policy"]


def _first(find, timeout_s=60.0):
    until = time.monotonic() + timeout_s
    while not (found := find()):
        assert time.monotonic() < until, "nothing came"
        time.sleep(0.02)
    assert len(found) == 1
    return found[0]


def test_a_seed_of_the_programs_is_folded_into_the_rollouts_in_training(server, attempt):
    server.app.state.routing = Routing(seed=5)
    for member in range(3):
        rollout = f"run:t0-0-{member} of {attempt}"
        key = server.key(f"{rollout}.1", rollout_id=rollout)
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key)
        client.chat.completions.create(model="policy", messages=USER, seed=42)
        (call,) = server.calls(f"{rollout}.1")
        assert call.sampling["seed_asked"] == 42
        assert call.request["seed"] == 42
    assert len({sampling.seed for sampling in server.engine.samplings}) == 3
    assert 42 not in {sampling.seed for sampling in server.engine.samplings}


def test_training_draws_plainly_and_records_what_was_asked(server, attempt, client):
    server.app.state.routing = Routing(plain=True)
    client.chat.completions.create(model="policy", messages=USER, top_p=0.9, extra_body={"top_k": 5})
    (sampling,) = server.engine.samplings
    assert (sampling.top_p, sampling.top_k) == (1.0, 0)
    (call,) = server.calls(attempt)
    assert (call.sampling["top_p_asked"], call.sampling["top_k_asked"]) == (0.9, 5)
    assert (call.request["top_p"], call.request["top_k"]) == (0.9, 5)


def test_what_training_leaves_out_needs_no_engine_that_can_do_it(server, attempt, client):
    """A program that asks for a penalty trains on verl, whose engine takes none at some temperatures."""
    server.app.state.routing = Routing(plain=True)
    client.chat.completions.create(model="policy", messages=USER, presence_penalty=0.5, extra_body={"min_p": 0.1})
    (call,) = server.calls(attempt)
    assert (call.sampling["presence_penalty_asked"], call.sampling["min_p_asked"]) == (0.5, 0.1)
    with pytest.raises(openai.BadRequestError, match="logit_bias"):  # a program may rely on that: it is done or refused
        client.chat.completions.create(model="policy", messages=USER, logit_bias={"65": 1})
    server.app.state.routing = Routing()
    with pytest.raises(openai.BadRequestError, match="presence_penalty"):
        client.chat.completions.create(model="policy", messages=USER, presence_penalty=0.5)
