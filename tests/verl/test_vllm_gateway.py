"""The gateway before a real vLLM: every surface recorded token for token, and what vLLM is told and asked."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from support.fakes import FakeEngine, served

pytest.importorskip("vllm")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_trainer.backends.verl.engine import VllmEngine
from lightning_trainer.gateway.engine import Sampling
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.gateway.upstream.token_protocols import ADJUSTING
from lightning_trainer.gateway.upstream.upstream import Upstream
from lightning_trainer.reasons import continuation as reasons
from lightning_trainer.reasons.continuation import ContinuationReason
from lightning_trainer.rl.account import UntrainedReason
from support.gateway.vllm import USER, asker, drawn_from, exactly, logprobs_of, unbroken, vllm_serving
from support.models.tiny import make_tiny_model

pytestmark = pytest.mark.timeout(600)
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}
ASKED = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 12},
    "/v1/completions": {"prompt": "hi", "max_tokens": 12},
    "/v1/responses": {"input": "hi", "max_output_tokens": 12},
    "/v1/messages": {"messages": USER, "max_tokens": 12},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", head_dim=32, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def vllm(model, tmp_path_factory):
    """URL of a vLLM that answers for the tiny model; its log-probabilities are those of the temperature."""
    with vllm_serving(model, tmp_path_factory.mktemp("vllm"), "processed_logprobs") as url:
        yield url


@pytest.fixture(scope="module")
def front(vllm, tmp_path_factory):
    options = {"upstreams": [Upstream("tiny", vllm)], "routing": Routing(model="tiny", seed=3)}
    with served(tmp_path_factory.mktemp("front"), FakeEngine(), **options) as running:
        yield running


@pytest.fixture
def post(front, request):
    def send(path, body):
        headers = {"authorization": f"Bearer {front.key(request.node.name)}"}
        return httpx.post(f"{front.url}{path}", json={"model": "tiny", **body}, headers=headers, timeout=120)

    send.calls = lambda: front.calls(request.node.name)
    return send


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", list(ASKED))
def test_every_surface_is_recorded_token_for_token(model, post, path, stream):
    reply = post(path, {**ASKED[path], "stream": stream, "temperature": 0.7})
    assert reply.status_code == 200, reply.text
    (call,) = post.calls()
    assert call.error is None
    assert len(call.choices[0].token_ids) <= 12
    assert list(call.choices[0].logprobs) == pytest.approx(logprobs_of(model, call, 0.7), abs=2e-3)
    text = AutoTokenizer.from_pretrained(model).decode(call.choices[0].token_ids, skip_special_tokens=True)
    cut = "\N{REPLACEMENT CHARACTER}"  # a letter that the limit cut in two
    assert call.choices[0].message["content"].rstrip(cut) == text.rstrip(cut)
    assert "logprobs_temperature" not in call.sampling
    if not stream:
        assert call.response_id == reply.json()["id"]


def test_the_same_seed_draws_the_same_and_each_turn_another(post):
    for _ in range(2):
        post("/v1/chat/completions", {**ASKED["/v1/chat/completions"], "seed": 11})
    post("/v1/chat/completions", ASKED["/v1/chat/completions"])
    post("/v1/chat/completions", ASKED["/v1/chat/completions"])
    one, same, third, fourth = [call.choices[0].token_ids for call in post.calls()]
    assert one == same
    assert third != fourth


def test_forced_calls_and_schemas_are_vllms(post):
    tools = [{"name": "greet", "input_schema": PERSON}]
    forced = {"tool_choice": {"type": "tool", "name": "greet"}, "max_tokens": 900}
    message = post("/v1/messages", {"messages": USER, "tools": tools, **forced}).json()
    assert message["stop_reason"] == "tool_use"
    assert 0 <= message["content"][-1]["input"]["age"] <= 99
    text = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
    response = post("/v1/responses", {"input": "hi", "text": text, "max_output_tokens": 900}).json()
    assert 0 <= json.loads(response["output"][0]["content"][0]["text"])["age"] <= 99


def test_many_choices_and_streams_at_once(post):
    body = {"messages": USER, "max_tokens": 6, "n": 3, "temperature": 1.0}
    assert len(post("/v1/chat/completions", body).json()["choices"]) == 3
    (call,) = post.calls()
    assert [len(choice.token_ids) == len(choice.logprobs) > 0 for choice in call.choices] == [True] * 3


def test_tokens_are_counted_by_vllm(post):
    counted = post("/v1/messages/count_tokens", {"messages": USER}).json()["input_tokens"]
    assert counted == post("/v1/messages", ASKED["/v1/messages"]).json()["usage"]["input_tokens"]


def test_what_vllm_refuses_is_told_and_recorded(post):
    reply = post("/v1/chat/completions", {"messages": USER, "max_tokens": 100_000})
    assert reply.status_code == 400
    assert post.calls()[0].error


@pytest.fixture(scope="module")
def other_vllm(model, tmp_path_factory):
    """URL of a vLLM whose log-probabilities are those before anything, and whose grammars are llguidance's."""
    guided = ("--structured-outputs-config.backend", "guidance")
    with vllm_serving(model, tmp_path_factory.mktemp("other"), "raw_logprobs", *guided) as url:
        yield url


@pytest.mark.full
async def test_verls_log_probabilities_at_temperature_1_are_those_before_penalties_and_biases(model, other_vllm):
    engine = VllmEngine(AutoTokenizer.from_pretrained(model), 2048, abilities=ADJUSTING)
    prompt, drawn, logprobs = list(range(40, 60)), [], []
    strong = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5, "min_p": 0.01}
    await engine.serve([other_vllm.removeprefix("http://").removesuffix("/v1")], 1)
    sampling = Sampling(max_tokens=24, seed=3, logit_bias={70: 6.0, 71: 6.0}, **strong)
    async for piece in engine.generate(prompt, sampling):
        drawn += piece.token_ids
        logprobs += piece.logprobs
    await engine.close()
    assert {70, 71} & set(drawn)
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert logprobs == pytest.approx(drawn_from(causal, prompt, drawn, 1.0, {}), abs=2e-3)


# With the tokenizer named: token ids go to vLLM, and conversations are continued exactly.


@pytest.fixture(scope="module")
def exact(model, vllm, tmp_path_factory):
    with exactly(model, vllm, tmp_path_factory.mktemp("exact")) as running:
        yield running


@pytest.fixture
def asking(exact, request):
    with asker(exact, request.node.name) as ask:
        yield ask


@pytest.fixture(scope="module")
def letters(model):
    """A bias that makes the model write letters: other bytes of a random model are no text."""
    ids = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids([*"abcdefghijklmnopqrstuvwxyz"])
    return dict.fromkeys(map(str, ids), 20)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_with_tools_is_one_row_of_the_tokens_that_vllm_drew(model, letters, asking, stream):
    tools = [{"type": "function", "function": {"name": "greet", "parameters": PERSON}}]
    messages = list(USER)
    free, forced = {"max_tokens": 10, "logit_bias": letters}, {"max_tokens": 600, "tool_choice": "required"}
    for turn in range(4):
        asked = forced if turn == 1 else free
        (message,) = asking(messages, stream=stream, tools=tools, temperature=0.7, **asked)
        messages.append(message)
        calls = message.get("tool_calls") or ()
        assert bool(calls) is (turn == 1)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "19"} for call in calls] or USER
    calls, (rows, told) = asking.calls(), asking.rows()
    assert [call.sampling[reasons.CONTINUATION] for call in calls] == [
        ContinuationReason.BEGINS,
        *[ContinuationReason.JOINED] * 3,
    ]
    unbroken(calls)
    # A bias and a grammar steered all four, and vLLM does not say where: they are counted, and none is trained on.
    assert (rows, told.dropped) == ([], {UntrainedReason.STEERED: 4})
    for call in (calls[0], *calls[2:]):  # the call under a grammar was drawn from another distribution
        expected = logprobs_of(model, call, 0.7, bias=letters)
        assert list(call.choices[0].logprobs) == pytest.approx(expected, abs=2e-3)


def test_each_of_n_answers_of_vllm_can_be_continued(model, letters, asking):
    both = asking(USER, n=2, max_tokens=8, logit_bias=letters)
    for answer in both:
        asking([*USER, answer, *USER], max_tokens=8)
    first, *others = asking.calls()
    assert first.choices[0].token_ids != first.choices[1].token_ids
    for place, other in enumerate(others):
        before = first.prompt_token_ids + first.choices[place].token_ids
        assert other.prompt_token_ids[: len(before)] == before
        assert list(other.choices[0].logprobs) == pytest.approx(logprobs_of(model, other, 1.0), abs=2e-3)
        expected = logprobs_of(model, first, 1.0, place, bias=letters)
        assert list(first.choices[place].logprobs) == pytest.approx(expected, abs=2e-3)


def test_what_vllm_refuses_of_token_ids_is_told_and_recorded(asking):
    with pytest.raises(openai.BadRequestError, match="context"):
        asking(USER, max_tokens=100_000)
    with pytest.raises(openai.BadRequestError, match="vocab"):
        asking(USER, max_tokens=2, logit_bias={"100000": 1})
    assert all(call.error for call in asking.calls())


TOOLS = [
    {"type": "function", "function": {"name": "greet", "parameters": PERSON}},
    {
        "type": "function",
        "function": {"name": "leave", "parameters": {"type": "object", "additionalProperties": False}},
    },
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
REQUIRED = {"tools": TOOLS, "tool_choice": "required"}
GREET = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "greet"}}}
MOST_CALLS = 8


@pytest.fixture(params=["stock", pytest.param("guidance", marks=pytest.mark.full)])
def constrained(request):
    """Ask a vLLM without a flag, and one with the other backend; `form` is what it must be told in."""
    name, form = ("exact", "structural_tag") if request.param == "stock" else ("guided", "grammar")
    with asker(request.getfixturevalue(name), request.node.name) as ask:
        ask.form = form
        yield ask


@pytest.fixture(scope="module")
def guided(model, other_vllm, tmp_path_factory):
    with exactly(model, other_vllm, tmp_path_factory.mktemp("guided")) as running:
        yield running


def is_person(text):
    found = json.loads(text)
    return found.keys() == {"age"} and 0 <= found["age"] <= 99


@pytest.mark.parametrize("stream", [False, True])
def test_json_is_of_its_schema_and_its_form_is_on_record(constrained, stream):
    (one,) = constrained(USER, stream=stream, response_format=SCHEMA, max_tokens=200)
    (other,) = constrained(USER, stream=stream, response_format={"type": "json_object"}, max_tokens=400)
    assert is_person(one["content"])
    assert isinstance(json.loads(other["content"]), dict)
    for call in constrained.calls():
        assert call.sampling[reasons.CONTINUATION] == ContinuationReason.BEGINS
        assert call.sampling["structured_outputs"].keys() == {constrained.form}


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_of_the_tools_asked_for_and_go_on_exactly(constrained, stream):
    messages = list(USER)
    for most, asked in (
        (MOST_CALLS, REQUIRED),
        (1, {**REQUIRED, "parallel_tool_calls": False}),
        (MOST_CALLS, GREET),
        (1, {**GREET, "parallel_tool_calls": False}),
    ):
        (message,) = constrained(messages, stream=stream, max_tokens=450, temperature=1.0, **asked)
        calls = message["tool_calls"]
        assert 1 <= len(calls) <= most
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            assert is_person(arguments) if name == "greet" else (name, arguments) == ("leave", "{}")
        assert asked is not GREET or {call["function"]["name"] for call in calls} == {"greet"}
        messages += [message, *({"role": "tool", "tool_call_id": call["id"], "content": "19"} for call in calls)]
    how = [call.sampling[reasons.CONTINUATION] for call in constrained.calls()]
    assert how == [ContinuationReason.BEGINS, *[ContinuationReason.JOINED] * 3]
    unbroken(constrained.calls())


def test_a_schema_with_tools_allows_either(constrained):
    (message,) = constrained(USER, tools=TOOLS, response_format=SCHEMA, max_tokens=450)
    assert message.get("tool_calls") or is_person(message["content"])


def test_vllms_own_structured_output_goes_on_before_and_after_ours(post, asking):
    shape = {"messages": USER, "response_format": SCHEMA, "max_tokens": 900}
    named = {"messages": USER, **GREET, "max_tokens": 900}
    for _ in range(2):
        assert is_person(post("/v1/chat/completions", shape).json()["choices"][0]["message"]["content"])
        (call,) = post("/v1/chat/completions", named).json()["choices"][0]["message"]["tool_calls"]
        assert is_person(call["function"]["arguments"])
        assert is_person(asking(USER, response_format=SCHEMA, max_tokens=200)[0]["content"])
        assert asking(USER, **GREET, max_tokens=450)[0]["tool_calls"]


def test_a_schema_that_is_none_is_refused_with_vllms_words(asking):
    nonsense = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError, match="structural_tag"):
        asking(USER, response_format=nonsense)
    assert asking.calls()[0].error


def test_what_only_vllm_reads_goes_as_messages_and_says_so(asking):
    (first,) = asking(USER, max_tokens=4, logprobs=True, top_logprobs=2)
    asking([*USER, first, *USER], max_tokens=4, logprobs=True, top_logprobs=2)
    why = [call.sampling[reasons.CONTINUATION] for call in asking.calls()]
    assert why == [ContinuationReason.BEGINS, ContinuationReason.ONLY_UPSTREAM_READS]
    assert all(call.choices[0].token_ids for call in asking.calls())
