"""Answers of an engine that a learner has opened."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_trainer.gateway.engine import Sampling

NAMES = ("writer", "rewriter")


@dataclass(frozen=True, slots=True)
class Answer:
    """What was sampled, and what the model itself says of it: `own` log-probabilities."""

    text: str
    logprobs: list[float]
    steered: list[bool]
    own: list[float]


def answer_under_grammar(model: Path, sampler: Any, most: int, grammar: str) -> Answer:
    """Sample one answer of a new adapter, which changes nothing yet."""
    import torch
    from transformers import AutoModelForCausalLM

    from lightning_trainer.backends.torch.learner import TorchLearner

    prompt = list(range(3, 23))
    learner = TorchLearner(model, sampler=sampler, adapters=NAMES, lora_rank=4, dtype="float32")
    try:
        sampling = Sampling(max_tokens=most, seed=7, grammar=grammar)
        pieces = asyncio.run(_pieces(learner.engines[1], prompt, sampling))
    finally:
        learner.close()
    ids = [token for piece in pieces for token in piece.token_ids]
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        scores = torch.log_softmax(base(torch.tensor([prompt + ids])).logits[0], -1)
    own = [float(scores[len(prompt) - 1 + place, token]) for place, token in enumerate(ids)]
    text = "".join(piece.text for piece in pieces)
    logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
    return Answer(text, logprobs, [each for piece in pieces for each in piece.steered], own)


async def _pieces(engine: Any, prompt: list[int], sampling: Sampling) -> list[Any]:
    try:
        return [piece async for piece in engine.generate(prompt, sampling)]
    finally:
        await engine.disconnect()
