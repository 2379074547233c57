"""A checkpoint's adapters on a real vLLM: loaded while it runs, and answered for under their own names."""

from __future__ import annotations

import httpx
import pytest

from support.fakes import FakeEngine, served

pytest.importorskip("vllm")

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lightning_trainer.backends.torch import TorchLearner
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.gateway.upstream.adapters import load_adapters
from lightning_trainer.gateway.upstream.upstream import Upstream
from support.gateway.vllm import vllm_serving
from support.models.tiny import make_tiny_model

pytestmark = pytest.mark.timeout(900)
NAMES = ("writer", "rewriter")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", head_dim=32, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def vllm(model, tmp_path_factory):
    """URL of a vLLM that may load adapters and knows none."""
    more = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
        with vllm_serving(model, tmp_path_factory.mktemp("vllm"), "processed_logprobs", *more) as url:
            yield url


def write_checkpoint(model, folder, seed):
    """Write a checkpoint as the torch backend does, of adapters far enough from the base to tell them apart."""
    backend = TorchLearner(model, adapters=NAMES, lora_rank=4, dtype="float32")
    try:
        torch.manual_seed(seed)
        for name, parameter in backend._model.causal.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0.0, 0.5)
        backend.save(folder)
    finally:
        backend.close()
    return folder


def logprobs_of(model, call, adapter):
    """What transformers says of the recorded tokens, with peft's adapter of a folder, or without any."""
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    causal = PeftModel.from_pretrained(causal, adapter) if adapter else causal
    prompt, drawn = list(call.prompt_token_ids), list(call.choices[0].token_ids)
    with torch.no_grad():
        logits = causal(torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1]
    found = torch.log_softmax(logits / 0.7, -1)
    return [float(row[token]) for row, token in zip(found, drawn, strict=True)]


@pytest.mark.full
def test_each_adapter_answers_under_its_name_and_a_newer_checkpoint_takes_its_place(model, vllm, tmp_path):
    base = Upstream("tiny", vllm)
    for seed in (5, 6):
        checkpoint = write_checkpoint(model, tmp_path / "checkpoint", seed)  # where the earlier one was
        upstreams = [base, *load_adapters(checkpoint, [base])]
        folders = {"tiny": None, **{name: checkpoint / name for name in NAMES}}
        folder = tmp_path / f"front{seed}"
        folder.mkdir()
        with served(folder, FakeEngine(), upstreams=upstreams, routing=Routing(model="tiny", seed=3)) as front:
            headers = {"authorization": f"Bearer {front.key('attempt')}"}
            for name in folders:
                body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}
                asked = {**body, "temperature": 0.7}
                reply = httpx.post(f"{front.url}/v1/chat/completions", json=asked, headers=headers, timeout=300)
                assert reply.status_code == 200, reply.text
            calls = {call.policy: call for call in front.calls("attempt")}
        assert calls.keys() == folders.keys()
        for name, call in calls.items():
            told = list(call.choices[0].logprobs)
            said = {own: logprobs_of(model, call, folder) for own, folder in folders.items()}
            assert told == pytest.approx(said.pop(name), abs=2e-3)
            assert all(other != pytest.approx(told, abs=0.05) for other in said.values()), "they must be told apart"
