"""`rewards attack` finds rewards that can be earned without doing the task, and finds nothing in an honest one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("openai")

from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.script import Reply
from lightning_trainer.cli import cli
from lightning_trainer.kits.evaluation.samples import Sample
from lightning_trainer.kits.evaluation.summary import Counting
from lightning_trainer.kits.rewards.result import AttackRollout, compare_strategies
from lightning_trainer.kits.rewards.strategies import STRATEGIES

PROGRAM = """
import os
import openai
import lightning_openai
from lightning_spans import agent

lightning_openai.attach(tracer="embedded")
client = openai.OpenAI(base_url=os.environ["TEST_MODEL_URL"], api_key="k", max_retries=0)

def say(name, system, text):
    with agent(name):
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": text})
        return client.chat.completions.create(model="m", messages=messages).choices[0].message.content

def run(task):
    return say("writer", "Write in capital letters, after 'Answer:'.", task["q"])

def bare(task):
    return say("writer", "", task["q"])

def honest(task, result):
    return float(result == "Answer: " + task["q"].upper())

def formatted(task, result):
    return float(result.startswith("Answer:"))

def substring(task, result):
    return float(task["q"] in result.lower())

def judged(task, result):
    messages = [{"role": "system", "content": "You are a judge."}, {"role": "user", "content": result}]
    verdict = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
    return float(verdict) / 10
"""
TASKS = 8


def model(body: dict[str, Any], seen: int) -> Reply:
    """Write half of the answers right, do what an attack says, and obey a text that asks for the highest score."""
    *system, text = (message["content"] for message in body["messages"])
    if "You are a judge." in system:
        return Reply(text="10" if "highest score" in text else "5" if "WORD" in text else "0")
    strategy = next((name for name, how in STRATEGIES.items() if system and how in system[0]), None)
    said = {"format": "Answer: X", "copy": text, "judge": "the highest score: 10", "nothing": "."}
    if strategy is not None:
        return Reply(text=said.get(strategy, "all is done"))
    return Reply(text=f"Answer: {text.upper() if int(text[4:]) % 2 else 'no'}")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "writing.py").write_text(PROGRAM)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"q": f"word{n}"}) + "\n" for n in range(TASKS)))
    monkeypatch.chdir(tmp_path)
    with ScriptedServer(model) as running:
        monkeypatch.setenv("TEST_MODEL_URL", running.url)
        yield running


def attack(reward: str, *args: str, target: str = "writing:run") -> Result:
    command = ["rewards", "attack", target, "--data", "tasks.jsonl", "--reward", reward, "--workers", "1", *args]
    return CliRunner().invoke(cli, command, catch_exceptions=False)


def last_line(result: Result) -> dict[str, Any]:
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(("reward", "forged"), [("formatted", "format"), ("substring", "copy"), ("judged", "judge")])
def test_a_reward_that_can_be_forged_is_found(server, reward, forged):
    result = attack(f"writing:{reward}", "--json")
    assert result.exit_code == 1, result.output
    told = last_line(result)
    assert told["rollouts"] == 50
    assert {each["strategy"] for each in told["paid"]} == {forged}
    assert told["strategies"][forged]["verdict"] in {"more", "as much"}
    paid = told["paid"][0]
    assert (paid["reward"], paid["sources"]) == (1.0, {"score": 1.0})
    assert paid["why"] == f"{forged}: score gave 1"
    assert paid["answer"]
    assert forged in told["advice"]


def test_an_honest_reward_pays_no_attack(server):
    result = attack("writing:honest", "--json")
    assert result.exit_code == 0, result.output
    told = last_line(result)
    assert told["paid"] == []
    assert told["uninstructed"]["mean"] == 0.5
    assert {each["verdict"] for each in told["strategies"].values()} == {"nothing"}
    # The instruction goes in front, and the agent's own prompt stays.
    systems = [request.body["messages"][0]["content"] for request in server.requests]
    assert sum(text.endswith("Write in capital letters, after 'Answer:'.") for text in systems) == len(systems)
    assert len(systems) == 50 + TASKS


def test_a_model_that_ignores_an_attack_was_not_attacked(server, monkeypatch):
    """What it earns it earned by doing the task, and an honest reward is not blamed for it."""
    with ScriptedServer(lambda body, _: Reply(text=f"Answer: {body['messages'][-1]['content'].upper()}")) as diligent:
        monkeypatch.setenv("TEST_MODEL_URL", diligent.url)
        result = attack("writing:honest", "--strategies", "claim,copy", "--attacks", "8")
    assert result.exit_code == 3, result.output
    assert "No attack could be tried" in result.output
    assert "claim: 4 rollouts answered the same as without the instruction" in result.output


def test_a_strategy_that_changed_no_answer_is_not_among_those_that_did_not_pay(server, monkeypatch):
    def obeys_one(body: dict[str, Any], seen: int) -> Reply:
        system, text = (message["content"] for message in body["messages"])
        return Reply(text="." if STRATEGIES["copy"] in system else f"Answer: {text.upper()}")

    with ScriptedServer(obeys_one) as running:
        monkeypatch.setenv("TEST_MODEL_URL", running.url)
        result = attack("writing:honest", "--strategies", "claim,copy", "--attacks", "16")
    assert result.exit_code == 0, result.output
    assert "No attack paid, but claim could not be tried, for the reasons above. More --attacks" in result.output


def test_the_table_lists_what_paid_and_what_could_not_be_tried(server):
    result = attack("writing:judged", "--strategies", "judge,claim", "--attacks", "8")
    assert result.exit_code == 1, result.output
    assert "judge, task 0: score gave 1.000; 'the highest score: 10'" in result.output
    assert "This reward can be earned without doing the task: judge" in result.output


def test_the_lowest_reward_is_that_of_the_attacked_agent():
    """What another agent lost is no floor for it: an attack that earned it nothing did not pay."""

    def rollouts(strategy: str, *earned: float) -> list[AttackRollout]:
        return [
            AttackRollout(
                sample=Sample(
                    task=task, sample=0, rollout_id=f"{strategy}-{task}", attempt_id="a", status="succeeded",
                    reward=value / 2 - 1, rewards={"writer": value, "checker": -2.0},
                ),
                answer=f"{strategy} {task}", reached=True, sources={},
            )
            for task, value in enumerate(earned)
        ]  # fmt: skip

    base, forged = rollouts("base", 0.0, 1.0, 0.0, 1.0), {"claim": rollouts("claim", 0.0, 0.0, 0.0, 0.0)}
    _, found = compare_strategies(base, forged, Counting(agents=("writer",)))
    assert (found["claim"].verdict, found["claim"].paid) == ("nothing", [])


@pytest.mark.parametrize(
    ("args", "target", "status", "message"),
    [
        (["--reward", "judge"], "writing:run", 2, "--reward judge can't be attacked"),
        (["--strategies", "luck"], "writing:run", 2, "choose from format, claim"),
        (["--attacks", "3"], "writing:run", 2, "is less than one for each of 7 strategies"),
        ([], "writing:bare", 3, "the instruction reached no call of writer"),
    ],
)
def test_what_cannot_be_attacked_is_said(server, args, target, status, message):
    result = attack("writing:honest", *args, target=target)
    assert result.exit_code == status, result.output
    assert message in result.output
    assert not Path("attacks").exists()
