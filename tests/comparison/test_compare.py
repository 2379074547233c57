"""`lightning-rl compare`: several ways, one budget, the same held-out tasks."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch

from lightning_spans.errors import AgentFailedError, NothingToLearnError
from lightning_spans.store import open_store
from lightning_spans.store.traces import traces_of
from lightning_spans.testing import ScriptedServer
from lightning_spans.testing.plugins.script import Reply
from lightning_trainer.cli import cli
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.compare import compare as room
from lightning_trainer.kits.compare import methods
from lightning_trainer.kits.compare.config import CompareConfig
from lightning_trainer.kits.sft.rounds.loop import RoundLoop
from lightning_trainer.report.progress import Silent
from lightning_trainer.session.answers import Endpoint
from lightning_trainer.work import Work

AGENT = """
import os
import openai
import lightning_openai
from lightning_spans import agent

lightning_openai.attach(tracer="embedded")
client = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="mine", max_retries=0)

def say(name, system, text):
    with agent(name):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        reply = client.chat.completions.create(model="gpt-9", max_tokens=5, messages=messages)
    return sum(letter.isascii() and letter.isalpha() for letter in reply.choices[0].message.content or "") / 5

def run(task):
    return {"writer": say("writer", "Write.", task["q"]), "checker": say("checker", "Check.", task["q"])}

def seldom(task):  # the held-out tasks alone bring the checker in
    found = {"writer": say("writer", "Write with much care.", task["q"])}
    return found | ({"checker": say("checker", "Check.", task["q"])} if task["q"] in "xyz" else {})

def alone(task):  # likewise, and nobody else speaks
    return {"checker": say("checker", "Check.", task["q"])} if task["q"] in "xyz" else 0.0

def flat(task):
    say("writer", "Write.", task["q"])
    return 0.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pair.py").write_text(AGENT)
    for name, letters in (("tasks", "abcd"), ("val", "xyz")):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"q": q}) + "\n" for q in letters))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """Return a model that ends its answers: every other token does."""
    made = tmp_path / "model"
    shutil.copytree(tiny_model, made)
    settings = json.loads((made / "generation_config.json").read_text())
    (made / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [2, *range(3, 259, 2)]}))
    return made


def rl(target: str, model: Path, *args: str) -> Result:
    small = ["--batch-size", "2", "--group-size", "4", "--workers", "1", "--device", "cpu", "--samples", "2"]
    named = ["compare", target, "--data", "tasks.jsonl", "--val", "val.jsonl", "--model", str(model)]
    return CliRunner().invoke(cli, [*named, *small, "--backend-options", "threads=1", *args])


def rollouts(store: Path) -> int:
    opened = open_store(str(store))
    try:
        return len(opened.rollouts())
    finally:
        opened.close()


SEARCHES = ("rl/lightning.db", "sft/lightning.db", "prompts/prompts.json.search/lightning.db", "base/lightning.db")


def sampling(store: Path) -> set[float]:
    """Temperatures at which the calls in a store were drawn."""
    opened = open_store(str(store))
    try:
        calls = [node.call for trace in traces_of(opened) for node in trace.chats]
        return {call.sampling["temperature"] for call in calls if call is not None}
    finally:
        opened.close()


def test_each_way_spends_its_budget_and_all_are_measured_alike(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gepa")
    taken = methods._sft

    def gone(*_: Any) -> Any:
        raise RuntimeError("the machine is gone")

    with ScriptedServer(lambda _body, _seen: Reply(text="```\nWrite more.\n```")) as server:
        monkeypatch.setattr(methods, "_sft", gone)
        reflect = ["--reflect", f"big={server.url}", "--learning-rate", "3e-3", "--sft", "learning_rate=0.003"]
        reflect += ["--temperature", "0.7"]
        cut = rl("pair:run", model, "--budget", "20", "--agents", "writer,checker", "--out", "cmp", *reflect)
        assert "the machine is gone" in str(cut.exception)
        trained = (folder / "cmp" / "rl" / "metrics.jsonl").read_text()
        monkeypatch.setattr(methods, "_sft", taken)
        for more, name in ((["--seed", "1"], "--seed"), (["--out", "other"], "--out")):
            assert f"leave out {name}" in CliRunner().invoke(cli, ["compare", "--resume", "cmp", *more]).output
        result = CliRunner().invoke(cli, ["compare", "--resume", "cmp", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert (folder / "cmp" / "rl" / "metrics.jsonl").read_text() == trained  # what was done is not done again
    assert list(told["methods"]) == ["rl", "sft", "prompts"]
    assert told["methods"]["rl"]["rollouts"] == rollouts(folder / "cmp" / "rl" / "lightning.db") == 16  # whole steps
    assert told["methods"]["sft"]["rollouts"] == rollouts(folder / "cmp" / "sft" / "lightning.db") == 16  # 2 rounds
    assert 0 < told["methods"]["prompts"]["rollouts"] <= 24
    drawn = {place: sampling(folder / "cmp" / place) for place in SEARCHES}
    assert drawn == {place: {0.7} for place in SEARCHES}  # each way samples as in training
    for side in told["methods"].values():
        assert side["tokens"] > 0
        if side["nothing"] is None:
            assert side["tasks"] == 3
            assert side["difference"] == pytest.approx(side["mean"] - told["base"]["mean"])
            assert side["by_agent"].keys() == {"writer", "checker"}
    assert told["best_by_agent"].keys() == {"writer", "checker"}
    assert told["best"] in {None, "rl", "sft", "prompts"}
    assert json.loads((folder / "cmp" / "comparison.json").read_text()) == told
    again = CliRunner().invoke(cli, ["compare", "--resume", "cmp"])
    assert again.exit_code == 0, again.output
    assert "3 held-out tasks, 2 samples of each" in again.stdout
    for word in ("as it is", "rl", "sft", "writer", "checker"):
        assert word in again.stdout


CLERK = """
import json, os, sys, urllib.request

body = {"model": "own", "max_tokens": 5, "messages": [{"role": "user", "content": json.load(sys.stdin)["q"]}]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode())
request.add_header("content-type", "application/json")
request.add_header("authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
with urllib.request.urlopen(request) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
with open("answer.txt", "w") as file:
    file.write(said)
print(-1)
"""
COUNT = """
import json
print(json.dumps({"reward": (1 + sum(c.isascii() and c.isalpha() for c in open("answer.txt").read())) / 6}))
"""


def test_a_command_works_in_its_own_folder_on_every_side_and_its_reward_is_counted(folder: Path, model: Path) -> None:
    project = folder / "project"
    project.mkdir()
    (project / "answer.txt").write_text("as it was")
    (folder / "clerk.py").write_text(CLERK)
    small = ["--batch-size", "2", "--group-size", "4", "--workers", "1", "--device", "cpu", "--samples", "2"]
    (folder / "count.py").write_text(COUNT)
    where = ["--workdir", str(project), "--reward-command", f"{sys.executable} {folder / 'count.py'}"]
    learning = ["--budget", "8", "--rounds", "1", "--sft", "learning_rate=0.003", "--backend-options", "threads=1"]
    program = ["--command", f"{sys.executable} {folder / 'clerk.py'}", "--name-by", "clerk=model:own"]
    tasks = ["--data", "tasks.jsonl", "--val", "val.jsonl", "--model", str(model), "--out", "cmp", "--json"]
    result = CliRunner().invoke(cli, ["compare", *program, *tasks, *small, *where, *learning])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    for side in (told["base"], *told["methods"].values()):
        assert side["by_agent"].keys() == {"clerk"}
        assert 0 < side["mean"] <= 1
    assert (project / "answer.txt").read_text() == "as it was"
    assert not (folder / "answer.txt").exists()


def test_each_option_of_the_program_reaches_all_that_run_it(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lightning_trainer.kits.prompts.optimise as prompts
    import lightning_trainer.kits.sft.rounds.rejection as rounds

    class Asked(Exception):
        """What was asked for."""

    def ask(config: Any, *_: Any, **__: Any) -> Any:
        raise Asked(config)

    monkeypatch.setattr(room, "evaluate", ask)
    monkeypatch.setattr(rounds, "rejection_sampling", ask)
    monkeypatch.setattr(prompts, "optimise", ask)
    work = Work(
        workdir="project", workdir_size="1MiB", restore=("tests/**",), reward_command="make test", reward_timeout_s=7.0,
        reward_from="fd", reward_range="-1,1", sandbox="podman", sandbox_image="python:3.12",
        sandbox_read=("/opt/tool",), sandbox_env=("MYAPP_*",),
    )  # fmt: skip
    assert all(getattr(work, each.name) != each.default for each in fields(Work))
    own: dict[str, Any] = {"failed": "exclude", "name_by": ("clerk=model:own",), "tool_format": "hermes"}
    train = TrainConfig(
        command="agent",
        data=Path("tasks.jsonl"),
        val=Path("val.jsonl"),
        model=str(model),
        max_model_len=99,
        backend_options={"slots": 3, "micro_batch_tokens": 512},
        workers=3,
        max_attempts=5,
        **own,
        **asdict(work),
    )
    config = CompareConfig(train=train, budget=64, reflect=Endpoint("http://127.0.0.1:9/v1", "big"))
    asked = []
    for run in (
        lambda: room._measured(config, folder / "base", str(model), None, Silent()),
        lambda: methods._sft(config, folder / "sft", ["clerk"], Silent()),
        lambda: methods._prompts(config, folder / "prompts", ["clerk"], Silent()),
    ):
        with pytest.raises(Asked) as found:
            run()
        asked.append(found.value.args[0])
    measured, sampled, searched = asked
    assert all((each.work, each.name_by) == (work, own["name_by"]) for each in asked)
    assert measured.counting.failed == sampled.failed == "exclude"
    assert {(each.workers, each.max_attempts) for each in asked} == {(3, 5)}
    loaded = {"max_model_len": 99, "tool_format": "hermes", "slots": 3}
    assert measured.load == searched.load == {**loaded, "system_messages": "as-sent"}
    assert sampled.system_messages == "as-sent"
    assert sampled.backend_options == {**loaded, "micro_batch_tokens": 512}


@pytest.mark.parametrize(
    ("more", "steps"),
    [({}, 8), ({"credit": "counterfactual"}, 2), ({"resample": 3}, 2), ({"credit": "counterfactual", "forks": 8}, 4)],
)
def test_forks_and_groups_that_are_drawn_anew_count_in_the_budget(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], steps: int
) -> None:
    import lightning_trainer.run.train as runs

    asked: list[TrainConfig] = []

    def train(config: TrainConfig, *_: Any) -> Any:
        asked.append(config)
        return SimpleNamespace(seconds=1.0)

    monkeypatch.setattr(runs, "train", train)
    own: dict[str, Any] = {"data": Path("tasks.jsonl"), "val": Path("val.jsonl"), "model": str(model)}
    config = CompareConfig(train=TrainConfig(target="pair:run", batch_size=2, group_size=4, **own, **more), budget=64)
    methods._rl(config, folder / "rl", [], Silent())
    assert [each.steps for each in asked] == [steps]


class Killed(BaseException):
    """Nobody hears of it, as of a SIGKILL."""


@pytest.mark.parametrize("where", ["_learn", "_counted"])
def test_rounds_that_were_killed_are_counted_once_and_not_taken_again(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    owner = RoundLoop if where == "_learn" else methods
    taken, calls = getattr(owner, where), []

    def dying(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == (2 if where == "_learn" else 1):  # in the second round; or when both are done
            raise Killed
        return taken(*args)

    options = ["--budget", "16", "--methods", "sft", "--sft", "learning_rate=0.003", "--json"]
    whole = rl("pair:run", model, *options, "--out", "whole")
    monkeypatch.setattr(owner, where, dying)
    with pytest.raises(Killed):
        rl("pair:run", model, *options, "--out", "cut")
    monkeypatch.setattr(owner, where, taken)
    learned = sampled(folder / "cut" / "sft" / "lightning.db")
    result = CliRunner().invoke(cli, ["compare", "--resume", "cut", "--json"])
    assert result.exit_code == 0, result.output
    same, found = (json.loads(each.stdout.splitlines()[-1])["methods"]["sft"] for each in (whole, result))
    for name in ("rollouts", "tokens", "mean", "difference", "by_agent"):
        assert found[name] == same[name]
    after = sampled(folder / "cut" / "sft" / "lightning.db")
    assert learned <= after
    assert len(after - learned) == (8 if where == "_learn" else 0)


def sampled(store: Path) -> set[str]:
    opened = open_store(str(store))
    try:
        return {rollout.rollout_id for rollout in opened.rollouts()}
    finally:
        opened.close()


def test_what_a_cut_life_drew_after_its_checkpoint_is_not_counted() -> None:
    first = [f"run-a:t{step}-0-{member}" for step in range(4) for member in range(2)]
    second = ["run-b:t2-0-0", "run-b:t2-0-1", "run-b:t2-0-1-4-0", "run-b:t3-0-0"]
    third = ["run-c:t2r1-0-0", "other"]
    assert methods.learned_from([*first, "other", *second]) == [*first[:4], "other", *second]
    assert methods.learned_from([*first, *second, *third]) == [*first[:4], *third]
    assert methods.learned_from(["rounds-a.0:v-0-0", *first]) == ["rounds-a.0:v-0-0", *first]


def test_an_agent_that_keeps_the_base_is_answered_on_every_side(folder: Path, model: Path) -> None:
    pytest.importorskip("gepa")
    with ScriptedServer(lambda _body, _seen: Reply(text="```\nWrite more.\n```")) as server:
        options = ["--policy", "writer=lora,checker=base", "--budget", "20", "--reflect", f"big={server.url}"]
        result = rl("pair:run", model, *options, "--learning-rate", "3e-3", "--sft", "learning_rate=0.003", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    for side in (told["base"], *(side for side in told["methods"].values() if side["nothing"] is None)):
        assert side["by_agent"].keys() == {"writer", "checker"}
        assert (side["counted"], side["left_out"], side["elsewhere"]) == (6, 0, 0)
    assert told["methods"]["prompts"]["rollouts"] > 0
    assert told["best_by_agent"].keys() == {"writer", "checker"}


def test_a_prompt_that_is_never_seen_in_training_tasks_stays_as_it_is(folder: Path, model: Path) -> None:
    pytest.importorskip("gepa")
    with ScriptedServer(lambda _body, _seen: Reply(text="```\nWrite more.\n```")) as server:
        options = ["--budget", "24", "--methods", "prompts", "--reflect", f"big={server.url}"]
        result = rl("pair:seldom", model, *options, "--out", "cmp")
        assert result.exit_code == 0, result.output
        assert "checker: 0 of 4 rollouts have it, so its prompt stays as it is" in result.output
        result = rl("pair:alone", model, *options, "--out", "silent")
        assert result.exit_code == 0, result.output
        assert "prompts: agent 'checker' was never seen in 4 rollouts" in result.output


def test_a_way_that_finds_nothing_to_learn_does_not_end_the_comparison(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*_: Any) -> Any:
        raise NothingToLearnError("all rewards were equal")

    monkeypatch.setattr(methods, "_rl", nothing)
    result = rl("pair:flat", model, "--budget", "16", "--out", "cmp")
    assert result.exit_code == 0, result.output
    assert "rl found nothing to learn: all rewards were equal" in result.stdout
    assert "sft found nothing to learn" in result.stdout
    assert "earned no more than the worst of the round" in result.stdout  # why, and what to do
    assert "lightning-rl sft DATA" in result.stdout
    assert "With 16 rollouts nothing is surely better than the model as it is." in result.stdout


def test_a_way_that_fails_leaves_what_was_measured(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise AgentFailedError("all 8 rollouts failed")

    monkeypatch.setattr(methods, "_rl", failing)
    result = rl("pair:run", model, "--budget", "16", "--out", "cmp", "--methods", "rl")
    assert result.exit_code == AgentFailedError.exit_status
    assert "all 8 rollouts failed" in result.stderr
    assert "lightning-rl compare --resume cmp" in result.stderr
    assert (folder / "cmp" / "base").exists()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--budget", "3"], "less than the rollouts of one training step, 8"),
        (
            ["--budget", "31", "--credit", "counterfactual"],
            "training step, 32 (--batch-size 2 times --group-size 4, and",
        ),
        (
            ["--budget", "31", "--resample", "3"],
            "step, 32 (--batch-size 2 times --group-size 4, and as many in up to 3",
        ),
        (["--budget", "16", "--methods", "rl,magic"], "unknown method 'magic'"),
        (["--budget", "16", "--methods", ","], "no method is named"),
        (["--budget", "16", "--methods", "prompts"], "--reflect"),
        (["--budget", "16", "--command", "true"], "one of them"),
        (["--budget", "16", "--agents", "nobody"], "nobody"),
        ([], "--budget N"),
    ],
)
def test_mistakes_are_told(folder: Path, model: Path, more: list[str], said: str) -> None:
    result = rl("pair:run", model, "--out", "cmp", *more)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert not (folder / "cmp").exists()


@pytest.mark.parametrize("reward", [[], ["--reward", "judge"]])
def test_sides_that_no_judge_sees_together_are_not_measured_by_one(
    folder: Path, model: Path, reward: list[str]
) -> None:
    judge = ["--judge", "endpoint=http://127.0.0.1:9/v1", "--judge", "model=j"]
    result = rl("pair:run", model, "--out", "cmp", "--budget", "16", *reward, *judge)
    assert result.exit_code == 2, result.output
    assert "can't be measured by a judge" in result.stderr
    assert not (folder / "cmp").exists()


def test_best_is_only_what_is_surely_better() -> None:
    from lightning_trainer.kits.compare.methods import Made
    from lightning_trainer.kits.evaluation.samples import Sample
    from lightning_trainer.kits.evaluation.summary import Counting, difference, summarise

    def measured(rewards: list[float]) -> Any:
        samples = [
            Sample(task=n, sample=0, rollout_id=f"{n}", attempt_id="a", status="succeeded", reward=value, seconds=1.0)
            for n, value in enumerate(rewards)
        ]
        return summarise(samples, Counting())

    made, base = Made(rollouts=8, tokens=9, seconds=1.0), measured([0.0] * 8)
    sides = {}
    for name, rewards in (("rl", [1.0] * 8), ("sft", [0.0] * 7 + [1.0])):
        summary = measured(rewards)
        sides[name] = room.Side(made=made, summary=summary, better=difference(summary, base)[0])
    found = room.Comparison(base=base, budget=8, folder=Path(), sides=sides)
    assert found.best == "rl"
    assert room.Comparison(base=base, budget=8, folder=Path(), sides={"sft": sides["sft"]}).best is None
