"""vLLM's CPU build as the engine of whole runs, and of many updates in a row."""

from __future__ import annotations

import os
import signal

import pytest

pytest.importorskip("vllm")
psutil = pytest.importorskip("psutil")

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lightning_trainer import train
from lightning_trainer.backends.torch.learner import TorchLearner
from lightning_trainer.backends.torch.sampler import engine_of
from lightning_trainer.engines.vllm import process
from lightning_trainer.report.progress import Silent
from support.models.tiny import make_tiny_model
from support.training.engines import answer_under_grammar
from support.training.policies import config, folder, lines  # noqa: F401 - a fixture among them

pytestmark = pytest.mark.timeout(3000)
NAMES = ("writer", "rewriter")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", head_dim=32, max_position_embeddings=2048)


def servers():
    """Processes of vLLM's server."""
    return [
        each for each in psutil.Process().children(recursive=True) if "vllm.entrypoints" in " ".join(each.cmdline()[:4])
    ]


def cores():
    """Processes in which vLLM computes."""
    return [each for each in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(each.cmdline()[:1])]


class Disturbs(Silent):
    """Sends a signal to some processes of vLLM after the first step."""

    def __init__(self, sent, targets):
        self.sent, self.targets = sent, targets
        self.disturbed = 0

    def step(self, step, metrics):
        if step == 0:
            for each in self.targets():
                os.kill(each.pid, self.sent)
                self.disturbed += 1


@pytest.mark.parametrize(
    ("sent", "targets"), [(signal.SIGKILL, servers), (signal.SIGSTOP, servers), (signal.SIGSTOP, cores)]
)
def test_two_adapters_learn_although_vllm_is_killed_or_hangs(model, folder, monkeypatch, sent, targets):  # noqa: F811
    monkeypatch.setattr(process, "_FROZEN_S", 60.0)
    progress = Disturbs(sent, targets)
    options = {"engine": "vllm", "steps": 3, "max_model_len": 512, "timeout_s": 900, "max_attempts": 4}
    train(config(model, dtype="float32", **options), progress)
    assert progress.disturbed
    steps = lines(folder / "out")
    assert [line["step"] for line in steps] == [0, 1, 2]
    assert [line["failed"] for line in steps] == [0, 0, 0]
    for line in steps:
        for name in NAMES:
            assert line[f"engine_gap/{name}"] < 2e-3
            assert line[f"engine_correlation/{name}"] > 0.999
    assert not servers() + cores()


def test_adapters_loaded_stay_constant_over_many_updates_and_none_is_stale(model, folder):  # noqa: F811
    """The same prompt is asked after each update, whose beginning vLLM has cached under the versions before."""
    chosen = config(model, engine="vllm", dtype="float32", max_model_len=512)
    learner = TorchLearner(model, sampler=engine_of(chosen), adapters=NAMES, lora_rank=4, dtype="float32")
    try:
        engine, tokens = learner._engine, list(range(3, 203))
        adapters = [each for each in learner.engines if each.model in NAMES]
        causal, seen = learner._model.causal, []
        for number in range(1, 13):
            for name, parameter in causal.named_parameters():
                if "lora_B" in name:
                    parameter.data.normal_(0.0, 0.3)
            engine.publish(dict.fromkeys(NAMES, number), learner._write)
            for adapter in adapters:
                base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
                newest = PeftModel.from_pretrained(base, engine._folder / adapter.names.newest.name)
                with torch.no_grad():
                    scores = torch.log_softmax(newest(torch.tensor([tokens])).logits[0, -1], -1)
                token, logprob = sampled(adapter, tokens)
                assert logprob == pytest.approx(float(scores[token]), abs=2e-3)
                seen.append(logprob)
        assert len(set(seen)) == 24
        engine._unloader.submit(lambda: None).result()
        assert sorted(name.partition(".")[0] for name in loaded(engine)) == ["rewriter@12", "writer@12"]
    finally:
        learner.close()


def test_all_weights_learn_and_a_staleness_of_one_is_recorded(folder):  # noqa: F811
    model = make_tiny_model(folder / "untied", head_dim=32, max_position_embeddings=2048, tie_word_embeddings=False)
    options = {"engine": "vllm", "steps": 4, "max_model_len": 512, "timeout_s": 900, "max_attempts": 4, "staleness": 1}
    train(config(model, dtype="float32", policies={}, lora_rank=0, **options))
    steps = lines(folder / "out")
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    assert max(line["staleness_max"] for line in steps) == 1
    gaps = [line["engine_gap/untied"] for line in steps if "engine_gap/untied" in line]
    assert gaps
    assert max(gaps) < 2e-3
    assert not servers()


def test_an_answer_follows_its_grammar_and_has_the_policys_log_probabilities(model, folder):  # noqa: F811
    chosen = config(model, engine="vllm", dtype="float32", max_model_len=512)
    answer = answer_under_grammar(model, engine_of(chosen), 12, 'start: "ab" /[0-9]{3}/ "z"')
    assert (answer.text[:2], answer.text[5:]) == ("ab", "z")
    assert answer.logprobs == pytest.approx(answer.own, abs=2e-3)
    assert answer.steered[:2] + answer.steered[5:] == [True] * 4


def sampled(engine, tokens):
    """Sample one token as the gateway does."""
    import asyncio

    from lightning_trainer.gateway.engine import Sampling

    async def first():
        try:
            async for piece in engine.generate(tokens, Sampling(max_tokens=1, seed=7)):
                if piece.token_ids:
                    return piece.token_ids[0], piece.logprobs[0]
        finally:
            await engine.disconnect()

    return asyncio.run(first())


def loaded(engine):
    import httpx

    headers = {"authorization": f"Bearer {engine.servers.key}"}
    cards = httpx.get(f"{engine.servers.urls[0]}/models", headers=headers, timeout=60).json()["data"]
    return [card["id"] for card in cards if card.get("parent")]
