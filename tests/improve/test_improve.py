"""`lightning-rl improve`: one budget, several methods for each agent, and the base unless something is better."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch

from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.script import Reply
from lightning_spans.errors import AgentFailedError, NothingToLearnError
from lightning_spans.store import open_store
from lightning_trainer.cli import cli
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.improve import improve as improving
from lightning_trainer.kits.improve import methods
from lightning_trainer.kits.improve.command import _why
from lightning_trainer.kits.improve.config import METHODS, ImproveConfig
from lightning_trainer.kits.improve.costs import costs_of, learned_from
from lightning_trainer.kits.improve.decision import Decision
from lightning_trainer.kits.improve.measuring import HeldOutMeasurement
from lightning_trainer.kits.improve.methods import KINDS
from lightning_trainer.kits.improve.snapshots import adapter_names
from lightning_trainer.kits.improve.tasks import TaskFiles
from lightning_trainer.kits.sft.batches import batches
from lightning_trainer.kits.sft.config import RoundsConfig
from lightning_trainer.kits.sft.rounds.loop import round_steps
from lightning_trainer.report.progress import Silent
from lightning_trainer.run.data import load_tasks
from lightning_trainer.run.folders import read_config
from lightning_trainer.run.interrupts import SavedInterrupt
from lightning_trainer.session.answers import Endpoint
from lightning_trainer.work import Work
from support.training.programs import CLIENT, put_programs

AGENT = (
    CLIENT
    + """
def ask(name, system, text):
    with agent(name):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        return client.chat.completions.create(model="gpt-9", max_tokens=5, messages=messages)

def say(name, system, text):
    return ask(name, system, text).choices[0].message.content or ""

def letters(text):
    return sum(letter.isascii() and letter.isalpha() for letter in text) / 5

def run(task):  # training finds out that letters pay
    return letters(say("writer", "Write.", task["q"]))

def two(task):
    draft, verdict = say("writer", "Write.", task["q"]), say("checker", "Check.", task["q"])
    return {"writer": letters(draft), "checker": letters(verdict)}

def careful(task):  # whatever the model answers, only another prompt pays: one that is ten bytes longer
    return float(ask("writer", "Write.", task["q"]).usage.prompt_tokens >= 42)

def late(task):  # the checker is not needed for tasks to learn from
    say("writer", "Write.", task["q"])
    if int(task["q"]) >= 20:
        say("checker", "Check.", task["q"])
    return 0.5

def flat(task):
    say("writer", "Write.", task["q"])
    return 0.5
"""
)
SMALL = (
    "--batch-size", "4", "--group-size", "4", "--workers", "1", "--device", "cpu", "--samples", "2",
    "--backend-options", "threads=1", "--backend-options", "slots=16", "--learning-rate", "3e-2", "--lora-rank", "8",
    "--sft", "learning_rate=0.03", "--sft", "epochs=2",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    put_programs(tmp_path, ({"q": f"{n}"} for n in range(24)), program=AGENT)
    (tmp_path / "val.jsonl").write_text("".join(json.dumps({"q": f"{n}"}) + "\n" for n in range(20, 60)))
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


def improve(target: str, model: Path, *args: str) -> Result:
    named = ["improve", target, "--data", "tasks.jsonl", "--val", "val.jsonl", "--model", str(model)]
    return CliRunner().invoke(cli, [*named, *SMALL, *args])


def told(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def test_rl_is_kept_where_it_helps_and_the_folder_is_that_of_a_run(folder: Path, model: Path) -> None:
    found = told(improve("program:run", model, "--budget", "36000", "--out", "found", "--json"))
    writer = found["agents"]["writer"]
    assert (writer["method"], writer["candidate"]) == ("rl", "rl"), found
    assert 0 < writer["low"] <= writer["difference"] == found["difference"]
    assert 0.8 * 36000 < writer["tokens"] == found["tokens"] < 1.2 * 36000
    assert found["prompts"] is None
    listed = json.loads(CliRunner().invoke(cli, ["runs", "found", "--json"]).stdout.splitlines()[0])
    assert listed["difference"] == pytest.approx(found["difference"])
    options = ["--data", "val.jsonl", "--model", "found", "--device", "cpu", "--out", "again", "--json"]
    again = told(CliRunner().invoke(cli, ["eval", "program:run", *options]))
    assert again["mean"] > found["base"]["mean"]
    assert json.loads((folder / "found" / "result.json").read_text()) == found


def test_rl_continues_from_the_weights_of_rejection_sampling_if_that_is_the_best(folder: Path, model: Path) -> None:
    few = ("--budget", "14000", "--batch-size", "2", "--sft", "epochs=8", "--learning-rate", "1e-4")
    found = told(improve("program:run", model, *few, "--out", "found", "--json"))
    its = found["agents"]["writer"]["methods"]
    assert {name: each["rungs"] for name, each in its.items()} == {"sft": 1, "rl": 1, "sft+rl": 2}, found
    assert its["sft"]["ended"] == "sft+rl continues from its weights"
    assert its["sft+rl"]["tokens"] > 0
    run = read_config(folder / "found" / "agents" / "writer" / "sft+rl" / "run")
    assert run["model"] == str((folder / "found/agents/writer/sft/run/rung-1/checkpoint").relative_to(folder))


def test_an_agent_that_keeps_the_unchanged_model_answers_and_does_not_count(folder: Path, model: Path) -> None:
    policy = ("--agents", "writer", "--policy", "check*=base")
    found = told(
        improve("program:two", model, "--budget", "9000", "--methods", "rl", "--out", "found", *policy, "--json")
    )
    assert list(found["agents"]) == ["writer"]
    run = read_config(folder / "found" / "agents" / "writer" / "rl" / "run")
    assert (run["agents"], run["policies"]) == (["writer"], {"writer": "lora:writer", "check*": "base"})
    store = open_store(str(folder / "found" / "base" / "lightning.db"))
    try:
        assert {(call.agent, call.policy) for call in store.calls()} == {("writer", "policy"), ("checker", "policy")}
    finally:
        store.close()
    base, rl = (
        json.loads((folder / "found" / name / "summary.json").read_text())["by_agent"]["writer"]["mean"]
        for name in ("base", "agents/writer/rl/rung-1-held-out")
    )
    assert found["agents"]["writer"]["methods"]["rl"]["difference"] == pytest.approx(rl - base)
    mistaken = improve(
        "program:two", model, "--budget", "9000", "--out", "other", "--policy", "writer=lora,checker=base"
    )
    assert "with --policy only those that the unchanged model answers" in mistaken.stderr


def test_prompts_are_kept_where_they_help(folder: Path, model: Path) -> None:
    pytest.importorskip("gepa")
    with ScriptedServer(lambda _body, _seen: Reply(text="```\nWrite carefully.\n```")) as server:
        result = improve(
            "program:careful", model, "--budget", "12000", "--out", "found", "--json", "--reflect", f"big={server.url}"
        )
    found = told(result)
    assert found["agents"]["writer"]["method"] == "prompts"
    assert (found["difference"], found["base"]["mean"]) == (1.0, 0.0)
    methods_of = found["agents"]["writer"]["methods"]
    assert list(methods_of) == ["prompts", "sft", "rl"]
    assert "reward" in methods_of["rl"]["ended"]  # nothing to learn where all rewards are equal
    assert Path(found["checkpoint"]).resolve() == model.resolve()  # the weights stay
    options = ["--data", "val.jsonl", "--model", "found", "--prompts", found["prompts"], "--device", "cpu", "--json"]
    assert told(CliRunner().invoke(cli, ["eval", "program:careful", *options, "--out", "again"]))["mean"] == 1.0


def test_where_nothing_helps_the_base_is_returned(folder: Path, model: Path) -> None:
    result = improve("program:flat", model, "--budget", "6000", "--out", "found")
    assert result.exit_code == 0, result.output
    assert "writer: no method gained anything: the base is kept" in result.stdout
    assert "Nothing is better than the unchanged agents with confidence" in result.stdout
    assert (folder / "found" / "checkpoint").resolve() == model.resolve()
    assert not (folder / "found" / "prompts.json").exists()
    methods_of = json.loads((folder / "found" / "result.json").read_text())["agents"]["writer"]["methods"]
    assert min(its["tokens"] for its in methods_of.values()) > 0  # of samples from which nothing was learned
    options = ["--data", "val.jsonl", "--model", "found", "--device", "cpu", "--out", "again", "--json"]
    assert told(CliRunner().invoke(cli, ["eval", "program:flat", *options]))["mean"] == 0.5


def test_an_agent_without_a_call_in_the_training_tasks_ends_no_search(folder: Path, model: Path) -> None:
    pytest.importorskip("gepa")
    options = ("--budget", "24000", "--agents", "checker", "--policy", "writer=base", "--out", "found", "--json")
    found = told(improve("program:late", model, *options, "--reflect", "big=http://127.0.0.1:9/v1"))
    methods_of = found["agents"]["checker"]["methods"]
    assert list(methods_of) == ["prompts", "sft", "rl"]
    for its in methods_of.values():
        assert "agent 'checker' was never seen" in its["ended"]
        assert its["tokens"] > 0


def test_two_agents_are_improved_apart_and_put_together_and_a_cut_search_is_resumed(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spend = methods.SftMethod.spend
    calls: list[tuple[str, int]] = []

    def dying(method: methods.SftMethod, limit: int, rung: int) -> Any:
        calls.append((method.agent, rung))
        if len(calls) == 2:
            raise AgentFailedError("the machine is gone")
        return spend(method, limit, rung)

    def all_kept(candidates: Any, measure: Any, **_: Any) -> Decision:
        measure(["writer", "checker"])
        return Decision(kept=("writer", "checker"), differences={}, comparisons=3)

    monkeypatch.setattr(methods.SftMethod, "spend", dying)
    options = ("--budget", "8000", "--methods", "sft", "--agents", "writer,checker")
    cut = improve("program:two", model, *options, "--out", "found")
    assert cut.exit_code == AgentFailedError.exit_status
    assert "lightning-rl improve --resume found" in cut.stderr
    for more, name in ((["--seed", "1"], "--seed"), (["--out", "other"], "--out")):
        assert f"leave out {name}" in CliRunner().invoke(cli, ["improve", "--resume", "found", *more]).output
    monkeypatch.setattr(improving, "decide", all_kept)
    monkeypatch.setattr(improving, "_best", lambda its: next(iter(its)))
    found = told(CliRunner().invoke(cli, ["improve", "--resume", "found", "--json"]))
    assert calls == [("checker", 1), ("writer", 1), ("writer", 1)]  # what was done is not done again
    assert {agent: each["method"] for agent, each in found["agents"].items()} == {"writer": "sft", "checker": "sft"}
    for agent in ("writer", "checker"):
        own = folder / "found" / "agents" / agent / "sft" / "run" / "rung-1" / "checkpoint" / agent
        kept = folder / "found" / "checkpoint" / agent / "adapter_model.safetensors"
        assert kept.read_bytes() == (own / "adapter_model.safetensors").read_bytes()
    options_of_eval = ["--data", "val.jsonl", "--tasks", "2", "--model", "found", "--device", "cpu", "--json"]
    again = told(CliRunner().invoke(cli, ["eval", "program:two", *options_of_eval, "--out", "again"]))
    assert again["by_agent"].keys() == {"writer", "checker"}
    store = open_store(str(folder / "again" / "lightning.db"))
    try:
        assert {(call.agent, call.policy) for call in store.calls()} == {("writer", "writer"), ("checker", "checker")}
    finally:
        store.close()


def test_a_stopped_dry_run_names_no_folder_to_resume(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(measurement: HeldOutMeasurement, base: Path) -> None:
        raise SavedInterrupt(f"stopped. Continue with: lightning-rl eval --resume {base}")

    monkeypatch.setattr(HeldOutMeasurement, "measure_base", stop)
    result = improve("program:run", model, "--budget", "30000", "--dry-run")
    assert result.exit_code == 130, result.output
    assert "run the same command again" in result.stderr
    assert "--resume" not in result.stderr


def test_a_dry_run_prints_the_plan_and_leaves_nothing(folder: Path, model: Path) -> None:
    result = improve("program:run", model, "--budget", "30000", "--out", "found", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "rung 1: 2 methods with 7500 tokens each" in result.stdout
    assert "measuring: up to 240 rollouts on held-out tasks" in result.stdout
    assert not (folder / "found").exists()
    plan = told(improve("program:run", model, "--budget", "30000", "--dry-run", "--json"))
    assert plan["rungs"] == [{"methods": 2, "tokens": 7500}, {"methods": 1, "tokens": 15000}]
    small = improve("program:run", model, "--budget", "900", "--out", "found")
    assert small.exit_code == 2, small.output
    assert "rl needs about" in small.stderr
    assert "tasks to choose by" in small.stderr
    assert not (folder / "found").exists()
    smaller = improve("program:run", model, "--budget", "10", "--out", "found")
    assert smaller.exit_code == 2, smaller.output
    assert "rl needs at least" in smaller.stderr
    assert "tasks to choose by" not in smaller.stderr
    assert not (folder / "found").exists()


PLENTY = ("--budget", "1000000", "--val", "val.jsonl", "--device", "cpu")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--budget", "16", "--methods", "rl,magic"], "unknown method 'magic'"),
        (["--budget", "16", "--methods", ","], "no method is named"),
        (["--budget", "16", "--methods", "prompts"], "--reflect"),
        (["--budget", "16", "--methods", "distil"], "--teacher"),
        (["--budget", "16", "--command", "true"], "one of them"),
        (["--budget", "16", "--reward", "judge"], "can't be compared"),
        (["--budget", "16", "--lora-rank", "0"], "--lora-rank 1 or more"),
        (["--budget", "16", "--backend", "verl"], "verl does not"),
        (["--budget", "16", "--lr-schedule", "cosine"], "come in several parts"),
        ([*PLENTY, "--algorithm", "dapo", "--staleness", "1"], "resample"),  # rl refuses it
        ([], "--budget TOKENS"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(folder: Path, model: Path, more: list[str], said: str) -> None:
    named = ["improve", "program:run", "--data", "tasks.jsonl", "--model", str(model), "--out", "found", *more]
    result = CliRunner().invoke(cli, named)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert not (folder / "found").exists()


def test_held_out_tasks_are_learned_from_by_no_method(folder: Path, model: Path) -> None:
    def sets(**options: Any) -> list[set[str]]:
        config = improve_config(model, **options)
        files = TaskFiles(folder / f"tasks-{len(options)}")
        files.write(config, Silent())
        return [{task["q"] for task in load_tasks(file)} for file in (files.train, files.choose, files.decide)]

    train, choose, decide = sets(val=Path("val.jsonl"))
    assert train == {str(n) for n in range(20)}  # four of the tasks are held out, too
    assert (len(choose), len(decide), choose & decide) == (20, 20, set())
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"q": f"{n % 12}"}) + "\n" for n in range(24)))
    train, choose, decide = sets()
    assert [len(train), len(choose), len(decide)] == [8, 2, 2]
    assert train | choose | decide == {str(n) for n in range(12)}  # a task that is there twice is on one side


@pytest.mark.parametrize("share", [12_000, 30_000, 48_000, 120_000])
def test_rejection_sampling_stays_within_its_share(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    """If each group has a rollout that is kept: fewer are kept otherwise, and training on them costs less."""
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"q": f"{n}"}) + "\n" for n in range(100)))
    config, files, found = improve_config(model), TaskFiles(folder / "tasks"), list[RoundsConfig]()
    files.write(config, Silent())

    def ask(rounds: RoundsConfig, *_: Any, **__: Any) -> Any:
        found.append(rounds)
        raise NothingToLearnError("asked")

    monkeypatch.setattr("lightning_trainer.kits.sft.rounds.rejection.rejection_sampling", ask)
    each = 300
    method = KINDS["sft"](
        config=config, agent="writer", names=adapter_names(["writer"]), folder=folder / "sft", tasks=files,
        rollout_tokens=each, progress=Silent(),
    )  # fmt: skip
    method.spend(share, 1)
    (options,) = found
    rows = list(range(len(load_tasks(options.tasks))))
    learned = sum(map(len, batches(rows, options.batch_size, round_steps(options, len(rows)), 0)))
    tokens = each * options.rounds * (len(rows) * options.samples + learned)
    assert 0.75 * share < tokens <= share


def improve_config(model: Path, **train: Any) -> ImproveConfig:
    options = {"target": "program:run", "data": Path("tasks.jsonl"), "model": str(model), "lora_rank": 4, **train}
    chosen = ("prompts", "sft", "rl", "distil")
    reflect = Endpoint("http://127.0.0.1:9/v1", "big")
    return ImproveConfig(
        train=TrainConfig(**options), budget=9000, methods=chosen, reflect=reflect,
        distil={"teacher": "self", "teacher_options": {"told": ["best"]}},
    )  # fmt: skip


def test_each_option_of_the_program_reaches_all_that_run_it(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(Exception):
        """What was asked for."""

    def ask(config: Any, *_: Any, **__: Any) -> Any:
        raise Asked(config)

    for place in (
        "lightning_trainer.kits.improve.measuring.evaluate",
        "lightning_trainer.kits.sft.rounds.rejection.rejection_sampling",
        "lightning_trainer.kits.prompts.optimise.optimise",
        "lightning_trainer.run.train.train",
    ):
        monkeypatch.setattr(place, ask)
    work = Work(
        workdir="project", workdir_size="1MiB", restore=("tests/**",), reward_command="make test", reward_timeout_s=7.0,
        reward_from="fd", reward_range="-1,1", sandbox="podman", sandbox_image="python:3.12",
        sandbox_read=("/opt/tool",), sandbox_env=("MYAPP_*",),
    )  # fmt: skip
    assert all(getattr(work, each.name) != each.default for each in fields(Work))
    config = improve_config(
        model, target=None, command="agent", max_model_len=99,
        backend_options={"slots": 3, "micro_batch_tokens": 512, "weight_decay": 0.01},
        workers=3, max_attempts=5, failed="exclude", name_by=("clerk=model:own",), tool_format="hermes",
        temperature=0.7, **asdict(work),
    )  # fmt: skip
    files = TaskFiles(folder / "tasks")
    files.write(config, Silent())
    names = adapter_names(["clerk"])
    asked = {}
    for name in METHODS:
        method = KINDS[name](
            config=config, agent="clerk", names=names, folder=folder / name, tasks=files, rollout_tokens=10.0,
            progress=Silent(),
        )  # fmt: skip
        with pytest.raises(Asked) as found:
            method.spend(20_000, 1)
        asked[name] = found.value.args[0]
    with pytest.raises(Asked) as found:
        HeldOutMeasurement(config=config, tasks=files.choose, progress=Silent()).measure_base(folder / "base")
    asked["base"] = found.value.args[0]
    assert all((each.work, each.name_by) == (work, ("clerk=model:own",)) for each in asked.values())
    assert {(each.workers, each.max_attempts) for each in asked.values()} == {(3, 5)}
    assert {name: each.temperature for name, each in asked.items() if name != "distil"} == dict.fromkeys(
        ("prompts", "sft", "rl", "base"), 0.7
    )
    loaded = {"max_model_len": 99, "tool_format": "hermes", "slots": 3}
    assert asked["base"].load == asked["prompts"].load == {**loaded, "system_messages": "as-sent"}
    assert asked["sft"].backend_options == {"max_model_len": 99, "slots": 3, "micro_batch_tokens": 512}
    assert (asked["sft"].tool_format, asked["sft"].weight_decay) == ("hermes", 0.01)
    assert asked["rl"].backend_options["weight_decay"] == 0.01
    assert {asked[name].policies["clerk"] for name in ("sft", "rl", "distil")} == {"lora:clerk"}
    distil = asked["distil"]
    assert (distil.algorithm, distil.teacher, distil.teacher_options) == ("distil", "self", {"told": ["best"]})
    assert (asked["rl"].algorithm, asked["rl"].teacher, asked["rl"].val) == ("grpo", None, None)


def test_what_an_interrupted_process_sampled_after_its_checkpoint_is_not_counted(tmp_path: Path) -> None:
    first = [f"run-a:t{step}-0-{member}" for step in range(4) for member in range(2)]
    second = ["run-b:t2-0-0", "run-b:t2-0-1", "run-b:t2-0-1-4-0", "run-b:t3-0-0"]
    third = ["run-c:t2r1-0-0", "other"]
    assert learned_from([*first, "other", *second]) == [*first[:4], "other", *second]
    assert learned_from([*first, *second, *third]) == [*first[:4], *third]
    assert learned_from(["rounds-a.0:v-0-0", *first]) == ["rounds-a.0:v-0-0", *first]
    assert costs_of(tmp_path).tokens == 0


def test_adapters_have_names_that_folders_can_have() -> None:
    names = adapter_names(["a b", "a_b", "base", "Schreiber/Prüfer", "!"])
    assert list(names.values()) == ["a_b", "a_b-2", "base-2", "Schreiber_Pr_fer", "agent"]


def test_the_line_of_a_method_says_why_it_ended() -> None:
    nothing = "no sample is worth learning (0 failed).\n  78: truncated\n  2: other\nGive tasks."
    assert _why(nothing) == "no sample is worth learning (0 failed). 78: truncated"
    assert _why("another method did better") == "another method did better"
    assert _why("it ended.\nDo this.") == "it ended."
