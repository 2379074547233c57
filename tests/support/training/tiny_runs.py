"""Options of a run on the tiny model, its programs, and its metrics."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import open_store
from lightning_trainer import TrainConfig
from lightning_trainer.report.progress import Silent
from support.training.programs import SAY

AGENT = (
    SAY
    + '''
import collections
import itertools

async def run(task):
    """Letters are good."""
    text = await say("writer", task["q"])
    return letters(text)

async def two(task):
    draft = await say("writer", task["q"])
    final = await say("rewriter", task["q"] + draft)
    return {"writer": letters(draft), "rewriter": float(len(final))}

turns = collections.defaultdict(itertools.count)

async def in_turns(task):
    await say("writer", task["q"])
    mine = float(next(turns[task["q"]]) % 2)
    return {"writer": mine, "checker": 1.0 - mine} if task["q"] == "say 0" else {"writer": 1.0, "checker": mine}
'''
)
PLAIN = """
def silent(task):
    return 1.0
"""
PROGRAMS = {"tiny_agent": AGENT, "plain_agent": PLAIN}


def config(model: Path, **options: Any) -> TrainConfig:
    chosen: dict[str, Any] = {
        "target": "tiny_agent:run",
        "data": "tasks.jsonl",
        "model": str(model),
        "agents": "writer",
        "out": "out",
        "steps": 2,
        "batch_size": 2,
        "group_size": 4,
        "learning_rate": 3e-3,
        "workers": 1,
        "timeout_s": 60,
        "backend_options": {"threads": 1},
        **options,
    }
    return TrainConfig(**chosen)


def lines(out: Path, kind: str = "train") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


class StopAt(Silent):
    """Presses Ctrl-C once a step is done."""

    def __init__(self, step: int) -> None:
        self._stop_at = step
        self.told = 0

    def stopping(self) -> None:
        self.told += 1

    def step(self, step: int, metrics: Any) -> None:
        if step == self._stop_at:
            signal.raise_signal(signal.SIGINT)


def rollouts_of(out: Path) -> list[Rollout]:
    store = open_store(str(out / "lightning.db"))
    try:
        return store.rollouts()
    finally:
        store.close()


def tasks_of(out: Path) -> dict[str, Any]:
    return {r.rollout_id.rpartition(":")[2]: r.task for r in rollouts_of(out) if r.mode == "train"}
