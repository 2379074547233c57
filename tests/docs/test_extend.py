"""The examples of docs/how-to/extend.md, each registered as its page says and used by its name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner

from lightning_spans import hooks
from lightning_spans.errors import ConfigError
from lightning_spans.schema.rewards import Reward
from lightning_trainer import TrainConfig, registry
from lightning_trainer.callbacks import wanted_callbacks
from lightning_trainer.cli import cli
from lightning_trainer.environments import open_environment
from lightning_trainer.gateway.formats.reader import Dialect, parse
from lightning_trainer.gateway.formats.table import by_name
from lightning_trainer.judges import open_judge, read_judge
from lightning_trainer.kits.evaluation.config import EvalConfig
from lightning_trainer.kits.lineage.callback import LineageKind
from lightning_trainer.kits.sft.config import SftConfig
from lightning_trainer.rl.credit.assigners import credit_by_name
from support.training.judged import rolled

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")


@pytest.fixture
def example() -> Iterator[None]:
    """Register every example of the page, each as a module of its own."""
    sources = dict(re.findall(r"^## (\w+)[^\n]*\n.*?^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE))
    names = [f"example_{title.lower()}" for title in sources]
    for name, source in zip(names, sources.values(), strict=True):
        module = sys.modules[name] = ModuleType(name)
        exec(compile(source, name, "exec"), vars(module))
        hooks.register(module, name)
    yield
    for name in names:
        hooks.unregister(name)
        del sys.modules[name]


def config(**options: object) -> TrainConfig:
    return TrainConfig(**{"target": "app:run", "data": "tasks.jsonl", "model": "m", **options})


@pytest.mark.usefixtures("example")
def test_the_example_of_credit_gives_its_values() -> None:
    assert config(credit="first").credit == "first"
    turns, reward = [SimpleNamespace(turn=turn) for turn in (3, 1, 2)], SimpleNamespace(value=2.0)
    assert credit_by_name("first", others=0.5)(turns, [reward]) == [0.5, 2.0, 0.5]


@pytest.mark.usefixtures("example")
def test_the_example_of_an_algorithm_sets_its_default() -> None:
    assert config(algorithm="wide-grpo").clip_high == 0.4


@pytest.mark.usefixtures("example")
def test_the_example_of_a_judge_rewards_the_fewest_calls() -> None:
    rewards: list[Reward] = []
    store = SimpleNamespace(
        add_spans=lambda spans: None,
        calls=lambda attempt_ids: ["call"] * (1 + attempt_ids[0].endswith("1")),
        add_rewards=rewards.extend,
    )
    with open_judge(read_judge("judge", {"kind": "fewest-calls"}), store, seed=0, cache=None) as judge:
        outcomes = judge.judge(rolled(store, ["one", "two"]))
    assert [[reward.value for reward in outcome.rewards] for outcome in outcomes] == [[1.0], [0.0]]
    assert [(reward.source, reward.value) for reward in rewards] == [("judge", 1.0), ("judge", 0.0)]


@pytest.mark.usefixtures("example")
def test_the_example_of_a_callback_adds_its_metric() -> None:
    [kind] = [kind for kind in wanted_callbacks(config()) if not isinstance(kind, LineageKind)]
    outcomes = [SimpleNamespace(attempts=[1]), SimpleNamespace(attempts=[1, 2])]
    with kind.open(None) as callback:
        assert callback.before_batch(SimpleNamespace(outcomes=outcomes)).metrics == {"attempts_per_rollout": 1.5}


@pytest.mark.usefixtures("example")
def test_the_example_of_a_tool_format_reads_calls() -> None:
    assert config(tool_format="bracket").tool_format == "bracket"
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}},
    }
    answer = parse(Dialect(by_name("bracket")), 'Let me see. <<call look {"at": "x"}>>', [tool])
    assert [call["function"]["name"] for call in answer.tool_calls] == ["look"]


@pytest.mark.usefixtures("example")
def test_the_example_of_an_environment_writes_tasks_and_names_its_program(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    opened = open_environment("sums", tasks=3, held_out=1)
    assert opened.target == "example_environment:run"
    assert len(opened.data.read_text().splitlines()) == 3
    made = TrainConfig(env="sums:small", env_tasks=3, model="m")
    assert made.target == "example_environment:run"
    assert TrainConfig(**made.model_dump()) == made  # as a run that resumes makes it


@pytest.mark.usefixtures("example")
def test_the_example_of_a_command_runs_and_is_listed() -> None:
    assert CliRunner().invoke(cli, ["hello", "Ada"]).output == "Hello, Ada.\n"
    assert "Greet somebody." in CliRunner().invoke(cli, ["--help"]).output
    assert "Did you mean 'hello'?" in CliRunner().invoke(cli, ["helo"]).output


@pytest.mark.parametrize(
    ("make", "kind", "name", "near"),
    [
        (lambda name: config(credit=name), "credit", "identcal", "identical"),
        (lambda name: config(algorithm=name), "algorithm", "grop", "grpo"),
        (lambda name: config(backend=name), "backend", "tourch", "torch"),
        (lambda name: config(tool_format=name), "tool format", "herms", "hermes"),
        (lambda name: read_judge("judge", {"kind": name}), "judge", "modle", "model"),
        (lambda name: TrainConfig(env=f"{name}:x", model="m"), "environment", "verifier", "verifiers"),
        (lambda name: SftConfig(data=("a.jsonl",), model="m", backend=name), "backend", "tourch", "torch"),
        (
            lambda name: EvalConfig(target="app:run", data=Path("d"), load={"tool_format": name}),
            "tool format",
            "herms",
            "hermes",
        ),
    ],
)
def test_an_unknown_name_is_refused_when_a_configuration_is_created(make, kind, name, near) -> None:
    with pytest.raises(ConfigError, match=f"unknown {kind} '{name}'. Did you mean '{near}'\\? Use one of: .*{near}"):
        make(name)


def test_a_command_of_a_plugin_takes_no_name_of_ours() -> None:
    class Commands:
        @hooks.hookimpl
        def lightning_register_commands(self, register):
            register("train", None)

    hooks.register(Commands(), "commands")
    try:
        with pytest.raises(ConfigError, match="registers the command 'train', which lightning-rl has"):
            cli.list_commands(None)
    finally:
        hooks.unregister("commands")


def test_every_kind_of_name_has_an_example_or_a_page() -> None:
    shown = set(re.findall(r"^def (lightning_register_\w+)", PAGE, flags=re.MULTILINE))
    elsewhere = {f"lightning_register_{name}" for name in ("alarms", "backends", "engines")}
    assert shown | elsewhere == set(registry._HOOKS.values())
