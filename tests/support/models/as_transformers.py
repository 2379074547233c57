"""A model of the embedded backend beside transformers' own forward pass of it, in float32."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch

from lightning_trainer.backends.torch import TorchLearner
from lightning_trainer.backends.torch.learn.update import update
from lightning_trainer.gateway.engine import Sampling
from lightning_trainer.rl.losses import policy_loss, token_logprobs
from lightning_trainer.rl.rows import Row, token_weights

COMMON: Final = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "initializer_range": 0.2,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
Gradients = dict[str, torch.Tensor]


def plain(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


@torch.no_grad()
def plain_logprobs(model: Any, prompt: list[int], answer: tuple[int, ...]) -> list[float]:
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()


async def drawn(engine: Any, prompt: list[int], **sampling: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    tokens, logprobs = [], []
    async for piece in engine.generate(prompt, Sampling(**sampling)):
        tokens += piece.token_ids
        logprobs += piece.logprobs
    return tuple(tokens), tuple(logprobs)


def prompts_of(seed: int) -> list[list[int]]:
    """Prompts far longer than the window: some share a beginning that becomes a prefix, some a short one, some none."""
    random = np.random.default_rng(seed)
    system = random.integers(3, 259, 150).tolist()
    tails = [random.integers(3, 259, length).tolist() for length in (1, 7, 30, 100, 260)]
    return [[*system, *tail] for tail in tails] + [[*system[:40], *tails[2]], tails[3], tails[4] * 3]


async def conversation(engine: Any, seed: int) -> list[tuple[list[int], tuple[int, ...], tuple[float, ...]]]:
    """Draw for all prompts at once, then go on from two answers."""
    prompts = prompts_of(seed)
    asked = [drawn(engine, prompt, max_tokens=25 + 9 * n, seed=n) for n, prompt in enumerate(prompts)]
    found = [(prompt, *answer) for prompt, answer in zip(prompts, await asyncio.gather(*asked), strict=True)]
    for prompt, tokens, _ in found[2:5]:
        longer = [*prompt, *tokens, *range(50, 75)]
        found.append((longer, *await drawn(engine, longer, max_tokens=90, seed=3)))
    return found


def row_of(prompt: list[int], answer: tuple[int, ...], logprobs: tuple[float, ...], advantage: float) -> Row:
    tokens = np.array([*prompt, *answer], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    recorded = np.zeros(len(tokens), np.float32)
    recorded[len(prompt) :] = logprobs
    return Row(
        tokens=tokens, mask=mask, logprobs=recorded, advantages=np.where(mask, advantage, 0.0), lengths=(len(answer),),
        agent="a", attempt_id="t", rollout_id="r", group_id="g",
    )  # fmt: skip


def check_engine_and_update(folder: Path, seed: int, gap: float = 2e-4) -> dict[str, int]:
    """Draw for many prompts and forward what came, to a gap in nats; return the engine's counts."""
    learner = TorchLearner(folder, threads=1, dtype="float32", slots=5)
    oracle = plain(folder)
    found = asyncio.run(conversation(learner.engine, seed))
    for prompt, tokens, logprobs in found:
        assert logprobs == pytest.approx(plain_logprobs(oracle, prompt, tokens), abs=gap)
    rows = [row_of(*each, advantage=1.0) for each in found]
    for row, computed in zip(rows, learner.logprobs(rows), strict=True):
        assert computed == pytest.approx(row.logprobs[row.mask], abs=gap)
    counts = learner.engine.counts()
    learner.close()
    return counts


def check_gradients(folder: Path, **options: object) -> Gradients:
    """Take the gradients of packed rows and of rows forwarded one by one; return ours."""
    random = np.random.default_rng(5)
    rows = []
    for n, prompt in enumerate([*prompts_of(0), prompts_of(0)[3]]):
        answer = tuple(random.integers(3, 259, 20 + 3 * n).tolist())
        rows.append(row_of(prompt, answer, (-5.0,) * len(answer), float(random.normal())))
    learner = TorchLearner(folder, threads=1, dtype="float32", **options)
    policy = learner._weights_of()
    ours: Gradients = {}

    def step() -> tuple[float, bool]:
        ours.update({name: master.grad.clone() for name, master in policy.masters.items()})
        return 0.0, True

    policy.step = step
    update(learner._model, policy, rows, learner.options)
    learner.close()
    model = plain(folder)
    for row, weights in zip(rows, token_weights(rows, learner.options.loss_aggregation), strict=True):
        logits = model(torch.from_numpy(row.tokens.astype(np.int64))[None]).logits[0, :-1]
        kept = torch.from_numpy(row.mask[1:])
        new = token_logprobs(logits[kept], torch.from_numpy(row.tokens[row.mask]), 1.0)
        old, advantages = torch.from_numpy(row.logprobs[row.mask]), torch.from_numpy(row.advantages[row.mask])
        policy_loss(new, old, advantages, torch.from_numpy(weights)).loss.backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert ours.keys() == theirs.keys()
    for parameter, gradient in theirs.items():
        assert (ours[parameter] - gradient).abs().max() < 2e-4 * max(1.0, float(gradient.abs().max())), parameter
    return ours
