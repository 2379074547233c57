"""Every architecture of the table of families is trained: two steps of the embedded backend on a tiny random model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from support.models.family_models import ONE_OF_EACH, make_family_model
from support.models.model_families import all_families

pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch

from lightning_trainer import TrainConfig, train
from lightning_trainer.report.progress import Silent

AGENT = '''
import openai
from lightning_spans import agent
import lightning_openai

lightning_openai.attach(tracer="embedded")
client = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="mine", max_retries=0)

async def run(task):
    """Two turns: letters are good."""
    messages = [{"role": "user", "content": task["q"]}]
    for _ in range(2):
        with agent("writer"):
            reply = await client.chat.completions.create(model="gpt-9", max_tokens=5, messages=messages)
        message = reply.choices[0].message
        said = message.content or getattr(message, "reasoning_content", None) or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return sum(letter.isascii() and letter.isalpha() for letter in said) / 5
'''


def trained(folder, monkeypatch, name):
    family = {family.name: family for family in all_families()}.get(name)
    if family is None:
        pytest.skip("trl's templates are not here")
    monkeypatch.chdir(folder)
    Path("family_agent.py").write_text(AGENT)
    Path("tasks.jsonl").write_text("".join(json.dumps({"q": f"say {n}"}) + "\n" for n in range(4)))
    chosen = {
        "target": "family_agent:run", "data": "tasks.jsonl", "agents": "writer", "out": "out", "steps": 2,
        "model": str(make_family_model(folder / "model", family)), "batch_size": 2, "group_size": 4,
        "learning_rate": 3e-3, "workers": 1, "timeout_s": 60, "backend_options": {"threads": 1},
    }  # fmt: skip
    train(TrainConfig(**chosen), Silent())


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_two_steps_are_trained_and_engine_and_trainer_agree(tmp_path, monkeypatch, name):
    trained(tmp_path, monkeypatch, name)
    found = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in found if line["kind"] == "train"]
    assert [step["step"] for step in steps] == [0, 1]
    assert all(step["tokens"] > 0 and math.isfinite(step["grad_norm"]) and step["grad_norm"] > 0 for step in steps)
    assert max(step["logprob_gap"] for step in steps) < 1e-3
