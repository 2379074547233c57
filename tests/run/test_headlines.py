"""What a run says it came to: of the agents that were trained, and as far as it is sure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lightning_spans import hookimpl, hooks
from lightning_trainer.cli import cli
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.run.embedded import EmbeddedBackend
from support.fakes import FakeEngine
from support.training.backends import Remembering
from support.training.programs import CLIENT, put_programs

pytest.importorskip("openai")

AGENT = (
    CLIENT
    + '''
def run(task):
    """The router is right or wrong; the worker, which nobody trains, always fails."""
    with agent("router"):
        reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["q"]}])
    return {"router": float(reply.choices[0].message.content == task["a"]), "worker": 0.0}
'''
)
KINDS = ("technical", "billing")
Answer = Callable[[int, int, int], str]  # (ticket, updates, times asked since the last one) -> the answer


class Routing(Remembering):
    """A learner that answers from a script, as far as updates have taken it."""

    def __init__(self, config: TrainConfig, answer: Answer) -> None:
        super().__init__(config)
        self.engine = FakeEngine(self.reply)
        self.engines = (self.engine,)
        self.script = answer
        self.asked: Counter[tuple[int, int]] = Counter()

    def reply(self, prompt: str) -> str:
        ticket, updates = int(prompt.rpartition("ticket ")[2].split()[0]), len(self.given)
        self.asked[ticket, updates] += 1
        return self.script(ticket, updates, self.asked[ticket, updates])


Train = Callable[..., dict[str, Any]]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """Train a router that answers as a script says, and return the last line."""
    put_programs(tmp_path, [{"q": f"Route ticket {n} .", "a": KINDS[n % 2]} for n in range(8)], tickets=AGENT)
    monkeypatch.chdir(tmp_path)

    class Stranger:
        def __init__(self, answer: Answer) -> None:
            self.answer = answer

        @hookimpl
        def lightning_register_backends(self, register: Any) -> None:
            register("routing", EmbeddedBackend(lambda config: Routing(config, self.answer), lambda config: None))

    def run(answer: Answer, *options: str) -> dict[str, Any]:
        hooks.register(Stranger(answer), "stranger")
        small = ["--batch-size", "4", "--group-size", "2", "--workers", "1", "--out", "out", "--backend", "routing"]
        data = ["--data", "tasks.jsonl", "--val", "tasks.jsonl", "--model", "none", "--agents", "router"]
        result = CliRunner().invoke(cli, ["train", "tickets:run", *data, *small, *options])
        assert result.exit_code == 0, result.output
        return {**json.loads(result.stdout.splitlines()[-1]), "stderr": result.stderr}

    yield run
    hooks.unregister("stranger")


def right(ticket: int) -> str:
    return KINDS[ticket % 2]


def test_the_last_line_is_about_the_agents_that_were_trained(train: Train) -> None:
    def answer(ticket: int, updates: int, times: int) -> str:
        """Answer half of the tickets before, all after, and in training each ticket in two ways."""
        return right(ticket) if updates or (ticket < 4 if times == 1 else times % 2) else "none"

    told = train(answer, "--steps", "1")
    assert (told["reward_before"], told["reward_after"]) == (0.5, 1.0)
    assert (told["difference"], told["difference_tasks"], told["best_step"]) == (0.5, 8, 1)
    assert told["difference_low"] < 0.5 < told["difference_high"]
    assert told["by_agent"]["router"]["difference"] == 0.5
    assert (told["by_agent"]["worker"]["difference"], told["by_agent"]["worker"]["n"]) == (0.0, 8)
    assert "difference of worker, not trained: +0.000 (" in told["stderr"]
    assert "The held-out reward rose from 0.500 to 1.000: difference +0.500 (" in told["stderr"]


def test_a_router_that_collapses_raises_an_alarm_and_the_best_checkpoint_stays(train: Train, tmp_path: Path) -> None:
    def answer(ticket: int, updates: int, times: int) -> str:
        """Be right on 4 of 8 held-out tickets, then on all, then say `technical` to all: right on 4 of 8 again."""
        if updates == 2:
            return "technical"
        return right(ticket) if (updates or ticket < 4 if times == 1 else times % 2) else "none"

    told = train(answer, "--steps", "2", "--val-every", "1", "--keep", "1")
    assert (told["reward_before"], told["reward_after"], told["best_step"]) == (0.5, 0.5, 1)
    assert [alarm["name"] for alarm in told["alarms"]] == ["answers_alike/router"]
    assert "router gives the answer 'technical' to 100% of the different prompts" in told["alarms"][0]["text"]
    assert told["checkpoint_best"] == "out/checkpoint-best"
    steps = {name: (tmp_path / "out" / name).resolve().name for name in ("checkpoint", "checkpoint-best")}
    assert steps == {"checkpoint": "step-000002", "checkpoint-best": "step-000001"}
