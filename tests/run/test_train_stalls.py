"""A program that stalls in a busy loop, ends its process or hangs costs its own rollout, and the run goes on."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from lightning_spans.store import open_store

pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch

from lightning_trainer import train
from lightning_trainer.report.progress import Silent
from support.training.tiny_runs import config, lines

STALLS = """
import os, threading
from pathlib import Path
import openai
import lightning_openai
from lightning_spans import agent
from lightning_spans.record.context import current_attempt

lightning_openai.attach(tracer="embedded")
here = Path(__file__).parent

def stalls(how):
    mine = current_attempt().rollout_id
    try:
        with (here / how).open("x") as file:
            file.write(mine)
    except FileExistsError:
        return (here / how).read_text() == mine
    return True

def run(task):
    with agent("writer"):
        reply = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="mine", max_retries=0).chat.completions.create(
            model="m", max_tokens=5, messages=[{"role": "user", "content": task["how"]}])
    if stalls(task["how"]):
        while task["how"] == "loop":
            pass
        if task["how"] == "exit":
            os._exit(7)
        threading.Event().wait()
    return float(len(reply.choices[0].message.content or "") % 2)
"""


@pytest.mark.parametrize("isolate", [False, True])
def test_programs_that_stall_cost_their_own_rollouts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, isolate: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stalling.py").write_text(STALLS)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"how": how}) + "\n" for how in ("loop", "exit", "hang")))
    options = {"target": "stalling:run", "batch_size": 3, "group_size": 3, "timeout_s": 20, "concurrency": 3}
    result = train(config(tiny_model, steps=1, workers=2, isolate=isolate, **options), Silent())
    [step] = lines(result.folder)
    assert (result.steps, step["rollouts"], step["failed"]) == (1, 9.0, 3.0)
    with closing(open_store(str(result.folder / "lightning.db"))) as store:
        newest = {each.rollout.rollout_id: each.status for each in store.attempts()}
    assert Counter(newest.values()) == {"succeeded": 6, "timeout": 2, "failed": 1}
