"""Every command that runs a program samples the same way, because all of them open a session with the same options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lightning_spans.errors import LightningError, NothingToLearnError
from lightning_spans.store import open_store
from lightning_trainer import TrainConfig, registry, train
from lightning_trainer.cli import cli
from lightning_trainer.gateway.engine import Sampling
from lightning_trainer.run import embedded
from lightning_trainer.run.embedded import EmbeddedBackend
from lightning_trainer.run.train import describe
from lightning_trainer.session.answers import LocalModel
from support.fakes import FakeEngine
from support.training.backends import Remembering
from support.training.programs import CLIENT, put_programs

pytest.importorskip("openai")

MODEL = "smollm2-135m"
PROGRAM = (
    CLIENT
    + """
def run(task):
    with agent("writer"):
        client.chat.completions.create(
            model="m", temperature=0.7, top_p=0.2, messages=[{"role": "user", "content": task["q"]}]
        )
    return 1.0
"""
)
PLAIN = Sampling(max_tokens=7, temperature=0.7)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Answers in the place of every model that would be loaded."""
    monkeypatch.chdir(tmp_path)
    engine = FakeEngine(lambda prompt: "ok")
    learner: Any = Remembering(run_options())
    learner.engine, learner.engines = engine, (engine,)
    backend = EmbeddedBackend(lambda _config: learner, lambda _config: None, loaded=lambda _model, _options: learner)
    real = registry.by_name

    def by_name(kind: Any, name: str) -> Any:
        return backend if (kind, name) == ("backend", "torch") else real(kind, name)

    monkeypatch.setattr(registry, "by_name", by_name)
    put_programs(tmp_path, 2, requests_top_p=PROGRAM)
    return engine


def options(**more: Any) -> dict[str, Any]:
    return {"target": "requests_top_p:run", "data": Path("tasks.jsonl"), "max_tokens": 7, "seed": 3, **more}


def run_options() -> TrainConfig:
    return TrainConfig(**options(model=MODEL, steps=1, batch_size=2, group_size=2, workers=1, out="run"))


def by_train() -> None:
    with pytest.raises(NothingToLearnError):  # every reward is 1
        train(run_options())


def by_dry_run() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "TRIAL_S", math.inf)  # both tasks are tried, however slow this machine is
        describe(run_options())


def command(name: str, *more: str) -> None:
    words = [name, "requests_top_p:run", "--data", "tasks.jsonl", "--model", MODEL, "--max-tokens", "7", *more]
    result = CliRunner().invoke(cli, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    assert "Error" not in result.output, result.output


def by_tasks() -> None:
    command("tasks", "--first", "2", "--samples", "2", "--seed", "3", "--workers", "1")


def by_agents() -> None:
    command("agents", "--tasks", "1", "--store", "seen.db")


def by_eval() -> None:
    command("eval", "--sampling", "plain", "--seed", "3", "--workers", "1", "--out", "measured")


def by_rounds() -> None:
    from lightning_trainer.kits.sft.config import RoundsConfig
    from lightning_trainer.kits.sft.rounds.rejection import rejection_sampling

    chosen: dict[str, Any] = {"target": "requests_top_p:run", "tasks": Path("tasks.jsonl"), "model": MODEL, "seed": 3}
    chosen |= {"answer_tokens": 7, "temperature": 0.7, "rounds": 1, "samples": 2, "workers": 1}  # 1.0 by default
    with pytest.raises(NothingToLearnError):
        rejection_sampling(RoundsConfig(**chosen))


def by_prompts() -> None:
    pytest.importorskip("gepa")
    from lightning_trainer.kits.prompts.optimise import optimise
    from lightning_trainer.kits.prompts.options import PromptsConfig
    from lightning_trainer.session.answers import Endpoint

    reflect = Endpoint("http://127.0.0.1:9/v1", "m")
    more: dict[str, Any] = {"agents": ("nobody",), "reflect": reflect, "budget": 40, "out": Path("prompts.json")}
    chosen = options(subject=LocalModel(MODEL), sampling="plain", workers=1, minibatch=1, **more)
    with pytest.raises(LightningError, match="nobody"):  # the prompts are read first
        optimise(PromptsConfig(**chosen))


def by_fork_and_replay() -> None:
    from lightning_trainer.kits.replay import ForkConfig, Program, ReplayConfig, fork, replay_all

    by_eval()
    program = Program(
        target="requests_top_p:run", subject=LocalModel(MODEL), plain=True, max_tokens=7, seed=3, workers=1
    )
    store = open_store("measured/lightning.db")
    recorded = store.rollouts(status="succeeded")[0].rollout_id
    store.close()
    fork(ForkConfig(store="measured/lightning.db", rollout=recorded, call=0, program=program))
    replay_all(ReplayConfig(store="measured/lightning.db", rollouts=(recorded,), program=program))


@pytest.mark.parametrize(
    ("sample", "calls"),
    [
        (by_train, 4), (by_dry_run, 4), (by_tasks, 4), (by_agents, 1), (by_eval, 2), (by_rounds, 4), (by_prompts, 2),
        (by_fork_and_replay, 4),
    ],
)  # fmt: skip
def test_all_commands_sample_alike(engine: FakeEngine, sample: Callable[[], None], calls: int) -> None:
    sample()
    assert len(engine.samplings) >= calls
    assert {replace(sampling, seed=None) for sampling in map(_hashable, engine.samplings)} == {_hashable(PLAIN)}
    assert all(sampling.seed is not None for sampling in engine.samplings)


def _hashable(sampling: Sampling) -> Sampling:
    assert sampling.logit_bias == {}
    return replace(sampling, logit_bias=())  # type: ignore[arg-type]


def test_agents_samples_as_training_does(engine: FakeEngine) -> None:
    for more in ((), ("--sampling", "asked"), ("--temperature", "0.3")):
        command("agents", "--tasks", "1", "--store", "seen.db", *more)
    as_trained, as_asked, forced = engine.samplings
    assert (as_trained.top_p, as_trained.temperature) == (1.0, 0.7)
    assert (as_asked.top_p, forced.temperature) == (0.2, 0.3)
