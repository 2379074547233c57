"""The gateway before a real vLLM: every surface recorded token for token, and what vLLM is told and asked."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time

import httpx
import pytest
from fakes import FakeEngine, served

pytest.importorskip("vllm")

import torch
from tiny import make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_trainer.server.settings import Routing
from lightning_trainer.server.upstream import Upstream

pytestmark = pytest.mark.timeout(600)
USER = [{"role": "user", "content": "hi"}]
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "2048", "--max-num-seqs", "16", "--logprobs-mode", "processed_logprobs"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    ]
    log = tmp_path_factory.mktemp("vllm") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        until = time.monotonic() + 540  # seconds are many on a busy machine
        while not _up(url):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until, log.read_text()[-3000:]
            time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _up(url):
    try:
        return httpx.get(f"{url}/models", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


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


def logprobs_of(model, call, temperature):
    """What transformers says of the recorded tokens."""
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt, drawn = list(call.prompt_token_ids), list(call.choices[0].token_ids)
    with torch.no_grad():
        logits = causal(torch.tensor([prompt + drawn])).logits[0] / temperature
    found = torch.log_softmax(logits, -1)
    return [float(found[len(prompt) + at - 1, token]) for at, token in enumerate(drawn)]


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
