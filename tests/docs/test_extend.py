"""The examples of docs/how-to/extend.md, each registered as its page says and used by its name."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType, SimpleNamespace

import click
import pytest
import torch
from click.testing import CliRunner

import lightning_openai
from lightning_conformance import ScriptedServer
from lightning_spans import hooks, open_store
from lightning_spans.errors import ConfigError
from lightning_spans.schema.rewards import Reward
from lightning_trainer import TrainConfig, choices, registry
from lightning_trainer.callbacks import wanted_callbacks
from lightning_trainer.cli import cli
from lightning_trainer.commands import ListedCommand
from lightning_trainer.environments import open_environment
from lightning_trainer.gateway.formats.reader import Dialect, parse
from lightning_trainer.gateway.formats.table import by_name
from lightning_trainer.judges import open_judge, read_judge
from lightning_trainer.kits.evaluation.config import EvalConfig
from lightning_trainer.kits.lineage.callback import LineageKind
from lightning_trainer.kits.sft.config import SftConfig
from lightning_trainer.report import trackers
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.algorithms.grpo import Grpo
from lightning_trainer.rl.algorithms.protocol import Clip, TrainedTokens
from lightning_trainer.rl.credit.assigners import credit_by_name
from lightning_trainer.rl.rewards import rules
from support.training.judged import rolled

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to" / "extend.md").read_text(encoding="utf-8")
PAGE_OF_ALGORITHMS = DOCS / "reference" / "algorithms.md"


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
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"credit": "first", "credit_options": {"others": "abc"}}, "credit 'first': others = 'abc': .* valid number"),
        ({"credit": "first", "credit_options": {"other": 1}}, "credit 'first' has no option 'other'. It has: others"),
        ({"credit": "turn", "credit_options": {"gamma": "abc"}}, "credit 'turn': gamma = 'abc': .* valid number"),
        ({"credit": "turn", "credit_options": {"gamma": 2}}, "credit 'turn': gamma = 2: .* less than or equal to 1"),
        ({"credit": "counterfactual", "credit_options": {"group": 3}}, "'counterfactual': group = 3: .* valid boolean"),
    ],
)
def test_a_credit_option_of_a_wrong_type_is_refused_when_the_configuration_is_created(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**options)
    assert config(credit="first", credit_options={"others": 1}).credit_options == {"others": 1}


def test_an_option_that_a_credit_needs_is_missing() -> None:
    def needy(transitions, rewards, *, share: float):
        return [share for _ in transitions]

    class Credits:
        @hooks.hookimpl
        def lightning_register_credit(self, register):
            register("needy", needy)

    hooks.register(Credits(), "needy")
    try:
        with pytest.raises(ConfigError, match="credit 'needy' needs the option share"):
            config(credit="needy")
    finally:
        hooks.unregister("needy")


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({"clip_hihg": 0.4}, "algorithm 'odd' sets 'clip_hihg' in its defaults, which is not an option"),
        ({"normalise_std": 3}, "algorithm 'odd' sets normalise_std = 3 in its defaults: .* valid boolean"),
        ({"clip_high": "abc"}, "algorithm 'odd' sets clip_high = 'abc' in its defaults: .* valid number"),
    ],
)
def test_a_wrong_default_of_an_algorithm_names_the_algorithm(defaults, message) -> None:
    class Algorithms:
        @hooks.hookimpl
        def lightning_register_algorithms(self, register):
            register("odd", Grpo(paper="none", defaults=defaults))

    hooks.register(Algorithms(), "odd")
    try:
        with pytest.raises(ConfigError, match=message):
            config(algorithm="odd")
    finally:
        hooks.unregister("odd")


@pytest.mark.usefixtures("example")
def test_the_example_of_an_algorithm_sets_its_default() -> None:
    assert config(algorithm="wide-grpo").clip_high == 0.4


def test_the_example_of_a_loss_of_ones_own_is_the_unclipped_loss() -> None:
    page = PAGE_OF_ALGORITHMS.read_text(encoding="utf-8")
    source = page.partition("### A loss of your own")[2].partition("```python\n")[2].partition("```")[0]
    module = ModuleType("example_loss")
    exec(compile(source, "example_loss", "exec"), vars(module))
    hooks.register(module, "example_loss")
    try:
        assert config(algorithm="unclipped").algorithm == "unclipped"
        ones = torch.ones(2)
        old, advantages = torch.tensor([-1.0, -1.0]), torch.tensor([1.0, -2.0])
        tokens = TrainedTokens(torch.log(ones * 3) - 1, old, advantages, ones / 2, torch.tensor([0, 1]))
        found = algorithm_by_name("unclipped").policy_loss(tokens, Clip(0.2, 0.2))
        assert float(found.loss) == pytest.approx(1.5)
        assert found.ratios.tolist() == pytest.approx([3.0, 3.0])
        assert not found.clipped.any()
    finally:
        hooks.unregister("example_loss")


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
def test_the_example_of_an_environment_records_its_model_calls(monkeypatch, tmp_path) -> None:
    path = str(tmp_path / "traces.db")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("LIGHTNING_STORE", path)
    with ScriptedServer() as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        reward = asyncio.run(sys.modules["example_environment"].run({"task": {"a": 1, "b": 2}}))
        assert reward in (0.0, 1.0)
        assert len(server.requests) == 1
    attachment = lightning_openai.attach()
    try:
        attachment.flush(30)
    finally:
        attachment.detach()
    with closing(open_store(path)) as store:
        assert [span.operation for span in store.spans()] == ["chat"]


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
        (lambda name: config(engine=name), "engine", "vlm", "vllm"),
        (lambda name: config(judge={"kind": name}), "judge", "modle", "model"),
        (lambda name: config(trackers=("mlflow", name)), "tracker", "wandbb", "wandb"),
        (lambda name: config(rewards={name: 0.1}), "rule", "tool_state", "tool_status"),
        (lambda name: TrainConfig(env=name, model="m"), "environment", "verifier", "verifiers"),
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


def test_the_names_that_a_configuration_checks_are_those_that_exist() -> None:
    assert set(choices.TRACKERS) == set(trackers._KNOWN)
    assert set(choices.RULES) == set(rules.RULES)


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


BROKEN = {
    "raises": "raise ValueError('the oven is cold')",
    "registers": (
        "from lightning_spans.hooks import hookimpl\n\n@hookimpl\n"
        "def lightning_register_credit(register):\n    raise ValueError('the oven is cold')\n"
    ),
    "misspells": (
        "from lightning_spans.hooks import hookimpl\n\n@hookimpl\ndef lightning_register_credits(register): ...\n"
    ),
}


def install_plugin(folder: Path, package: str, name: str, source: str) -> None:
    """Write a distribution with one plugin, as pip would install it."""
    (folder / f"{package}-1.0.dist-info").mkdir()
    (folder / f"{package}-1.0.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (folder / f"{package}-1.0.dist-info/entry_points.txt").write_text(f"[lightning_spans]\n{name} = {package}_plugin\n")
    (folder / f"{package}_plugin.py").write_text(source)


def lightning_rl(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_trainer.cli", *arguments]
    variables = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def test_broken_plugins_of_others_are_one_line_each_and_end_no_command(tmp_path: Path) -> None:
    for package, source in BROKEN.items():
        install_plugin(tmp_path, package, package, source)
    shown = lightning_rl(tmp_path, "--help")
    assert (shown.returncode, "train" in shown.stdout) == (0, True)
    found = lightning_rl(tmp_path, "train", "app:run", "--model", "m", "--data", "d", "--credit", "mine")
    assert found.returncode == 2
    assert "unknown credit 'mine'" in found.stderr
    assert "Traceback" not in shown.stderr + found.stderr
    for package in BROKEN:
        (line,) = [line for line in found.stderr.splitlines() if f"plugin {package} is left out" in line]
        assert ("lightning_register_credits" if package == "misspells" else "the oven is cold") in line
        assert f"Left out: plugin {package}, because" in " ".join(found.stderr.split())
    lines = lightning_rl(tmp_path, "doctor", "--json").stdout.splitlines()
    checks = {each["what"]: each for each in map(json.loads, lines)}
    assert {checks[f"plugin {package}"]["state"] for package in BROKEN} == {"broken"}


def test_two_packages_with_a_plugin_of_one_name_are_both_named(tmp_path: Path) -> None:
    install_plugin(tmp_path, "one", "same", "")
    install_plugin(tmp_path, "two", "same", "")
    shown = lightning_rl(tmp_path, "--help")
    assert shown.returncode == 0
    assert "plugin 'same' is in two packages: one and two. Uninstall one of them." in " ".join(shown.stderr.split())


def test_a_second_claim_to_a_name_names_both_plugins() -> None:
    class Credits:
        @hooks.hookimpl
        def lightning_register_credit(self, register):
            register("mine", object())

    hooks.register(Credits(), "one")
    try:
        assert "mine" in registry.registrations("credit")
        hooks.register(Credits(), "two")
        with pytest.raises(ConfigError, match=r"one and two|two and one"):
            registry.registrations("credit")
    finally:
        hooks.unregister("one")
        hooks.unregister("two")


@pytest.fixture
def listed() -> Iterator[None]:
    class Commands:
        @hooks.hookimpl
        def lightning_register_commands(self, register):
            register("count-words", ListedCommand("no_such_module", "Count words.", after="train"))

    hooks.register(Commands(), "commands")
    yield
    hooks.unregister("commands")


@pytest.mark.usefixtures("listed")
def test_a_listed_command_is_in_its_place_and_not_imported_for_help() -> None:
    told = CliRunner().invoke(cli, ["--help"]).output
    names = re.findall(r"^  ([a-z][a-z-]*) ", told.partition("Commands:")[2], flags=re.MULTILINE)
    assert names[names.index("train") + 1] == "count-words"
    assert "Count words." in told
    assert [item.value for item in cli.shell_complete(click.Context(cli), "count")] == ["count-words"]


@pytest.mark.usefixtures("listed")
def test_a_listed_command_that_cannot_be_imported_names_its_module() -> None:
    told = CliRunner().invoke(cli, ["count-words"])
    assert told.exit_code == ConfigError.exit_status
    wanted = "the command 'count-words' of a plugin can't be imported from no_such_module: ModuleNotFoundError"
    assert wanted in told.output


def test_an_unknown_tool_format_lists_none() -> None:
    with pytest.raises(ConfigError, match=r"unknown tool format 'nome'\. Did you mean 'none'"):
        config(tool_format="nome")


def test_a_run_folder_in_place_of_a_store_names_the_store(tmp_path: Path) -> None:
    (tmp_path / "lightning.db").touch()
    told = CliRunner().invoke(cli, ["traces", "--store", str(tmp_path)])
    wanted = f"is a run's folder, not a store. Give its store: --store {tmp_path / 'lightning.db'}"
    assert wanted in told.output.replace("\n", "")


def test_an_error_that_ends_in_a_parenthesis_ends_as_a_sentence() -> None:
    told = CliRunner().invoke(cli, ["traces", "runs/x"])
    assert "Got unexpected extra argument (runs/x). See" in told.output
