"""Options of a run on the tiny model, its programs, and its metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_trainer import TrainConfig

AGENT = '''
import collections
import itertools
import openai
import lightning_openai
from lightning_spans import agent

lightning_openai.attach(tracer="embedded")
client = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="mine", max_retries=0)

async def say(name, text):
    with agent(name):
        reply = await client.chat.completions.create(
            model="gpt-9", max_tokens=5, messages=[{"role": "user", "content": text}]
        )
    return reply.choices[0].message.content or ""

async def run(task):
    """Letters are good."""
    text = await say("writer", task["q"])
    return sum(letter.isascii() and letter.isalpha() for letter in text) / 5

async def two(task):
    draft = await say("writer", task["q"])
    final = await say("rewriter", task["q"] + draft)
    return {"writer": sum(c.isascii() and c.isalpha() for c in draft) / 5, "rewriter": float(len(final))}

turns = collections.defaultdict(itertools.count)

async def in_turns(task):
    await say("writer", task["q"])
    mine = float(next(turns[task["q"]]) % 2)
    return {"writer": mine, "checker": 1.0 - mine} if task["q"] == "say 0" else {"writer": 1.0, "checker": mine}
'''


PLAIN = """
def silent(task):
    return 1.0
"""


def write_program(folder: Path) -> None:
    (folder / "tiny_agent.py").write_text(AGENT)
    (folder / "plain_agent.py").write_text(PLAIN)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"q": f"say {n}"}) + "\n" for n in range(5)))


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
