"""A backend of a stranger's: a folder with a hook, and no edit of ours. It is trained as torch and verl are."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lightning_spans import hooks
from lightning_spans.errors import ConfigError, LightningError
from lightning_spans.hooks import hookimpl
from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import Store
from lightning_trainer import TrainConfig, registry, train
from lightning_trainer.backend_protocol import OpenRun, RunDescription, Start
from lightning_trainer.cli import cli
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.rl.rollouts import plan
from lightning_trainer.rl.scores import score
from lightning_trainer.run import loop
from lightning_trainer.run.embedded import EmbeddedBackend
from lightning_trainer.run.interrupts import SavedInterrupt
from lightning_trainer.run.train import describe
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job
from lightning_trainer.session.answers import AnswerSource
from lightning_trainer.session.sampling import SamplingOptions, sampling_of
from lightning_trainer.session.session import Session, open_database, serve
from support.fakes import FakeEngine
from support.kills import Killed
from support.training.backends import Remembering
from support.training.programs import CLIENT, folder_with

pytest.importorskip("openai")

AGENT = (
    CLIENT
    + '''
def run(task):
    """Long answers are good."""
    with agent("writer"):
        reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["q"]}])
    return float(len(reply.choices[0].message.content or ""))

def raises(task):
    raise ValueError("the oven is cold")
'''
)


class Scripted:
    """Learns nothing: its engine answers from a script, and each step is a number in the log."""

    def start(self, config: TrainConfig, identity: Mapping[str, Any]) -> Start:
        assert identity["batch_size"] == config.batch_size
        if config.backend_options:
            raise ConfigError(f"scripted has no option {', '.join(config.backend_options)}.")
        return Start()

    def train(self, run: OpenRun) -> int:
        engine = FakeEngine(lambda prompt: "yes" * (1 + prompt.count("say 1")))
        answers = AnswerSource.of([engine], run.config.policies)
        with serve(run.store, run.runner, answers, sampling_of(run.config)) as session:
            run.begin()
            for step in range(run.steps):
                rollouts = plan(
                    run.tasks, name=f"scripted:t{step}", size=1, mode="train", max_attempts=1, timeout_s=60.0
                )
                outcomes = session.run(rollouts, run.progress, "rollouts", check=run.check)
                run.log.add("train", step, score(outcomes, run.config.failed).metrics())
        (run.folder / "checkpoint").mkdir()
        return run.steps

    def describe(self, config: TrainConfig, progress: Progress) -> RunDescription:
        told = f", tools as {config.tool_format}" if config.tool_format else ""
        return RunDescription(f"a script of {config.steps} steps{told}")


class Plugin:
    """What a stranger's package would have as its module."""

    def __init__(self) -> None:
        self.learners: list[Remembering] = []

    def opened(self, config: TrainConfig) -> Remembering:
        self.learners.append(Remembering(config))
        return self.learners[-1]

    @hookimpl
    def lightning_register_backends(self, register: Any) -> None:
        register("scripted", Scripted())
        register("remembering", EmbeddedBackend(self.opened, lambda config: None))


@pytest.fixture
def plugin() -> Iterator[Plugin]:
    registered = Plugin()
    hooks.register(registered, "stranger")
    yield registered
    hooks.unregister("stranger")


folder = folder_with(3, strange_agent=AGENT)


def options(**more: Any) -> dict[str, Any]:
    chosen = {"target": "strange_agent:run", "data": "tasks.jsonl", "model": "none", "out": "out", "steps": 2}
    return {**chosen, "batch_size": 3, "group_size": 2, "workers": 1, **more}


@pytest.mark.usefixtures("plugin")
def test_a_backend_of_a_plugin_is_trained_by_the_command_line(folder: Path) -> None:
    given = options(backend="scripted")
    target = given.pop("target")
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    result = CliRunner().invoke(cli, ["train", target, *flags])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    assert (told["steps"], told["reward_before"], told["checkpoint"]) == (2, 4.0, "out/checkpoint")
    kept = json.loads((folder / "out" / "config.json").read_text())
    assert (kept["backend"], kept["out"]) == ("scripted", "out")
    assert (folder / "out" / "curve.png").exists()


@pytest.mark.usefixtures("plugin")
def test_a_backend_of_a_plugin_says_what_it_would_do(folder: Path) -> None:
    flags = ["--data", "tasks.jsonl", "--model", "m", "--backend", "scripted", "--steps", "7", "--dry-run"]
    result = CliRunner().invoke(cli, ["train", "strange_agent:run", *flags])
    assert result.stdout == "a script of 7 steps\n"


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    "wrong", [{"credit_options": {"nosuch": 1}}, {"rewards": {"nosuch": {}}}], ids=["credit", "rule"]
)
def test_what_names_refuse_is_refused_before_a_dry_run_tries_anything(folder: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="nosuch"):
        describe(TrainConfig(**options(backend="scripted", **wrong)))


@pytest.mark.usefixtures("plugin")
@pytest.mark.torch
def test_a_run_writes_tool_calls_as_the_run_did_that_its_model_is_of(folder: Path, tiny_model: Path) -> None:
    shutil.copytree(tiny_model, folder / "warm/checkpoint")
    (folder / "warm/config.json").write_text('{"tool_format": "pythonic"}')
    config = TrainConfig(**options(backend="scripted", model="warm"))
    assert describe(config).text == "a script of 2 steps, tools as pythonic"
    train(config)
    assert json.loads((folder / "out/config.json").read_text())["tool_format"] == "pythonic"


@pytest.mark.usefixtures("plugin")
def test_a_backend_may_know_models_of_a_kind_that_we_do_not(folder: Path) -> None:
    (folder / "mine").mkdir()
    assert train(TrainConfig(**options(backend="scripted", model="mine"))).steps == 2


@pytest.mark.usefixtures("plugin")
def test_an_option_that_a_backend_refuses_leaves_no_folder(folder: Path) -> None:
    with pytest.raises(ConfigError, match="scripted has no option slots"):
        train(TrainConfig(**options(backend="scripted", backend_options={"slots": 3})))
    assert not (folder / "out").exists()


def test_a_learner_of_a_plugin_takes_our_steps_and_goes_on(folder: Path, plugin: Plugin) -> None:
    result = train(TrainConfig(**options(backend="remembering", save_every=1)))
    assert (result.steps, plugin.learners[0].given, plugin.learners[0].closed) == (2, [6, 6], True)
    assert len(result.curve) == 2
    again = train(TrainConfig(**options(backend="remembering", out=None, resume="out", steps=3)))
    assert (again.steps, plugin.learners[1].given) == (3, [6, 6, 6])
    assert again.curve[:2] == result.curve


class StopBefore(Silent):
    """Ctrl-C before a step begins."""

    def begin(self, step: int, steps: int) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("plugin")
def test_a_run_that_went_back_and_was_stopped_continues_from_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "best_step", lambda _: 1)
    whole = train(TrainConfig(**options(backend="remembering", save_every=1, checkpoint="full")))
    earlier = folder / "out" / "checkpoints" / "step-000001"
    with pytest.raises(SavedInterrupt, match=r"stopped after 1 step\. Continue with: \S+ train --resume \S+out"):
        train(TrainConfig(**options(backend="remembering", out=None, resume=earlier)), StopBefore())
    assert (folder / "out" / "checkpoint").resolve() == (folder / "out" / "checkpoint-best").resolve() == earlier
    again = train(TrainConfig(**options(backend="remembering", out=None, resume="out", save_every=1)))
    assert (again.steps, again.curve) == (2, whole.curve)
    assert (folder / "out" / "checkpoint").resolve().name == "step-000002"


class KilledInValidation(Silent):
    """The process is killed in the first validation after a step."""

    taken = 0

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.taken = step + 1

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        if self.taken and name == "validation":
            raise Killed


def test_a_run_that_is_killed_in_a_validation_loses_no_step_and_validates_again(folder: Path, plugin: Plugin) -> None:
    asked = {"backend": "remembering", "val": "tasks.jsonl", "val_every": 1, "save_every": 1}
    with pytest.raises(Killed):
        train(TrainConfig(**options(**asked)), KilledInValidation())
    train(TrainConfig(**options(**{**asked, "out": None}, resume="out")))
    assert plugin.learners[1].given == [6, 6]
    lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines if line["kind"] != "alarm"] == [
        ("val", 0), ("train", 0), ("val", 1), ("train", 1), ("val", 2),
    ]  # fmt: skip


def test_a_learner_is_closed_when_the_run_fails(folder: Path, plugin: Plugin) -> None:
    with pytest.raises(LightningError, match="the oven is cold"):
        train(TrainConfig(**options(backend="remembering", target="strange_agent:raises")))
    assert plugin.learners[0].closed


def test_the_trainers_own_backends_come_through_the_same_hook() -> None:
    assert {"torch", "verl"} <= registry.registrations("backend").keys()
    with pytest.raises(ConfigError, match=r"unknown backend .tourch.\. Did you mean .torch.\?.*torch, verl"):
        registry.by_name("backend", "tourch")


def test_two_runs_on_one_store_run_their_own_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one_or_two.py").write_text("def one(task):\n    return 1.0\n\ndef two(task):\n    return 2.0\n")
    left = Rollout(rollout_id="killed:t0-0-0", group_id="killed:t0-0", task={})
    with ExitStack() as stack:
        stores = [stack.enter_context(open_database("shared.db")) for _ in range(2)]
        stores[0].enqueue([left])
        served = map(_served, stores, ("one_or_two:one", "one_or_two:two"))
        runs = [stack.enter_context(each) for each in served]
        given = list(stack.enter_context(ThreadPoolExecutor(2)).map(_rewards, runs, ("a", "b")))
        assert given == [[1.0] * 8, [2.0] * 8]
        assert [r.status for r in stores[0].rollouts(rollout_ids=[left.rollout_id])] == ["queued"]


@contextmanager
def _served(store: Store, target: str) -> Iterator[Session]:
    runner = Runner(Job(target=target), workers=1, concurrency=2, logs=Path("logs") / target)
    runner.start()
    try:
        with serve(store, runner, AnswerSource(), SamplingOptions()) as session:
            yield session
    finally:
        runner.stop()


def _rewards(session: Session, name: str) -> list[float]:
    rollouts = plan([{}] * 4, name=f"{name}:t0", size=2, mode="train", max_attempts=2, timeout_s=60.0)
    return [reward.value for outcome in session.run(rollouts, Silent(), "rollouts") for reward in outcome.rewards]
