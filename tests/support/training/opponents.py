"""Runs in which agents meet frozen weights of each other."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lightning_trainer.run.state import read_state
from support.training.policies import calls

AGAINST: dict[str, Any] = {
    "target": "policy_agent:three", "policies": "writer=lora,rewriter=lora,checker=base", "save_every": 1, "keep": 9,
    "opponents": "rewriter=2", "opponents_every": 1, "batch_size": 4, "learning_rate": 3e-2,
}  # fmt: skip


def frozen_calls(out: Path) -> list[Any]:
    """Calls that frozen weights of the rewriter answered."""
    return [call for call in calls(out) if (call.policy or "").startswith("rewriter-past-")]


def largest_gap(model: Path, out: Path) -> float:
    """The largest difference of these calls' log-probabilities from those of the weights in the run's folder."""
    saved = [read_state(path).kept["opponents"]["rewriter"] for path in (out / "checkpoints").glob("step-*")]
    steps = {version: step for its in saved for step, version in its["versions"]}
    gaps = []
    for call in frozen_calls(out):
        prompt, answer = list(call.prompt_token_ids or ()), list(call.choices[0].token_ids or ())
        folder = out / "opponents" / "rewriter" / f"step-{steps[call.policy_version]:06d}"
        own = _logprobs(_adapted(model, folder), prompt + answer)[len(prompt) - 1 :]
        gaps.append(float(np.abs(own - call.choices[0].logprobs).max()))
    return max(gaps)


@cache
def _adapted(model: Path, adapter: Path) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter)).eval()


def _logprobs(causal: Any, tokens: list[int]) -> Any:
    import torch

    with torch.no_grad():
        logits = causal(torch.tensor([tokens])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy()
