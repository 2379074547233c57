"""Backends and batches of the tiny model, and gradients by plain PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lightning_trainer.backends.torch import TorchLearner
from lightning_trainer.backends.torch.learn.update import update
from lightning_trainer.rl.losses import policy_loss, token_logprobs
from lightning_trainer.rl.rows import Row, token_weights

Gradients = dict[str, "torch.Tensor"]


def make_backend(folder: Path, **options: object) -> TorchLearner:
    return TorchLearner(folder, **{"threads": 1, **options})


def make_row(tokens: list[int], answer: slice, advantage: float = 1.0, logprob: float = -5.0, **changes: object) -> Row:
    mask = np.zeros(len(tokens), np.bool_)
    mask[answer] = True
    fields = {
        "tokens": np.array(tokens, np.int32),
        "mask": mask,
        "logprobs": np.where(mask, logprob, 0).astype(np.float32),
        "advantages": np.where(mask, advantage, 0.0),
        "lengths": (int(mask.sum()),),
        "agent": "a",
        "attempt_id": "t",
        "rollout_id": "r",
        "group_id": "g",
    }
    return Row(**{**fields, **changes})


def make_batch(seed: int = 0, count: int = 12, temperature: float = 1.0) -> list[Row]:
    """Rows as in a step: one system prompt, groups with one question, answers that begin alike, two temperatures."""
    random = np.random.default_rng(seed)
    system = random.integers(3, 250, 20)
    rows: list[Row] = []
    for n in range(count):
        question = np.random.default_rng(n // 4).integers(3, 250, 3 + n // 4)
        prompt = [*system, *question]
        answer = random.integers(3, 250, random.integers(2, 12)).tolist()
        if n % 4 == 3:  # shares sampled tokens with the row before it
            answer = [*rows[-1].tokens[len(prompt) : len(prompt) + 2].tolist(), *answer]
        row = make_row([*prompt, *answer], slice(len(prompt), None), float(random.normal()))
        logprobs = np.where(row.mask, -5 + 0.3 * random.standard_normal(len(row.tokens)), 0).astype(np.float32)
        rows.append(replace(row, logprobs=logprobs, temperature=temperature if n % 2 else 1.0))
    return [*rows, rows[0]]  # twice the same: n > 1 choices may be equal


def gradients(folder: Path, rows: list[Row], *, share: bool = True, **options: object) -> tuple[Gradients, dict]:
    """Gradients of the masters as they come to the optimiser."""
    backend = make_backend(folder, **options)
    policy, found = backend._weights_of(), {}

    def step() -> tuple[float, bool]:
        found.update({name: master.grad.clone() for name, master in policy.masters.items()})
        return 0.0, True

    policy.step = step
    metrics = update(backend._model, policy, rows, backend.options, backend._reference(), share=share)
    backend.close()
    return found, metrics


def plain_gradients(folder: Path, rows: list[Row], aggregation: str = "token-mean", **clip: float) -> Gradients:
    """The same by transformers alone: each row forwarded whole, on its own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for row, weights in zip(rows, token_weights(rows, aggregation), strict=True):
        logits = model(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0, :-1]
        kept = torch.from_numpy(row.mask[1:])
        new = token_logprobs(logits[kept], torch.from_numpy(row.tokens[row.mask]), row.temperature)
        old, advantages = torch.from_numpy(row.logprobs[row.mask]), torch.from_numpy(row.advantages[row.mask])
        policy_loss(new, old, advantages, torch.from_numpy(weights), **clip).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def distance(a: Gradients, b: Gradients) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
