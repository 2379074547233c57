"""The command line as its users meet it: what each command prints, and that every mistake is told on one screen."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result

from lightning_conformance import ScriptedServer
from lightning_conformance.stores.samples import a_span
from lightning_spans.errors import ConfigError
from lightning_spans.schema.attempts import Rollout
from lightning_spans.store import open_store
from lightning_spans.store.sql.store import SqlStore
from lightning_trainer.backends.torch import backend as torch_backend
from lightning_trainer.cli import COMMANDS
from lightning_trainer.config.train import TrainConfig
from support.cli import call, told
from support.fakes import FakeEngine

LIGHTNING = [sys.executable, "-m", "lightning_trainer.cli"]

PLAIN = """
import os
from lightning_spans import agent

def run(task): return 1.0
def good(task): return float(len(task["q"]))
def nothing(task): pass
def nan(task): return float("nan")
def text(task): return "very good"
def by_agent(task): return {"writer": None}
def raises(task): raise ValueError("the oven is cold")
def no_task(): return 1.0
def score(task, result): return 0.5
def score_task(task): return 0.5
"""
AGENT = '''
import os
import openai
import lightning_openai
from lightning_spans import agent

lightning_openai.attach(tracer="embedded")
client = openai.OpenAI(
    base_url=os.environ.get("TEST_MODEL_URL", "http://127.0.0.1:9/v1"), api_key="mine", max_retries=0
)

def say(name, text):
    with agent(name):
        reply = client.chat.completions.create(
            model="gpt-9", max_tokens=5, messages=[{"role": "user", "content": text}]
        )
    return reply.choices[0].message.content or ""

def run(task):
    text = say("writer", task["q"])
    return sum(letter.isascii() and letter.isalpha() for letter in text) / 5

def two(task):
    say("writer", task["q"])
    say("rewriter", task["q"])
    client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "nobody asks"}])
    return {"writer": 1.0}

def careful(task):
    """Goes on without a model."""
    try:
        say("writer", task["q"])
    except openai.APIError:
        pass
    return 0.5

def flat(task):
    say("writer", task["q"])
    return 1.0
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cli_plain.py").write_text(PLAIN)
    (tmp_path / "cli_agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"q": f"say {n}"}) + "\n" for n in range(4)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_KEY", raising=False)
    return tmp_path


def train(target: str, *args: str | Path, data: str | Path = "tasks.jsonl", model: str | Path = "no-model") -> Result:
    small = ["--steps", "2", "--batch-size", "2", "--group-size", "2", "--workers", "1", "--max-attempts", "1"]
    return call("train", target, "--data", data, "--model", model, "--out", "out", *small, *args)


def untouched(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} <= {"cli_plain.py", "cli_agent.py", "tasks.jsonl"}


# --- help -------------------------------------------------------------------------------------------------------------


def test_help_names_every_command_and_imports_nothing_that_costs_time() -> None:
    heavy = "{'pydantic', 'rich', 'httpx', 'sqlalchemy', 'fastapi', 'torch', 'numpy', 'matplotlib'}"
    code = (
        "import sys\nfrom lightning_trainer.cli import cli\n"
        f"cli(['--help'], standalone_mode=False)\nassert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize("command", ["train", "tasks"])
def test_help_shows_no_default_where_there_is_none(command: str) -> None:
    shown = call(command, "--help").output
    assert "[default: ()]" not in shown
    assert "[default: 16]" in shown


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("fork",), "the one with the highest held-out reward, otherwise the newest"),
        (("key", "viewer"), "It can read, and save or remove marks."),
    ],
    ids=["fork", "key viewer"],
)
def test_help_says_which_checkpoint_is_used_and_what_a_key_allows(words: tuple[str, ...], text: str) -> None:
    assert text in " ".join(call(*words, "--help").output.split())


@pytest.mark.parametrize("json_lines", [(), ("--json",)], ids=["table", "json"])
def test_a_locale_without_an_agents_letters_shows_them_as_escapes(folder: Path, json_lines: tuple[str, ...]) -> None:
    store = open_store("lightning.db")
    store.add_spans([a_span(agent="\u65e5")])
    store.close()
    asked = [*LIGHTNING, "agents", *json_lines]
    done = subprocess.run(
        asked, capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode("cp1252")
    if json_lines:
        assert json.loads(shown.splitlines()[0])["agent"] == "\u65e5"
    else:
        assert r"\u65e5" in shown


def test_cuda_without_it_is_told_before_the_agent_is_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_trainer.backends.torch.options.version", lambda _name: "2.13.0+cpu")
    told(train("cli_plain:run", "--device", "cuda:0"), "device 'cuda:0': this torch finds no CUDA. Use --device cpu")
    untouched(folder)


@pytest.mark.parametrize("device", ["mps9", "gpu", "cuda:one", ""])
def test_a_device_that_there_is_not_is_told_before_the_agent_is_imported(folder: Path, device: str) -> None:
    told(train("cli_plain:run", "--device", device), f"device {device!r} is not known", "Use auto, cpu, cuda or cuda:1")
    untouched(folder)


@pytest.mark.parametrize(
    ("option", "value"), [("name-by", "writer=system:Write"), ("temperature", "0.5"), ("sampling", "plain")]
)
def test_options_of_calls_that_come_to_no_model_here_are_refused(folder: Path, option: str, value: str) -> None:
    name = option.replace("-", "_")
    told(
        call("agents", "cli_plain:run", "--data", "tasks.jsonl", f"--{option}", value),
        f"{name}: of calls that come to a model named here",
    )
    untouched(folder)


def test_no_time_at_all_for_a_task_is_told_at_once(folder: Path) -> None:
    told(call("agents", "cli_plain:run", "--data", "tasks.jsonl", "--timeout-s", "0"), "'--timeout-s'", "x>0")
    untouched(folder)


def test_a_misspelt_command_is_told_the_nearest() -> None:
    result = call("trian")
    assert result.exit_code == 2
    assert "Did you mean 'train'?" in result.stderr


def test_training_explains_itself_under_headings_with_an_example() -> None:
    text = call("train", "--help").stdout
    headings = ["Example:", "What runs, and on what:", "What is trained:", "How it learns:", "What is kept:"]
    assert sorted(headings, key=text.index) == headings
    assert text.index("How it learns:") < text.index("--learning-rate") < text.index("How it samples:")


def test_python_m_is_the_same_command() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "lightning_trainer", "--help"], capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == call("--help").stdout.split()  # a terminal may be wider than a test


def test_tab_offers_models_agents_and_commands(folder: Path) -> None:
    run = folder / "runs" / "today" / "checkpoint"
    run.mkdir(parents=True)
    (run / "state.json").write_text('{"agents": ["writer", "checker"]}')

    def offered(*words: str) -> list[str]:
        env = {
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
            "_LIGHTNING_RL_COMPLETE": "bash_complete",
        }
        said = subprocess.run(LIGHTNING, env={**os.environ, **env}, capture_output=True, text=True, check=True)
        return [line.partition(",")[2] for line in said.stdout.splitlines()]

    assert "traces" in offered("lightning-rl", "tr")
    assert offered("lightning-rl", "train", "--agents", "writer,c") == ["writer,checker"]
    assert offered("lightning-rl", "train", "--model", "s") == ["smollm2-135m"]
    assert offered("lightning-rl", "train", "--resume", "r") == ["runs/today"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str) -> None:
    result = call(name, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: lightning-rl {name}")


def test_every_option_of_a_run_is_a_flag() -> None:

    text = call("train", "--help").output
    for name in set(TrainConfig.model_fields) - {"target"}:
        assert f"--{name.replace('_', '-')}" in text


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.jsonl", None, ["none.jsonl does not exist"]),
        ("empty.jsonl", "", ["empty.jsonl is empty"]),
        ("bad.jsonl", '{"q": 1}\n{"q": \n{\n', ["bad.jsonl, line 2", "not JSON"]),
        ("bad.csv", "q,a\n1\n", ["bad.csv, line 2"]),
        ("list.json", '{"q": 1}', ["list.json", "a list of objects"]),
    ],
)
@pytest.mark.parametrize("command", ["train", "agents"])
def test_data_file_that_is_missing_empty_or_malformed(
    folder: Path, command: str, name: str, content: str | None, words: list[str]
) -> None:
    if content is not None:
        (folder / name).write_text(content)
    if command == "train":
        told(train("cli_plain:run", data=name), *words)
    else:
        told(call("agents", "cli_plain:run", "--data", name), *words)
    (folder / name).unlink(missing_ok=True)
    untouched(folder)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nowhere:run", ["no module 'nowhere'", "Start in the folder that holds it"]),
        ("cli_plain:fly", ["cli_plain has no 'fly'", "Its functions: run"]),
        ("cli_plain:no_task", ["wrong signature", "called as no_task(task)"]),
        ("cli_plain", ["module:function"]),
    ],
)
def test_target_that_can_not_be_called(folder: Path, tiny_model: Path, target: str, words: list[str]) -> None:
    told(train(target, model=tiny_model), *words)
    told(call("agents", target, "--data", "tasks.jsonl"), *words)
    untouched(folder)


def test_reward_function_that_can_not_be_called(folder: Path, tiny_model: Path) -> None:
    told(
        train("cli_plain:run", "--reward", "cli_plain:score_task", model=tiny_model),
        "called as score_task(task, result)",
    )
    untouched(folder)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--group-size", "many"], ["group_size = 'many'"]),
        (["--learning-rate", "-1"], ["learning_rate"]),
        (["--epochs", "1"], ["steps and epochs"]),
        (["--algorithm", "magic"], ["unknown algorithm 'magic'", "grpo"]),
        (["--credit", "magic"], ["unknown credit 'magic'", "identical"]),
        (["--backend", "magic"], ["magic", "torch"]),
        (["--backend-options", "slots"], ["NAME=VALUE"]),
        (["--config", "none.toml"], ["none.toml"]),
        (["--resume", "none"], ["there is no folder none"]),
    ],
)
def test_option_that_is_wrong(folder: Path, flags: list[str], words: list[str]) -> None:
    told(train("cli_plain:run", *flags), *words)
    untouched(folder)


def test_a_run_that_is_refused_does_not_say_that_it_trains(folder: Path, tiny_model: Path) -> None:
    result = train("cli_agent:run", "--credit", "nonsense", model=tiny_model)
    told(result, "nonsense")
    assert "training" not in result.stderr.splitlines()[0]
    told(train("cli_agent:run", data="nowhere.jsonl", model=tiny_model), "nowhere.jsonl")
    assert "training" not in train("cli_agent:run", data="nowhere.jsonl", model=tiny_model).stderr


def test_an_unknown_algorithm_is_told_those_that_train(folder: Path) -> None:
    result = train("cli_agent:run", "--algorithm", "grop")
    told(result, "unknown algorithm 'grop'", "grpo", "distil")
    assert "likelihood" not in result.stderr


def test_tab_offers_algorithms_and_credits() -> None:
    from lightning_trainer.flags.complete import for_option

    offered = {name: for_option(name) for name in ("algorithm", "credit")}
    found = {name: {item.value for item in complete(None, None, "")} for name, complete in offered.items()}  # type: ignore[misc,arg-type]
    assert {"grpo", "distil"} <= found["algorithm"]
    assert "likelihood" not in found["algorithm"]
    assert "gigpo" in found["credit"]


@pytest.mark.parametrize(
    ("command", "theirs", "ours"),
    [
        ("train", "--lr", "--learning-rate"),
        ("train", "--num-generations", "--group-size"),
        ("train", "--beta", "--kl-coef"),
        ("train", "--tasks-per-step", "--batch-size"),
        ("train", "--max_new_tokens", "--max-tokens"),
        ("sft", "--num-train-epochs", "--epochs"),
    ],
)
def test_another_trainers_option_is_answered_with_ours(command: str, theirs: str, ours: str) -> None:
    result = call(command, "x:y", theirs, "1")
    assert result.exit_code == 2
    assert f"No such option '{theirs}'. Did you mean '{ours}'?" in result.output.replace("(", "").replace("\n", " ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--debgu", "runs"), "error: No such option '--debgu'. Did you mean '--debug'? See lightning-rl --help."),
        (("trian",), "error: No such command 'trian'. Did you mean 'train'? See lightning-rl --help."),
        (
            ("deploy", "statsu"),
            "error: No such command 'statsu'. Did you mean 'status'? See lightning-rl deploy --help.",
        ),
        (("runs", "--jsn"), "error: No such option '--jsn'. Did you mean '--json'? See lightning-rl runs --help."),
        (("prune", "--older-than", "9"), "such as 30d. See lightning-rl prune --help."),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_with_the_nearest_name(words: tuple[str, ...], said: str) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert result.stderr.endswith(f"{said}\n")
    assert len(result.stderr.splitlines()) == 1


def test_another_trainers_option_in_a_configuration_is_answered_with_ours() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'lr'. Did you mean 'learning_rate'"):
        TrainConfig.model_validate({"target": "x:y", "lr": 1e-5})


def test_unknown_flag_and_unknown_command(folder: Path) -> None:
    told(train("cli_plain:run", "--grup-size", "3"), "--grup-size", "--group-size")
    told(call("trian"), "trian")


def test_unknown_key_of_a_config_file(folder: Path) -> None:
    (folder / "run.toml").write_text("grup_size = 3\n")
    told(train("cli_plain:run", "--config", "run.toml"), "run.toml", "grup_size", "group_size")


def test_model_folder_without_parts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("torch")
    model = tmp_path_factory.mktemp("model")
    told(train("cli_plain:run", model=model / "none"), "does not exist")
    (model / "config.json").write_text("{}")
    told(train("cli_plain:run", model=model), "no tokenizer")
    told(call("serve", model), "no tokenizer")
    untouched(folder)


def test_training_without_torch_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "find_spec", lambda name: None)
    told(train("cli_plain:run"), 'pip install "lightning-trainer[torch]"')
    told(call("serve", folder), 'pip install "lightning-trainer[torch]"')
    untouched(folder)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nothing", ["reward is None", "say "]),
        ("nan", ["reward is nan", "finite"]),
        ("text", ["reward is 'very good' (str), not a number"]),
        ("by_agent", ["reward of 'writer' is None"]),
        ("run", ["no model call was captured", "nothing is attached", "lightning_langchain.attach()"]),
        ("raises", ["all 4 rollouts failed", "the oven is cold"]),
    ],
)
def test_agent_that_can_not_be_trained(folder: Path, tiny_model: Path, target: str, words: list[str]) -> None:
    told(train(f"cli_plain:{target}", model=tiny_model), *words, status=3)
    assert not (folder / "out" / "checkpoint").exists()


@pytest.mark.parametrize("target", ["run", "careful"])
def test_unknown_agent_lists_those_seen(folder: Path, tiny_model: Path, target: str) -> None:
    words = ["'writter' was never seen. Agents seen: writer"]
    if target == "run":  # which may be why, where the agent that is meant would have spoken later
        words += [
            "All 4 rollouts failed, too",
            "openai.APIConnectionError",
            "OPENAI_BASE_URL is",
            "Check that it is running",
        ]
    told(train(f"cli_agent:{target}", "--agents", "writter", model=tiny_model), *words)
    assert not (folder / "out" / "checkpoint").exists()


def test_rewards_that_never_differ(folder: Path, tiny_model: Path) -> None:
    result = train("cli_agent:flat", model=tiny_model)
    told(result, "in the first 2 steps the rewards of each group were all equal (mean reward 1)", status=4)
    assert not (folder / "out" / "checkpoint").exists()


@pytest.mark.parametrize("command", ["train", "serve", "server"])
def test_port_in_use(folder: Path, request: pytest.FixtureRequest, command: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        if command == "train":
            result = train("cli_plain:run", "--port", port, model=request.getfixturevalue("tiny_model"))
            untouched(folder)
        elif command == "serve":
            result = call("serve", request.getfixturevalue("tiny_model"), "--port", port)
        else:
            result = call("server", "--port", port)
        told(result, f"port {port} on 127.0.0.1 is in use", "--port")
        untouched(folder)


def test_debug_shows_the_traceback(folder: Path) -> None:
    result = call("train", "cli_plain:run", "--data", "none.jsonl", "--model", "m", "--debug")
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "DataError"


def test_interrupt_says_how_to_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_trainer.run import train as module
    from lightning_trainer.run.interrupts import SavedInterrupt

    def interrupted(*_: Any) -> None:
        raise SavedInterrupt("stopped after 3 steps. Continue with: lightning-rl train --resume out")

    monkeypatch.setattr(module, "train", interrupted)
    result = train("cli_plain:run")
    assert result.exit_code == 130
    assert "Continue with: lightning-rl train --resume out" in result.stderr


def test_store_that_is_not_there(folder: Path) -> None:
    told(call("traces"), "there is no store lightning.db")
    told(call("agents", "--store", "runs/none.db"), "there is no store runs/none.db")
    untouched(folder)


def test_agents_that_all_fail(folder: Path) -> None:
    told(
        call("agents", "cli_plain:raises", "--data", "tasks.jsonl"), "all 4 tasks failed", "the oven is cold", status=3
    )
    tree = call("traces")
    assert tree.stdout.count("ValueError: the oven is cold") == 4
    assert "cli_plain.py" not in tree.stdout
    rollout = tree.stdout.split()[1].rpartition(".")[0]
    assert "cli_plain.py" in call("traces", "--rollout", rollout).stdout


def test_agents_of_two_programs_at_once(folder: Path) -> None:
    two = call("agents", "cli_plain:run", "--command", "true", "--data", "tasks.jsonl")
    told(two, "TARGET and --command both name an agent")
    untouched(folder)


def test_agents_have_nothing_that_a_judge_could_compare(folder: Path) -> None:
    told(call("agents", "cli_plain:run", "--reward", "judge", "--data", "tasks.jsonl"), "eval --reward judge")
    untouched(folder)


def test_agents_without_tasks(folder: Path) -> None:
    told(call("agents", "cli_plain:run"), "--data")
    untouched(folder)


# --- train ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run of two steps, from a config file."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "cli_agent.py").write_text(AGENT)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"q": f"say {n}"}) + "\n" for n in range(4)))
    (folder / "run.toml").write_text(
        f'data = "tasks.jsonl"\nval = "tasks.jsonl"\nmodel = "{tiny_model}"\nsteps = 1\nworkers = 1\nout = "out"\n'
        "batch_size = 2\ngroup_size = 4\n[backend_options]\nthreads = 1\n"
    )
    before = Path.cwd()
    os.chdir(folder)
    try:
        return folder, call("train", "cli_agent:run", "--config", "run.toml", "--steps", "2")
    finally:
        os.chdir(before)


def test_last_line_of_training_is_json(trained: tuple[Path, Result]) -> None:
    folder, result = trained
    assert result.exit_code == 0, result.output
    last = json.loads(result.stdout.splitlines()[-1])
    assert {"reward_before", "reward_after", "seconds"} <= last.keys()
    assert last["before"]["mean"] == last["reward_before"]
    assert (last["before"]["of"], last["before"]["tasks"]) == ("held-out tasks, before training", 4)
    assert last["after"]["low"] <= last["after"]["mean"] <= last["after"]["high"]
    assert "on 4 tasks, 4 rollouts: held-out tasks, after training" in result.stderr
    assert (last["steps"], last["checkpoint"]) == (2, "out/checkpoint")
    assert (folder / last["checkpoint"] / "config.json").is_file()
    assert "step 1/2" in result.stderr
    assert "step 2/2" in result.stderr


def test_held_out_tasks_that_are_trained_on_are_told(folder: Path, tiny_model: Path) -> None:
    (folder / "val.jsonl").write_text('{"q": "say 1"}\n{"q": "say it otherwise"}\n')
    small = ("--steps", "1", "--val", "val.jsonl", "--max-tokens", "5")
    both = train("cli_agent:run", *small, model=tiny_model)
    assert "WARNING: 1 of 2 held-out tasks are also training tasks" in both.stderr
    (folder / "val.jsonl").write_text('{"q": "say it otherwise"}\n')
    apart = train("cli_agent:run", *small, "--out", "apart", model=tiny_model)
    assert apart.exit_code == 0
    assert "are also training tasks" not in apart.stderr


def test_without_held_out_tasks_rewards_say_what_they_are_of(folder: Path, tiny_model: Path) -> None:
    (folder / "named.py").write_text(f"{AGENT}\ndef named(task):\n    return {{'writer': run(task)}}\n")
    two = call_trained("named:named", tiny_model, "--steps", "2", "--out", "two")
    assert two["by_agent_before"].keys() == two["by_agent_after"].keys() == {"writer"}
    assert two["by_agent_after"]["writer"] == pytest.approx(two["reward_after"])
    assert two["after"]["of"].startswith("rollouts of step 2, on its training tasks, sampled before")
    one = call_trained("named:named", tiny_model, "--steps", "1", "--out", "one")
    assert one["reward_before"] == pytest.approx(two["reward_before"])
    assert (one["reward_after"], one["after"]["mean"], one["by_agent_after"]) == (None, None, {})
    assert "--val" in one["after"]["of"]


def call_trained(target: str, model: Path, *args: str) -> dict[str, Any]:
    small = ["--batch-size", "2", "--group-size", "4", "--workers", "1", "--max-tokens", "5", "--seed", "3"]
    result = call("train", target, "--data", "tasks.jsonl", "--model", model, *small, "--entropy-coef", "0.01", *args)
    assert result.exit_code == 0, result.output
    last: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return last


def test_run_goes_on_with_resume_alone(trained: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained[0])
    result = call("train", "--resume", "out", "--steps", "3")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["steps"] == 3
    Path("resume.toml").write_text('resume = "out"\nsteps = 3\n')
    for arguments in (["--resume", "out", "--steps", "3"], ["--config", "resume.toml"]):
        again = call("train", *arguments)
        assert "this run has completed its 3 steps" in again.stderr
        last = json.loads(again.stdout.splitlines()[-1])
        assert (last["steps"], last["folder"]) == (3, "out")


def test_checkpoint_of_another_model(
    trained: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from support.models.tiny import make_tiny_model

    monkeypatch.chdir(trained[0])
    other = make_tiny_model(tmp_path / "other", seed=5)
    told(call("train", "--resume", "out", "--steps", "9", "--model", other), "is a checkpoint of", "not of")
    told(call("train", "--resume", "out", "--group-size", "8"), "group_size = 4, not 8")


def test_traces_of_a_run(trained: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(trained[0])
    store = ["--store", "out/lightning.db"]
    lines = [json.loads(line) for line in call("traces", *store, "--json").stdout.splitlines()]
    keys = {
        "operation", "agent", "trace_id", "span_id", "parent_id", "rollout_id", "attempt_id", "start_ns", "end_ns",
        "status", "attributes",
    }  # fmt: skip
    assert all(keys <= line.keys() for line in lines)
    chats = [line for line in lines if line["operation"] == "chat"]
    assert len(chats) >= 2 * 8 + 2 * 4
    for chat in chats:
        assert chat["agent"] == "writer"
        assert len(chat["response_token_ids"]) == len(chat["logprobs"])
        assert chat["prompt_token_ids"]
        assert chat["policy_version"] in {0, 1, 2, 3}
    tree = call("traces", "--store", "out/lightning.db", "--limit", "3")
    assert tree.stdout.count("attempt ") == 3
    assert "tokens, weights" in tree.stdout
    assert "Earlier traces are not shown" in tree.stderr
    newest = [json.loads(line) for line in call("traces", *store, "--json", "--limit", "3").stdout.splitlines()]
    shown = list(dict.fromkeys(line["attempt_id"] for line in newest))
    assert len(shown) == 3
    assert all(f"attempt {attempt} " in tree.stdout for attempt in shown)
    call("traces", *store, "--to-tasks", tmp_path / "made.jsonl", "--limit", "3")
    assert len((tmp_path / "made.jsonl").read_text().splitlines()) == 3
    one = call("traces", "--store", "out/lightning.db", "--json", "--rollout", chats[0]["rollout_id"])
    assert {json.loads(line)["rollout_id"] for line in one.stdout.splitlines()} == {chats[0]["rollout_id"]}


def test_traces_show_what_was_said_and_only_what_is_asked_for(
    trained: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained[0])
    store = ["--store", "out/lightning.db"]
    assert "< say " in call("traces", *store, "--limit", "1").stdout
    found = call("traces", *store, "--text", "say 1", "--limit", "50").stdout
    assert "< say 1" in found
    assert "< say 2" not in found
    assert "attempt" in call("traces", *store, "--agent", "writer", "--min-reward", "-1").stdout
    for none in (["--agent", "nobody"], ["--min-reward", "99"], ["--errors"]):
        assert "none that meets" in call("traces", *store, *none).stderr
    assert "Agents seen: " in call("traces", *store, "--agent", "wrtier").stderr
    told(call("traces", *store, "--rollout", "r-99"), "there is no rollout r-99")


def test_a_store_that_can_not_be_written_is_read_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    store = SqlStore(f"sqlite:///{folder}/lightning.db")
    store.add_spans([a_span(attempt_id=None, rollout_id=None, name="chat policy")])
    store.close()
    (folder / "lightning.db-turn").unlink(missing_ok=True)
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)
    result = call("traces", "--store", f"{folder}/lightning.db")
    assert (result.exit_code, "chat policy" in result.stdout) == (0, True), result.output
    assert not (folder / "lightning.db-turn").exists()


# --- agents -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def own_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    """The user's own model server."""
    with ScriptedServer() as server:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        yield server


def test_agents_says_who_would_be_trained_and_why_not(folder: Path, own_model: ScriptedServer) -> None:
    result = call("agents", "cli_agent:two", "--data", "tasks.jsonl", "--tasks", "3", "--json")
    assert result.exit_code == 0, result.output
    rows = {row["agent"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert set(rows) == {"writer", "rewriter", None}
    assert [rows[name]["calls"] for name in ("writer", "rewriter", None)] == [3, 3, 3]
    assert [rows[name]["trained"] for name in ("writer", "rewriter", None)] == [True, False, False]
    assert rows["writer"]["reward"] == 1.0
    assert "no reward" in rows["rewriter"]["why"]
    assert "no agent's name" in rows[None]["why"]
    assert len(own_model.requests) == 9
    assert "9 model calls recorded, at their own endpoint" in result.stderr
    assert "joined" not in result.stderr
    again = call("agents", "--agents", "writer")
    assert "writer would be trained" in again.stdout
    assert "rewriter would not be trained: not among --agents" in again.stdout
    assert "outside a runner" not in call("traces").stdout


def test_agents_refuses_a_name_that_nobody_has(folder: Path, own_model: ScriptedServer) -> None:
    told(
        call("agents", "cli_agent:run", "--data", "tasks.jsonl", "--agents", "write"),
        "'write' was never seen. Agents seen: writer",
    )


def test_agents_of_a_program_that_is_not_attached(folder: Path) -> None:
    told(
        call("agents", "cli_plain:run", "--data", "tasks.jsonl"),
        "no model call was captured in 4 rollouts",
        "attach()",
        status=3,
    )


def test_agents_of_a_command_that_asks_no_model_says_where_to_ask(folder: Path, own_model: ScriptedServer) -> None:
    words = ("--data", "tasks.jsonl", "--endpoint", own_model.url, "--model", "m")
    result = call("agents", "--command", "echo 1", *words)
    told(result, "the command 'echo 1' made no model call that the gateway saw", "OPENAI_BASE_URL", status=3)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("float('nan')", ["reward is nan", "finite"]),
        ("'very good'", ["'very good' (str), not a number"]),
        ("{'writer': None}", ["reward of 'writer' is None"]),
    ],
)
def test_agents_tells_a_wrong_reward_as_training_would(
    folder: Path, own_model: ScriptedServer, value: str, words: list[str]
) -> None:
    (folder / "wrong.py").write_text(f"{AGENT}\ndef wrong(task):\n    say('writer', task['q'])\n    return {value}\n")
    result = call("agents", "wrong:wrong", "--data", "tasks.jsonl", "--tasks", "2")
    told(result, *words, status=3)
    assert "writer would not be trained: no reward: reward" in result.stdout


def test_agents_tells_of_a_misspelt_name_in_the_rewards_and_of_none_at_all(
    folder: Path, own_model: ScriptedServer
) -> None:
    (folder / "spelt.py").write_text(
        f"{AGENT}\ndef wrong(task):\n    say('writer', task['q'])\n    return {{'writter': 1.0}}\n"
        "def nothing(task):\n    say('writer', task['q'])\n"
    )
    result = call("agents", "spelt:wrong", "--data", "tasks.jsonl", "--tasks", "1")
    assert "rewards name 'writter' (did you mean 'writer'?)" in result.stderr
    result = call("agents", "spelt:nothing", "--data", "tasks.jsonl", "--tasks", "1", "--store", "other.db")
    assert "no reward: return one from run(), or give --reward" in result.stdout
    told(result, "no rollout got a reward (1 ran)", "Return a number from run()", "--reward", status=4)
    again = call("agents", "--store", "other.db")
    assert again.exit_code == 0  # to look at a store is no attempt to train
    assert "no rollout got a reward (1 ran)" in again.stderr


def test_agents_of_a_command_says_how_to_see_its_calls(folder: Path) -> None:
    result = call("agents", "--command", "true", "--data", "tasks.jsonl", "--tasks", "1")
    told(result, "its calls went to its own endpoint", "agents --command ... --data FILE --model MODEL", status=3)
    assert "lightning_langchain" not in result.stderr


def test_agents_with_a_model_needs_no_endpoint(folder: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    (folder / "none.py").write_text(AGENT)
    look = ["agents", "none:run", "--data", "tasks.jsonl", "--tasks", "2", "--json"]
    told(call(*look), "all 2 tasks failed", status=3)  # its own endpoint is none
    result = call(*look, "--model", tiny_model)
    assert result.exit_code == 0, result.output
    (row,) = [json.loads(line) for line in result.stdout.splitlines()]
    assert (row["agent"], row["calls"], row["failed_calls"], row["trained"]) == ("writer", 2, 0, True)
    assert row["prompt_tokens"] > 0
    assert "2 model calls" in result.stderr
    assert "their own endpoint" not in result.stderr
    chosen = call(*look, "--model", tiny_model, "--agents", "checker")  # the writer stays where it was, as in training
    told(chosen, status=3)
    for option in ("--model", "--data", "--reward", "--name-by", "--workdir"):
        told(call("agents", option, tiny_model), f"{option} needs a program to run")


def test_a_command_is_seen_by_the_model_that_answers_it(folder: Path, tiny_model: Path) -> None:
    (folder / "other.py").write_text(
        "import json, os, urllib.request as r\n"
        "body = {'model': 'm', 'max_tokens': 3, 'messages': [{'role': 'user', 'content': 'hi'}]}\n"
        "head = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'content-type': 'application/json'}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "r.urlopen(r.Request(url, json.dumps(body).encode(), head)).read()\n"
        """print('{"reward": 1.0}')\n"""
    )
    program = f"{sys.executable} other.py"
    look = ["agents", "--command", program, "--data", "tasks.jsonl", "--tasks", "1", "--json"]
    result = call(*look, "--model", tiny_model)
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout.splitlines()[0])
    assert (row["agent"], row["calls"], row["reward"]) == ("agent", 1, 1.0)


def test_agents_that_fail_leave_nothing_and_show_what_the_program_printed(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    (folder / "loud.py").write_text("def run(task):\n    print('the oven says no', flush=True)\n    raise OSError(5)\n")
    told(call("agents", "loud:run", "--data", "tasks.jsonl"), "all 4 tasks failed", "the oven says no", status=3)
    assert list(temporary.glob("lightning-logs-*")) == []
    (folder / "gone.py").write_text(
        "import os\ndef run(task):\n    print('the oven is off', flush=True)\n    os._exit(7)"
    )
    told(call("agents", "gone:run", "--data", "tasks.jsonl", "--tasks", "1"), "exit status 7", status=3)
    (log,) = temporary.glob("lightning-logs-*/worker-0.log")  # a warning says to look there
    assert "the oven is off" in log.read_text()


ASKS = """
import json, os, sys, urllib.request
tools = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
for system in ("You are a title generator.", "You count."):
    body = {"model": "gpt-9", "tools": tools, "reasoning_effort": "low", "verbosity": "low"}
    body["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": "12+7?"}]
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
open("answer", "w").write("19")
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_agents_of_a_command_shows_what_it_did_on_the_way_to_its_own_endpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.fakes import served

    (folder / "project").mkdir()
    (folder / "project" / "README").write_text("count")
    (folder / "asks.py").write_text(ASKS)
    call_of_a_tool = '<tool_call>\n{"name": "calculator", "arguments": {}}\n</tool_call>'
    with served(folder, FakeEngine(lambda prompt: call_of_a_tool)) as endpoint:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{endpoint.url}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", endpoint.keys.issue("admin"))
        asked = [
            "agents",
            "--command",
            f"{sys.executable} {folder / 'asks.py'}",
            "--data",
            "tasks.jsonl",
            "--tasks",
            "1",
        ]
        asked += [
            "--endpoint",
            f"{endpoint.url}/v1",
            "--model",
            "policy",
            "--name-by",
            "title=system:title generator",
            "--workdir",
            "project",
        ]
        result = call(*asked, "--reward-command", "grep -q 19 answer", "--json")
    assert result.exit_code == 0, result.stderr
    rows = {row["agent"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert set(rows) == {"agent", "title"}
    for row in rows.values():
        assert (row["calls"], row["reward"], row["trained"]) == (1, 1.0, True)
        assert row["tools_asked"] == {"calculator": 1}
    assert not (folder / "project" / "answer").exists()
    shown = call("agents", "--store", "lightning.db").stdout
    assert "title asked for tools: calculator 1" in shown
    told = json.loads(call("traces", "--json", "--store", "lightning.db").stdout.splitlines()[0])
    assert told["rollout_id"]


# --- servers ----------------------------------------------------------------------------------------------------------


@contextmanager
def started(folder: Path, *args: str | Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A command that goes on until it is told to stop, and the line of JSON that it prints when it is ready."""
    process = subprocess.Popen([*LIGHTNING, *map(str, args)], cwd=folder, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_server_and_runner_work_together(folder: Path) -> None:
    with started(folder, "server", "--store", "s.db") as (_, server):
        admin = Path(server["key_file"])
        assert admin.stat().st_mode & 0o077 == 0
        store = open_store(server["url"], key=admin.read_text().strip())
        ids = [f"r{number}" for number in range(3)]
        store.enqueue([Rollout(rollout_id=i, group_id="g", task={"q": "x" * n}) for n, i in enumerate(ids, 1)])
        keys = ["--server", server["url"], "--key-file", server["runner_key_file"]]
        with started(folder, "runner", "cli_plain:good", *keys, "--workers", "1") as (_, runner):
            assert runner["server"] == server["url"]
            while any(rollout.status != "succeeded" for rollout in store.rollouts()):
                time.sleep(0.05)
        assert sorted(reward.value for reward in store.rewards()) == [1.0, 2.0, 3.0]
        told(call("runner", "cli_plain:fly", *keys), "has no 'fly'")
        told(call("traces", "--store", server["url"]), "key")
        store.close()
    assert (folder / "s.db").is_file()


def test_a_runners_work_folders_hold_no_keys_and_no_output_of_other_attempts(folder: Path) -> None:
    listing, project = folder / "listing", folder / "project"
    project.mkdir()
    (project / "calc.py").touch()
    with started(project, "server") as (_, server):
        (project / "mine.txt").write_text(Path(server["runner_key_file"]).read_text())
        store = open_store(server["url"], key=Path(server["key_file"]).read_text().strip())
        store.enqueue([Rollout(rollout_id="r", group_id="g", task={})])
        agent = f"""sh -c 'find . -mindepth 1 > {listing}; echo "{{\\"reward\\": 1}}"'"""
        words = ["--server", server["url"], "--key-file", "mine.txt", "--logs", "printed", "--workers", "1"]
        with started(project, "runner", "--command", agent, "--workdir", ".", *words):
            while any(rollout.status in {"queued", "running"} for rollout in store.rollouts()):
                time.sleep(0.05)
        assert [reward.value for reward in store.rewards()] == [1.0]
        store.close()
    assert {"lightning.key.secret", "lightning.db", "mine.txt", "printed"} <= {path.name for path in project.iterdir()}
    assert listing.read_text() == "./calc.py\n"


def test_runner_that_dies_takes_its_workers_with_it(folder: Path) -> None:
    with started(folder, "server", "--store", "s.db") as (_, server):
        command = [*LIGHTNING, "runner", "cli_plain:good", "--server", server["url"], "--workers", "1"]
        command += ["--key-file", server["runner_key_file"]]
        runner = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        assert runner.stdout is not None
        runner.stdout.readline()
        children = Path(f"/proc/{runner.pid}/task/{runner.pid}/children")
        workers = [
            int(pid) for task in children.parent.parent.iterdir() for pid in (task / "children").read_text().split()
        ]
        assert workers
        runner.kill()
        runner.wait()
        end = time.monotonic() + 20
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["cli_plain:run", "--server", "http://127.0.0.1:9"], ["--key-file"]),
        (["cli_plain:run", "--server", "http://127.0.0.1:9", "--key-file", "none"], ["key file none can't be read"]),
        (["--server", "http://127.0.0.1:9"], ["name the agent"]),
    ],
)
def test_runner_without_key_or_agent(folder: Path, args: list[str], words: list[str]) -> None:
    told(call("runner", *args), *words)


@pytest.mark.parametrize(("text", "word"), [("schlüssel", "contains no key"), ("", "is empty")])
def test_key_file_that_holds_none(folder: Path, text: str, word: str) -> None:
    (folder / "the.key").write_text(text)
    for command in (["runner", "cli_plain:run", "--server"], ["traces", "--store"]):
        told(call(*command, "http://127.0.0.1:9", "--key-file", "the.key"), f"key file the.key {word}")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--upstream", "nonsense"], ["MODEL=URL"]),
        (["--agents", "writer"], ["--upstream"]),
        (["--upstream", "a=http://127.0.0.1:9", "--model", "b"], ["b is not an upstream. Use one of: a"]),
        (["--upstream", "a=http://127.0.0.1:9", "--tokenizer", "b=x"], ["MODEL=FOLDER", "b=x"]),
        (["--upstream", "a=http://127.0.0.1:9", "--tokenizer", "a=/nowhere/at/all"], ["/nowhere/at/all", "tokenizer"]),
        (["--upstream", "a=http://127.0.0.1:9", "--system-messages", "merge"], ["--system-messages", "--tokenizer"]),
        (["--unrecorded"], ["--provider"]),
        (["--provider", "nonsense"], ["provider=nonsense"]),
        (["--store", "http://127.0.0.1:9"], ["give a database"]),
    ],
)
def test_server_options_that_are_wrong(folder: Path, args: list[str], words: list[str]) -> None:
    told(call("server", *args), *words)
    untouched(folder)


def test_served_checkpoint_answers_with_its_key_alone(trained: tuple[Path, Result]) -> None:
    with started(trained[0], "serve", "out/checkpoint") as (_, ready):
        key = Path(ready["key_file"]).read_text().strip()
        body = {"model": ready["model"], "max_tokens": 4, "messages": [{"role": "user", "content": "say 1"}]}
        url = f"{ready['url']}/v1/chat/completions"
        answer = httpx.post(url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] <= 4
        assert httpx.post(url, json=body).status_code == 401
    assert not Path(ready["key_file"]).exists()


def test_serve_says_what_it_loads_before_it_does(folder: Path, tiny_model: Path) -> None:
    told(call("serve", tiny_model, "--dtype", "float16"), f"loading {tiny_model} ...", "dtype")


@pytest.mark.parametrize("option", ["--key-file", "--store"])
def test_serve_says_what_it_can_not_write_before_it_loads(folder: Path, tiny_model: Path, option: str) -> None:
    (folder / "file").touch()
    result = call("serve", tiny_model, option, folder / "file" / "kept")
    told(result, "file/kept")
    assert "loading" not in result.stderr


def test_checkpoint_that_is_not_there(folder: Path) -> None:
    told(call("serve", "runs/none"), "runs/none does not exist")


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_says_what_works_and_what_to_do(folder: Path, tiny_model: Path) -> None:
    result = call("doctor", "--model", "none", "--server", "http://127.0.0.1:9", "--json")
    findings = {line["what"]: line for line in map(json.loads, result.stdout.splitlines())}
    assert result.exit_code == 1
    assert findings["plugin openai"]["state"] == "ok", findings
    assert "lightning_attach" in findings["plugin openai"]["found"]
    assert findings["model"]["state"] == findings["server"]["state"] == "broken"
    assert findings["server"]["do"]
    unheard = call("doctor", "--model", tiny_model, "--server", "http://127.0.0.1:9", "--json")
    assert unheard.exit_code == 1
    assert "tool_format" in json.loads(
        unheard.stdout.splitlines()[-1]
    )  # what is broken has nothing to do with the model
    text = call("doctor", "--model", tiny_model, "--store", "new.db").stdout
    assert "has its parts" in text
    assert "does not exist yet" in text
    assert "broken" not in text
    assert not (folder / "new.db").exists()


def test_doctor_says_of_what_is_missing_who_needs_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_trainer.cli.setup import checks

    monkeypatch.setattr(checks, "_version", lambda name: None if name in ("langchain", "crewai") else "1.0")
    lines = call("doctor").stdout.splitlines()
    absent = "absent frameworks: langchain, crewai. Install one only if your program imports it"
    assert [line for line in lines if line.startswith("absent frameworks")] == [absent]
    assert "ok     langchain-core: 1.0" in lines  # which is all that a LangGraph program needs
    assert not any(line.startswith("absent langchain") for line in lines)


def test_a_refused_run_leaves_no_folder_of_runs(folder: Path, tiny_model: Path) -> None:
    arguments = ["train", "cli_nowhere:run", "--data", "tasks.jsonl", "--model", tiny_model]
    told(call(*arguments), "there is no module 'cli_nowhere'")
    assert not (folder / "runs").exists()
    (folder / "runs").mkdir()
    told(call(*arguments), "there is no module 'cli_nowhere'")
    assert (folder / "runs").exists()
