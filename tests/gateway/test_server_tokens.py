"""Upstreams that are sent token ids: conversations continued exactly, and messages wherever something would be lost."""

from __future__ import annotations

import functools
import itertools
import random
import threading
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_trainer.gateway.settings import Routing
from lightning_trainer.gateway.upstream.upstream import Upstream
from lightning_trainer.reasons import continuation as reasons
from lightning_trainer.reasons.call_errors import ENGINE_ENDED
from lightning_trainer.reasons.continuation import ContinuationReason
from support.fakes import HERMES_TEMPLATE, PLAIN_TEMPLATE, ByteTokenizer, FakeEngine, fake_logprob, served
from support.gateway.continuation import World, _calls, names
from support.gateway.long_talks import STRANGE, TOOLS, USER, rows_of
from support.gateway.token_upstreams import TokenUpstream

KINDS = ["vllm", "sglang", "sglang, incremental"]
OTHER = {"role": "user", "content": "Are you sure?"}


@contextmanager
def gateway(folder, *behind, tokenizer=None, **options):
    """A gateway over scripted servers, replicas of one model whose tokenizer is named."""
    with ExitStack() as stack:
        urls = [stack.enter_context(each.running()) for each in behind]
        named = tokenizer or ByteTokenizer()
        upstream = Upstream("m", urls[0], replicas=tuple(urls[1:]), tokenizer=named, **options)
        folder.mkdir(exist_ok=True)
        front = stack.enter_context(served(folder, upstreams=[upstream], routing=Routing(model="m")))
        front.attempt = "a"
        front.post = lambda body, attempt=None, path="/v1/chat/completions": httpx.post(
            f"{front.url}{path}",
            json={"model": "m", **body},
            headers={"authorization": f"Bearer {front.key(attempt or front.attempt)}"},
            timeout=60,
        )
        yield front


def ask(front, messages, **body):
    """Return the assistant's message; a stream's is put together by OpenAI's own client."""
    if not body.get("stream"):
        reply = front.post({"messages": messages, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["message"]
    import openai

    del body["stream"]
    with (
        openai.OpenAI(base_url=f"{front.url}/v1", api_key=front.key(front.attempt), max_retries=0) as client,
        client.chat.completions.stream(model="m", messages=messages, **body) as events,
    ):
        return events.get_final_completion().choices[0].message.model_dump(exclude={"parsed"})


def talk(front, **body):
    """Use a tool, answer, and answer again."""
    messages = [USER]
    for _ in range(3):
        said = ask(front, messages, tools=TOOLS, **body)
        messages.append(said)
        calls = said.get("tool_calls") or ()
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "19"} for call in calls] or [OTHER]


def how(front, attempt="a"):
    return [call.sampling.get(reasons.CONTINUATION) for call in front.calls(attempt)]


@pytest.fixture(scope="module", params=KINDS)
def running(request, tmp_path_factory):
    """A gateway over one scripted server of each kind."""
    behind = TokenUpstream(FakeEngine(), request.param)
    with gateway(tmp_path_factory.mktemp("front"), behind) as front:
        yield front, behind


@pytest.fixture
def place(request, running):
    front, behind = running
    behind.asked.clear()
    behind.engine.play(())
    front.attempt = request.node.name
    return front, behind


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_is_one_sequence_of_tokens_and_one_row(place, stream):
    front, behind = place
    script = [STRANGE, [ByteTokenizer.merged, *b" answer"], list(b"yes")]
    behind.engine.play(script)
    talk(front, stream=stream)
    calls, (rows, told) = front.calls(front.attempt), rows_of(front, front.attempt)
    for call, later in itertools.pairwise(calls):
        before = call.prompt_token_ids + call.choices[0].token_ids
        assert later.prompt_token_ids[: len(before)] == before
    assert behind.sent == [call.prompt_token_ids for call in calls]
    drawn = [(*answer, ByteTokenizer.eos_token_id) for answer in script]
    assert [call.choices[0].token_ids for call in calls] == drawn
    for call in calls:
        assert call.choices[0].logprobs == tuple(map(fake_logprob, call.choices[0].token_ids))
    assert [row.transitions for row in rows] == [3]
    assert (told.continued, told.not_continued, told.continued_share) == (2, {}, 1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_either_of_n_answers_can_be_continued(place, stream):
    front, behind = place
    behind.engine.play(["one", [*b"tw", 111]])
    front.post({"messages": [USER], "n": 2, "stream": stream})
    first = front.calls(front.attempt)[0]
    for choice in first.choices:
        ask(front, [USER, {"role": "assistant", "content": choice.message["content"]}, OTHER])
    for choice, later in zip(first.choices, front.calls(front.attempt)[1:], strict=True):
        before = first.prompt_token_ids + choice.token_ids
        assert later.prompt_token_ids[: len(before)] == before


def test_a_stream_reaches_the_agent_as_it_comes(place):
    front, behind = place
    behind.engine.play(["a long answer, in pieces"])
    behind.holds = threading.Event()  # let go by what the first chunk brings
    with httpx.stream(
        "POST",
        f"{front.url}/v1/chat/completions",
        json={"model": "m", "messages": [USER], "stream": True},
        headers={"authorization": f"Bearer {front.key(front.attempt)}"},
        timeout=60,
    ) as reply:
        for line in reply.iter_lines():
            if "a lo" in line:
                behind.holds.set()
    behind.holds = None
    assert front.calls(front.attempt)[0].choices[0].message["content"] == "a long answer, in pieces"


def test_what_is_asked_for_is_said_in_the_servers_words(place):
    front, behind = place
    body = {"temperature": 0.0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 5, "stop": ["swer"], "max_tokens": 9}
    body |= {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
    behind.engine.play(["answer"])
    said = ask(front, [USER], **body)
    ((_, asked),) = behind.asked
    drawn = asked.get("sampling_params", asked)
    names_of_most = {"max_tokens", "max_new_tokens"} & drawn.keys()
    assert [drawn[name] for name in names_of_most] == [9]
    assert drawn.get("seed", drawn.get("sampling_seed")) == 5
    for name in body.keys() - {"seed", "max_tokens"}:
        assert drawn[name] == body[name]
    (call,) = front.calls(front.attempt)
    assert said["content"] == call.choices[0].message["content"] == "an"
    assert bytes(call.choices[0].token_ids) == b"answer"
    assert {name: call.sampling[name] for name in ("min_p", "top_k", "stop")} == {
        "min_p": 0.1, "top_k": 7, "stop": ["swer"]
    }  # fmt: skip


def test_without_a_limit_the_answer_may_fill_the_context(place):
    front, behind = place
    ask(front, [USER])
    ((_, asked),) = behind.asked
    most = asked.get("max_tokens") or asked["sampling_params"]["max_new_tokens"]
    assert most == behind.engine.max_model_len - len(behind.sent[0])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["ids", "counts", "usage", "nothing", "words"])
def test_an_answer_that_is_not_what_it_should_be_is_an_error_on_record(place, stream, where):
    front, behind = place

    def spoil(data):
        if where == "nothing":
            return {}
        if where == "words":
            return {"choices": [{"token_ids": ["x"]}], "meta_info": {"output_token_logprobs": "x"}}
        if where == "usage":
            data["usage"] = {"completion_tokens": 10_000}
            data.get("meta_info", {})["completion_tokens"] = 10_000
            return data
        for choice in data.get("choices", ()):
            choice["token_ids" if where == "ids" else "logprobs"] = [2**31] if where == "ids" else None
        for pair in data.get("meta_info", {}).get("output_token_logprobs", ()):
            pair[1] = 2**31
        if where == "counts" and "meta_info" in data:
            data["meta_info"]["output_token_logprobs_length"] += 1
        return data

    behind.spoils = spoil
    front.post({"messages": [USER], "stream": stream})
    behind.spoils = lambda data: data
    (call,) = front.calls(front.attempt)
    assert call.error


def test_a_server_that_answers_to_other_ids_than_it_was_sent_is_not_believed(tmp_path):
    behind = TokenUpstream(FakeEngine())

    def spoil(data):
        data["choices"][0]["prompt_token_ids"] = [1, 2]
        return data

    behind.spoils = spoil
    with gateway(tmp_path, behind) as front:
        assert front.post({"messages": [USER]}).status_code == 502
        assert "other token ids" in front.calls("a")[0].error


@pytest.mark.parametrize("stream", [False, True])
def test_another_gateway_of_ours_is_sent_token_ids_too(tmp_path_factory, stream):
    with served(tmp_path_factory.mktemp("behind"), FakeEngine(model="m")) as behind:
        behind.engine.play([STRANGE, [ByteTokenizer.merged, *b" answer"], "yes"])
        key = behind.keys.issue("admin")
        upstream = Upstream("m", f"{behind.url}/v1", key=key, tokenizer=ByteTokenizer())
        with served(tmp_path_factory.mktemp("front"), upstreams=[upstream], routing=Routing(model="m")) as front:
            front.attempt = "a"
            front.post = lambda body: httpx.post(
                f"{front.url}/v1/chat/completions",
                json={"model": "m", **body},
                headers={"authorization": f"Bearer {front.key('a')}"},
                timeout=60,
            )
            talk(front, stream=stream)
            rows, told = rows_of(front, "a")
    assert [row.transitions for row in rows] == [3]
    assert (told.continued, told.not_continued) == (2, {})


# When nothing can be gained without losing something.


def sent_as_messages(tmp_path, behind, why, *, tokenizer=None, before=(), **body):
    """Whether a second turn went as messages, and says why."""
    with gateway(tmp_path, behind, tokenizer=tokenizer) as front:
        for turn in before:
            ask(front, turn)
        said = ask(front, [USER], **body)
        ask(front, [USER, said, OTHER], **body)
        assert [path for path, _ in behind.asked][-2:] == ["/v1/chat/completions"] * 2
        assert how(front)[-2:] == [ContinuationReason.BEGINS, why]
        _, told = rows_of(front, "a")
        assert told.not_continued == {why: 1}
        assert front.calls("a")[-1].choices[0].token_ids


@pytest.mark.parametrize("kind", KINDS[:2])
def test_a_server_of_another_tokenizer_is_sent_messages(tmp_path, kind):
    class Other(ByteTokenizer):
        def encode(self, text, add_special_tokens=True):
            return [token + 1 for token in super().encode(text)]

    sent_as_messages(tmp_path, TokenUpstream(FakeEngine(), kind), ContinuationReason.OTHER_TOKENS, tokenizer=Other())


def test_a_server_of_another_template_is_sent_messages(tmp_path):
    other = TokenUpstream(FakeEngine(), template=ByteTokenizer(PLAIN_TEMPLATE.replace("system", "user") + " "))
    sent_as_messages(tmp_path, other, ContinuationReason.OTHER_TOKENS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_reasoning_is_read_here_and_the_token_path_kept(tmp_path, kind, stream):
    from support.models.families import THINKING

    tokenizer = ByteTokenizer(THINKING)
    behind = TokenUpstream(FakeEngine(["<think>\nhm\n</think>\n\n19"], tokenizer=tokenizer), kind)
    with gateway(tmp_path, behind, tokenizer=tokenizer) as front:
        message = ask(front, [USER], stream=stream)
        assert (message["reasoning_content"], message["content"]) == ("hm", "19")
        ask(front, [USER, message, OTHER])
        assert how(front) == [ContinuationReason.BEGINS, ContinuationReason.FORKED]


def test_a_server_of_no_known_kind_is_sent_messages(tmp_path):
    sent_as_messages(tmp_path, TokenUpstream(FakeEngine(), "somebody's"), ContinuationReason.UNKNOWN_SERVER)


def test_tools_that_the_template_writes_in_another_form_are_sent_as_messages(tmp_path):
    tokenizer = ByteTokenizer(HERMES_TEMPLATE.replace("tool_call>", "call>"))
    behind = TokenUpstream(FakeEngine(tokenizer=tokenizer))
    sent_as_messages(tmp_path, behind, ContinuationReason.OTHER_CALLS, tokenizer=tokenizer, tools=TOOLS)
    assert behind.asked[0][1]["tools"] == TOOLS


@pytest.mark.parametrize("body", [{"top_logprobs": 2, "logprobs": True}, {"chat_template_kwargs": {"a": 1}}])
def test_what_only_the_server_reads_is_sent_as_messages(tmp_path, body):
    behind = TokenUpstream(FakeEngine())
    sent_as_messages(tmp_path, behind, ContinuationReason.ONLY_UPSTREAM_READS, before=[[OTHER]], **body)
    assert behind.asked[0][0] == "/v1/completions"
    assert body.items() <= behind.asked[1][1].items()


def test_grammars_go_to_vllm_and_are_left_to_sglang_itself(tmp_path):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for kind, path in (("vllm", "/v1/completions"), ("sglang", "/v1/chat/completions")):
        behind = TokenUpstream(FakeEngine(), kind)
        with gateway(tmp_path / kind, behind) as front:
            ask(front, [USER], response_format=schema)
        ((found, asked),) = behind.asked
        assert found == path
        assert asked.get("response_format", schema) == schema
        assert ("structured_outputs" in asked) is (kind == "vllm")


@pytest.mark.parametrize("form", ["structural_tag", "grammar"])
def test_vllm_is_told_what_an_answer_must_be_in_the_form_that_its_backend_takes(tmp_path, form):
    behind = TokenUpstream(FakeEngine())
    behind.form = form
    with gateway(tmp_path, behind) as front:
        said = ask(front, [USER], tools=TOOLS, tool_choice="required")
        ask(front, [USER, said, OTHER], tools=TOOLS, response_format={"type": "json_object"}, stream=True)
        ask(front, [OTHER])
        *constrained, free = front.calls("a")
        assert how(front) == [ContinuationReason.BEGINS, ContinuationReason.JOINED, ContinuationReason.BEGINS]
    assert [path for path, _ in behind.asked] == ["/v1/completions"] * 3
    for call, (_, body) in zip(constrained, behind.asked, strict=False):
        assert call.sampling["structured_outputs"] == body["structured_outputs"]
        assert body["structured_outputs"].keys() == {form}
        assert "grammar" not in call.sampling
    assert not {"structured_outputs", "grammar"} & free.sampling.keys()
    assert len(behind.tried) == 1 + (form == "grammar"), "found out once"


def test_a_vllm_of_another_backend_is_sent_messages(tmp_path):
    behind = TokenUpstream(FakeEngine())
    behind.form = "json"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    sent_as_messages(tmp_path, behind, ContinuationReason.NO_FORM, response_format=schema)
    assert behind.asked[-1][1]["response_format"] == schema
    assert len(behind.tried) == 2


def test_each_replica_is_told_in_its_own_form(tmp_path):
    one, other = TokenUpstream(FakeEngine()), TokenUpstream(FakeEngine())
    other.form = "grammar"
    with gateway(tmp_path, one, other) as front:
        ask(front, [USER], response_format={"type": "json_object"})
        home, away = (one, other) if one.asked else (other, one)
        home.status = 503
        ask(front, [OTHER], response_format={"type": "json_object"})
        told = [call.sampling["structured_outputs"].keys() for call in front.calls("a")]
    assert told == [{home.form}, {away.form}]
    assert away.asked[-1][1]["structured_outputs"].keys() == {away.form}


def test_what_goes_on_from_a_call_that_was_sent_as_messages_says_so(tmp_path):
    behind = TokenUpstream(FakeEngine())
    with gateway(tmp_path, behind) as front:
        said = ask(front, [USER], logprobs=True, top_logprobs=1)
        ask(front, [USER, said, OTHER])
        assert how(front) == [ContinuationReason.BEGINS, ContinuationReason.AFTER_MESSAGES]


# Replicas.


def test_another_replica_answers_while_nothing_was_drawn_and_none_after(tmp_path):
    first, second = TokenUpstream(FakeEngine()), TokenUpstream(FakeEngine())
    with gateway(tmp_path, first, second) as front:
        ask(front, [USER])
        home, other = (first, second) if first.asked else (second, first)
        home.status = 503
        ask(front, [OTHER])
        assert [len(home.asked), len(other.asked)] == [2, 1]
        taken = []

        def cut(chunk):
            taken.append(chunk)
            return chunk if len(taken) == 1 else None

        home.status, home.spoils, other.spoils = 200, cut, cut
        home.engine.play(["a long answer, in pieces"])
        other.engine.play(["a long answer, in pieces"])
        assert "upstream_failed" in front.post({"messages": [USER], "stream": True}).text
        assert len(home.asked) + len(other.asked) == 4
        assert front.calls("a")[-1].choices[0].token_ids == tuple(b"a lo")


# Random conversations over the templates of several model families.


@pytest.mark.parametrize(("status", "is_down"), [(503, True), (500, False)])
def test_a_call_whose_server_is_down_says_so(tmp_path, status, is_down):
    behind = TokenUpstream(FakeEngine())
    with gateway(tmp_path, behind) as front:
        ask(front, [{"role": "user", "content": "hi"}])
        behind.status = status
        assert front.post({"messages": [OTHER]}, "b").status_code == status
        (call,) = front.calls("b")
        assert call.sampling.get(ENGINE_ENDED, False) == is_down


class UpstreamWorld(World):
    """Agents whose calls go through a gateway to a server that takes token ids."""

    def __init__(self, front, behind, rng, attempt):
        super().__init__(behind.engine.tokenizer, rng)
        self.front, self.behind, self.attempt = front, behind, attempt
        self.tools = self.tools if self.talk.chat.calls else ()

    def step(self):
        messages, meaning = self._next()
        ids, said, whole, plain = self._answer()
        self.behind.engine.play([ids])
        body = {"messages": messages, "tools": list(self.tools), "max_tokens": max(1, len(ids))}
        front = {**body, "stream": self.rng.random() < 0.5} if self.tools else {**body, "tools": None}
        reply = self.front.post(front, attempt=self.attempt)
        assert reply.status_code == 200, reply.text
        call = self.front.calls(self.attempt)[-1]
        assert self.behind.sent[-1] == call.prompt_token_ids
        assert call.choices[0].token_ids == tuple(ids)
        message = call.choices[0].message
        assert (message["content"], message.get("reasoning_content")) == (
            said["content"],
            said.get("reasoning_content"),
        )
        how = call.sampling[reasons.CONTINUATION]
        self._check(SimpleNamespace(how=how, ids=call.prompt_token_ids), messages, meaning, self.tools)
        key = ("assistant", message["content"] or "", _calls(message))
        self.calls.append(([*meaning, key], (*call.prompt_token_ids, *ids), whole, plain))
        self.lines.append(([*messages, dict(message)], [*meaning, key]))


@pytest.fixture(scope="module")
def fronts(tmp_path_factory):
    """A gateway and its server for each family, made when first asked for."""
    with ExitStack() as stack:

        @functools.cache
        def front(tokenizer, kind):
            behind = TokenUpstream(FakeEngine(tokenizer=tokenizer), kind)
            made = gateway(tmp_path_factory.mktemp("front"), behind, tokenizer=tokenizer)
            return stack.enter_context(made), behind

        yield front


SOME = names()[::6]  # the others in `nox -s full`: each world asks a server


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.full) for n in names()])
@settings(max_examples=4, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_conversations_with_an_upstream_are_never_joined_falsely_and_never_drift(fronts, name, rng):
    pytest.importorskip("transformers")
    from support.gateway.continuation import family_talks

    tokenizer = family_talks().get(name)
    if tokenizer is None:
        pytest.skip(f"the package that brings the template of {name} is not installed")
    front, behind = fronts(tokenizer, rng.choice(KINDS))
    world = UpstreamWorld(front, behind, rng, f"{rng.getrandbits(64):x}")
    for _ in range(8):
        world.step()


def test_plain_conversations_with_an_upstream_are_joined_whole(fronts):
    front, behind = fronts(ByteTokenizer(), "vllm")
    world = UpstreamWorld(front, behind, random.Random(7), "plain")
    world.tools = ()
    for _ in range(40):
        world.step()
    assert world.joined > 5 * world.alone
