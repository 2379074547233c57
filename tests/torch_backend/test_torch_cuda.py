"""Every tensor of the embedded backend is on the device that was asked for. No GPU: see `pretend_cuda`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from lightning_trainer.backends.torch import TorchLearner
from lightning_trainer.backends.torch.model import load
from lightning_trainer.backends.torch.options import make_options
from lightning_trainer.gateway.engine import SampledPiece
from support.models import pretend_cuda
from support.models.sampling import collect
from support.models.updates import make_batch

pytestmark = pytest.mark.torch

CUDA = "cuda:0"
PROMPT = "the quick brown fox " * 6  # long enough for a prefix that several share
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "logit_bias": {70: 2.0}},
    {"temperature": 0, "logit_bias": {70: 2.0}},
    {},
]


@contextmanager
def learner(folder: Path, device: str, **options: Any) -> Iterator[TorchLearner]:
    """A learner on the device. Files are read without it: transformers' own loading is not what is tested."""
    asked = {"device": device, "threads": 1, "learning_rate": 1e-3, "slots": 4, **options}
    with ExitStack() as stack:
        if device != "cpu":
            plain = make_options(folder, {**asked, "device": "cpu"})
            read = [load.load(plain) for _ in range(2)]  # the second is for a reference
            stack.enter_context(mock.patch.object(load, "_read", lambda _, kind, **__: part(read, kind)))
            stack.enter_context(pretend_cuda.installed())
        yield stack.enter_context(closing(TorchLearner(folder, **asked)))


def part(read: list[load.LoadedModel], kind: Any) -> Any:
    """Return the tokenizer, or the next model."""
    if kind.__name__ == "AutoTokenizer":
        return read[-1].tokenizer
    return (read.pop() if len(read) > 1 else read[0]).causal


def sample(backend: TorchLearner, count: int = 6, tokens: int = 6) -> list[SampledPiece]:
    """Answers of all kinds of sampling, more at once than there are slots, from every policy that is served."""
    prompts = [backend.engine.tokenizer(PROMPT + "x" * (9 * n)).input_ids for n in range(count)]

    async def drawn() -> list[SampledPiece]:
        asked = (
            collect(engine, prompt, max_tokens=tokens, seed=n, **SAMPLING[n % len(SAMPLING)])
            for engine in backend.engines
            for n, prompt in enumerate(prompts)
        )
        return list(await asyncio.gather(*asked))

    return asyncio.run(drawn())


def batch(backend: TorchLearner) -> list[Any]:
    names = backend.options.adapters
    rows = make_batch()
    return [replace(row, policy=names[n % len(names)]) for n, row in enumerate(rows)] if names else rows


ALGORITHMS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "bfloat16": {"dtype": "bfloat16"},
    "one adapter": {"lora_rank": 4, "kl_coef": 0.1},
    "two adapters": {"lora_rank": 4, "adapters": ("a", "b"), "dtype": "bfloat16"},
    "reference": {"kl_coef": 0.1, "entropy_coef": 0.01},
    "ppo": {"algorithm": "ppo", "value_clip": 0.2, "kl_coef": 0.1, "kl_in": "reward"},
    "gspo": {"algorithm": "gspo", "old_logprobs": "recompute", "importance_cap": 2.0, "importance_mask": 9.0},
    "minibatches": {"minibatches": 3, "update_epochs": 2, "warmup_steps": 3, "micro_batch_tokens": 64},
}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(o, id=name, marks=() if name in {"all weights", "ppo"} else pytest.mark.full)
        for name, o in ALGORITHMS.items()
    ],
)
def test_a_step_on_the_device_is_the_step_on_the_cpu(tiny_model: Path, options: dict[str, Any]) -> None:
    """Sampling, penalties, the update and sampling with the new weights."""
    found = []
    for device in (CUDA, "cpu"):
        with learner(tiny_model, device, **options) as backend:
            assert backend._model.shape.device == torch.device(device)
            before = sample(backend)
            rows = batch(backend)
            taken = backend.penalties(rows) if options.get("kl_in") == "reward" else []
            metrics = backend.update(rows)
            masters = backend._weights_of(*backend.options.adapters[:1]).masters.values()
            assert {master.device.type for master in masters} == {torch.device(device).type}
            found.append((before, sample(backend), taken, metrics["grad_norm"]))
    (before, after, taken, norm), (before_cpu, after_cpu, taken_cpu, norm_cpu) = found
    assert norm == pytest.approx(norm_cpu, rel=0.1 if options.get("dtype") else 1e-4)
    assert [t.tolist() for t in taken] == [pytest.approx(t.tolist(), abs=1e-4) for t in taken_cpu]
    if not options.get("dtype"):  # in bfloat16 the CPU's own layout of weights rounds in another order
        assert [answer.token_ids for answer in before] == [answer.token_ids for answer in before_cpu]
        assert [answer.token_ids for answer in after] == [answer.token_ids for answer in after_cpu]


@pytest.mark.parametrize("options", [{}, {"algorithm": "ppo"}], ids=["all weights", "ppo"])
def test_masters_and_moments_go_on_from_the_cpu_on_the_device(tiny_model: Path, options: dict[str, Any]) -> None:
    """As a checkpoint is read: its tensors come from the CPU."""
    with learner(tiny_model, CUDA, **options) as backend:
        backend.update(make_batch())
        saved = {name: tensor.cpu() for name, tensor in backend._weights_of().state().items()}
        straight = backend.update(make_batch(1))
    with learner(tiny_model, CUDA, **options) as again:
        again._weights_of().set_state(saved)
        assert again.update(make_batch(1))["grad_norm"] == pytest.approx(straight["grad_norm"], rel=1e-5)


def test_a_tensor_left_on_the_cpu_is_refused_as_a_gpu_would(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else none of these tests could fail."""
    with pretend_cuda.installed():
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2, device=CUDA) + torch.ones(2)
        with pytest.raises(TypeError, match="cpu"):
            torch.ones(2, device=CUDA).numpy()
    with learner(tiny_model, CUDA) as backend:
        monkeypatch.setattr(
            "lightning_trainer.backends.torch.learn.tree_plan.bias",
            lambda hidden, dtype, _: load.attention.bias(hidden, dtype, torch.device("cpu")),
        )
        with pytest.raises(RuntimeError, match="same device"):
            backend.update(make_batch())
