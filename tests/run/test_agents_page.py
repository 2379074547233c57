"""The page for coding agents, followed to its end on a repository that is in no example: every line that it shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli import call
from support.shown import ROOT, blocks, calls_of

PAGE = ROOT / "docs/AGENTS.md"
AGENTS = ("triage", "drafter", "checker")
DESK = """
from openai import OpenAI

PROMPTS = {
    "triage": "Name the urgency.",
    "drafter": "Draft an answer.",
    "checker": "Correct the answer.",
}
LENGTHS = {"triage": 8, "drafter": 16, "checker": 96}


class Desk:
    def __init__(self):
        self.client = OpenAI(api_key="of the owner")

    def step(self, role, text):
        messages = [{"role": "system", "content": PROMPTS[role]}, {"role": "user", "content": text}]
        reply = self.client.chat.completions.create(model="gpt-9", messages=messages, max_tokens=LENGTHS[role])
        return reply.choices[0].message.content or ""

    def answer(self, mail):
        urgency = self.step("triage", mail)
        draft = self.step("drafter", f"{urgency}: {mail}")
        return self.step("checker", draft)
"""
SMALL = ["--steps", "1", "--batch-size", "4", "--group-size", "8", "--val-samples", "1", "--workers", "1"]


def shown(pattern: str) -> str:
    """Return what the page shows; the test fails if it no longer does."""
    found = re.search(pattern, PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None, pattern
    return found[1]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The repository after the steps 1 and 2 of the page, with nothing written that the page does not show."""
    attach, name = shown(r"plain Python, use `(.+?)`"), shown(r"name each agent: `(.+?)`").replace('"writer"', "role")
    reward = shown(r"```python\n(def score.+?)```")
    before, create, after = DESK.partition("        reply = self.client")
    create, after = (create + after).split("\n", 1)
    program = f"import {attach.partition('.')[0]}\n{attach}\n{before}        {name}\n    {create}\n{after}"
    (tmp_path / "desk.py").write_text(program)
    (tmp_path / "agent.py").write_text(
        "from desk import Desk\n\ndesk = Desk()\n\n\ndef run(task):\n    return desk.answer(task['mail'])\n"
    )
    (tmp_path / "reward.py").write_text(reward)
    for data, mails in (("train", range(4)), ("val", range(4, 8))):
        tasks = [json.dumps({"mail": f"order {n} is late", "answer": "e"}) + "\n" for n in mails]
        (tmp_path / f"{data}.jsonl").write_text("".join(tasks))
    monkeypatch.chdir(tmp_path)
    for module in ("desk", "agent", "reward"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return tmp_path


def commands(model: str) -> Iterator[list[str]]:
    """Yield what the page types after step 2, with the agents of this program."""
    for line in (line for block in blocks(PAGE) for line in block):
        words = calls_of("lightning-rl", line)
        if words and words[0] in ("agents", "train", "eval", "serve"):
            named = {"caller,answerer": ",".join(AGENTS), "smollm2-135m": model}
            yield [named.get(word, word) for word in words]


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_the_page_for_coding_agents_leads_to_a_trained_checkpoint(desk: Path, tiny_model: Path) -> None:
    done = {}
    for words in commands(str(tiny_model)):
        if words[0] == "serve":
            assert (desk / words[1] / "checkpoint").is_dir()
            continue
        kind = "estimate" if "--dry-run" in words else words[0]
        small = SMALL if words[0] == "train" else []
        done[kind] = call(*words, *small)
        assert done[kind].exit_code == 0, f"{' '.join(words)}\n{done[kind].output}"
    assert list(done) == ["agents", "estimate", "train", "eval"]
    assert all(f"{name} would be trained" in done["agents"].output for name in AGENTS)
    assert all(unit in done["estimate"].output for unit in ("memory", "disk", "time per step"))
    assert {"reward_before", "reward_after"} <= json.loads(done["train"].stdout.splitlines()[-1]).keys()
    assert "difference" in done["eval"].output


@pytest.mark.full
@pytest.mark.model
@pytest.mark.timeout(3600)
def test_the_page_for_coding_agents_leads_to_a_served_policy(desk: Path) -> None:
    for file in desk.glob("*.jsonl"):  # SmolLM2's answers always contain an e, so no reward would differ
        file.write_text(file.read_text().replace('"answer": "e"', '"answer": "x"'))
    for words in commands("smollm2-135m"):
        command = [sys.executable, "-m", "lightning_trainer.cli", *words]
        if words[0] != "serve":
            subprocess.run([*command, *(SMALL if words[0] == "train" else [])], cwd=desk, check=True, timeout=1800)
            continue
        with subprocess.Popen([*command, "--port", "0"], cwd=desk, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            try:
                assert json.loads(server.stdout.readline())["url"]
            finally:
                server.terminate()
