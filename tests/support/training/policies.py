"""Runs of several agents with a policy each."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from lightning_spans.schema.calls import Call
from lightning_spans.store import open_store
from lightning_trainer import TrainConfig
from support.training.programs import SAY, folder_with

AGENT = (
    SAY
    + """
async def three(task):
    draft = await say("writer", task["q"])
    final = await say("rewriter", task["q"] + draft)
    verdict = await say("checker", final)
    return {"writer": letters(draft), "rewriter": letters(final)}

async def calm(task):
    try:
        return await three(task)
    except openai.APIError:
        return {"writer": 0.0, "rewriter": 0.0}

async def alone(task):
    try:
        await say("checker", task["q"])  # nobody answers at the address that it has by itself
    except openai.APIConnectionError:
        return {"writer": letters(await say("writer", task["q"]))}
    raise RuntimeError("an agent without a policy was rerouted")
"""
)
folder = folder_with(4, policy_agent=AGENT)


def config(model: Path, **options: Any) -> TrainConfig:
    chosen: dict[str, Any] = {
        "target": "policy_agent:three",
        "policies": "writer=lora,rewriter=lora,checker=base",
        "data": "tasks.jsonl",
        "model": str(model),
        "out": "out",
        "steps": 2,
        "batch_size": 2,
        "group_size": 3,
        "learning_rate": 3e-3,
        "lora_rank": 4,
        "workers": 1,
        "timeout_s": 60,
        "backend_options": {"threads": 1},
        **options,
    }
    return TrainConfig(**chosen)


def lines(out: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == "train"]


def calls(out: Path) -> list[Call]:
    store = open_store(str(out / "lightning.db"))
    try:
        return store.calls()
    finally:
        store.close()


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.safetensors"))}
