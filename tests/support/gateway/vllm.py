"""A real vLLM server, and a gateway in front of it."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_spans.chat.stream import Growing, message_of
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.gateway.upstream.upstream import Upstream
from support.fakes import FakeEngine, served
from support.gateway.long_talks import rows_of

USER = [{"role": "user", "content": "hi"}]


@contextmanager
def vllm_serving(model, folder, logprobs_mode, *more):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model), "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "2048", "--max-num-seqs", "16", "--logprobs-mode", logprobs_mode),
        *("--gpu-memory-utilization", "0.2"),  # of the memory, though there is no GPU: other programs have some too
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *more,
    ]
    log = folder / "log"
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


def logprobs_of(model, call, temperature, choice=0, *, bias=None):
    """What transformers says of the recorded tokens."""
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt, drawn = list(call.prompt_token_ids), list(call.choices[choice].token_ids)
    return drawn_from(causal, prompt, drawn, temperature, bias or {})


def drawn_from(causal, prompt, drawn, temperature, bias):
    with torch.no_grad():
        logits = causal(torch.tensor([prompt + drawn])).logits[0]
    for token, value in bias.items():
        logits[:, int(token)] += value
    found = torch.log_softmax(logits / temperature, -1)
    return [float(found[len(prompt) + at - 1, token]) for at, token in enumerate(drawn)]


@contextmanager
def exactly(model, url, folder):
    upstream = Upstream("tiny", url, tokenizer=AutoTokenizer.from_pretrained(model))
    with served(folder, FakeEngine(), upstreams=[upstream], routing=Routing(model="tiny", seed=3)) as running:
        yield running


@contextmanager
def asker(front, attempt):
    """Ask, and give the whole messages, put together where they are streamed."""
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key=front.key(attempt), max_retries=0)

    def ask(messages, *, stream=False, **body):
        if not stream:
            choices = client.chat.completions.create(model="tiny", messages=messages, **body).choices
            return [choice.message.model_dump() for choice in choices]
        whole = Growing()
        for chunk in client.chat.completions.create(model="tiny", messages=messages, stream=True, **body):
            for choice in chunk.choices:
                whole.add(choice.delta.model_dump())
        return [{"role": "assistant", "content": None, **message_of(whole)}]

    with client:
        ask.calls = lambda: front.calls(attempt)
        ask.rows = lambda: rows_of(front, attempt)
        yield ask


def unbroken(calls):
    for call, later in itertools.pairwise(calls):
        before = call.prompt_token_ids + call.choices[0].token_ids
        assert later.prompt_token_ids[: len(before)] == before
