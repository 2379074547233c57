"""`env` as an option of a run: given by a flag, by a file or from Python, kept with the run, and opened when needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer import environments
from lightning_trainer.config.files import merge, to_json
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.environments import OpenedEnvironment

MODEL = {"model": "m"}
TARGET = "lightning_trainer.kits.environments.from_verifiers:run"


@pytest.fixture(autouse=True)
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Open an environment without its package, as the real one is opened: files of its tasks, and who runs them."""
    seen: list[Any] = []

    def opening(name: str, given: Any, *, tasks: int, held_out: int) -> OpenedEnvironment:
        seen.append((name, dict(given or {}), tasks, held_out))
        files = [tmp_path / f"{name}-{kind}.jsonl" for kind in ("data", "val")]
        for file in files:
            file.write_text('{"task": 1}\n')
        return OpenedEnvironment(target=TARGET, data=files[0], val=files[1] if held_out else None)

    monkeypatch.setattr(environments, "open_environment", opening)
    return seen


def toml(folder: Path, text: str) -> Path:
    file = folder / "run.toml"
    file.write_text(text)
    return file


def saved(config: TrainConfig) -> dict[str, Any]:
    """Return a configuration as a run that goes on finds it."""
    return {name: value for name, value in json.loads(to_json(config)).items() if value is not None}


def test_a_file_names_an_environment_with_its_options(tmp_path, asked):
    file = toml(tmp_path, 'env = "sums"\nenv_tasks = 9\nenv_held_out = 2\n[env_options]\nagent.turns = 4\n')
    config = merge(file, MODEL)
    assert config.target == TARGET
    assert (config.data, config.val) == (tmp_path / "sums-data.jsonl", tmp_path / "sums-val.jsonl")
    assert asked == [("sums", {"agent": {"turns": 4}}, 9, 2)]
    assert TrainConfig(env="sums", env_tasks=9, env_held_out=2, env_options={"agent": {"turns": 4}}, **MODEL) == config


def test_a_flag_goes_before_what_a_file_says_of_the_program(tmp_path, asked):
    program = toml(tmp_path, 'target = "app:run"\ndata = "a.jsonl"\nval = "b.jsonl"\n')
    config = merge(program, {**MODEL, "env": "sums", "env_held_out": "3"})
    assert (config.target, config.env_held_out, config.val) == (TARGET, 3, tmp_path / "sums-val.jsonl")
    named = toml(tmp_path, 'env = "sums"\nenv_tasks = 5\n')
    assert merge(named, {**MODEL, "env_tasks": "7"}).env_tasks == 7
    config = merge(named, {**MODEL, "target": "app:run", "data": "a.jsonl"})
    assert (config.env, config.env_tasks, config.target) == (None, None, "app:run")
    assert [tasks for _, _, tasks, _ in asked] == [200, 7]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('env = "sums"\ndata = "a.jsonl"', "env provides the program and the tasks: leave out data"),
        ('env = "sums"\ncommand = "node a.js"\ntarget = "a:b"', "leave out target and command"),
        ('env = "sums"\nval = "b.jsonl"\nenv_held_out = 2', "both set the held-out tasks"),
        ('target = "a:b"\ndata = "a.jsonl"\nenv_tasks = 2', "env_tasks is an option of env. Name an environment"),
        ("env_options.turns = 2", "env_options is an option of env"),
        ('env = "sums"\nenv_tasks = 0', "env_tasks = 0"),
        ('env = "sums"\nval_every = 2', "val_every needs val"),
        ('env = "sums"\nsteps = 0', "steps = 0"),
    ],
)
def test_what_is_wrong_is_told_before_an_environment_is_opened(tmp_path, asked, text, words):
    with pytest.raises(ConfigError, match=words):
        merge(toml(tmp_path, text), MODEL)
    assert asked == []


def test_a_run_that_goes_on_opens_its_environment_only_where_its_tasks_are_gone(tmp_path, asked):
    config = merge(None, {**MODEL, "env": "sums", "env_held_out": 2, "env_options": {"turns": 4}})
    asked.clear()
    assert merge(None, {"resume": tmp_path}, base=saved(config)) == config.model_copy(update={"resume": tmp_path})
    assert asked == []
    config.data.unlink()
    assert merge(None, {"steps": 9}, base=saved(config)).data == config.data
    assert asked == [("sums", {"turns": 4}, 200, 2)]
    assert config.data.is_file()


def test_a_run_of_an_earlier_version_gets_todays_program_for_its_environment(tmp_path, asked):
    config = merge(None, {**MODEL, "env": "sums"})
    asked.clear()
    base = {**saved(config), "target": "lightning_trainer.environments.from_verifiers:run"}
    assert merge(None, {"steps": 9}, base=base).target == config.target
    assert asked == []


def test_a_run_that_goes_on_takes_an_environment_named_anew(tmp_path, asked):
    base = saved(merge(None, {**MODEL, "env": "sums", "env_held_out": 2}))
    file = toml(tmp_path, 'env = "sums"\nenv_held_out = 2\n')
    assert merge(file, {"steps": 9}, base=base).steps == 9
    assert merge(None, {"env_held_out": 5}, base=base).env_held_out == 5
    assert [held_out for *_, held_out in asked] == [2, 2, 5]
    other = merge(None, {"val": "mine.jsonl"}, base=base)
    assert (other.val, other.env_held_out, other.env) == (Path("mine.jsonl"), None, "sums")
    with pytest.raises(ConfigError, match="leave out data"):
        merge(None, {"env": "sums", "data": "mine.jsonl"}, base=base)
