"""`lightning-rl eval` as its users meet it, on a scripted model server and on a tiny random model."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("openai")

from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.script import Reply
from lightning_spans.errors import ConfigError
from lightning_spans.store import open_store
from lightning_trainer.cli import cli
from lightning_trainer.kits.evaluation import folder as files
from lightning_trainer.kits.evaluation.config import EvalConfig
from lightning_trainer.kits.evaluation.summary import Counting
from lightning_trainer.run.data import digest, load_tasks
from lightning_trainer.work import Work

AGENT = """
import os
import time
import openai
import lightning_openai
from lightning_spans import agent

lightning_openai.attach(tracer="embedded")
client = openai.OpenAI(base_url=os.environ.get("TEST_MODEL_URL", "http://127.0.0.1:9/v1"), api_key="k", max_retries=0)

def say(name, text):
    with agent(name):
        messages = [{"role": "user", "content": text}]
        reply = client.chat.completions.create(model="gpt-9", max_tokens=5, messages=messages)
    return reply.choices[0].message.content or ""

def run(task):
    text = say("writer", task["q"])
    if text == "crash":
        raise ValueError("the oven is cold")
    return {"writer": float(text == "good"), "checker": float(say("checker", text) == "good")}

def answers(task):
    return say("writer", task["q"])

def no_score(task, result):
    raise ConnectionError("the judge is away")

def crashes(task):
    say("writer", task["q"])
    raise ValueError("the pan is cold, too" if task["q"] == "q2" else "the oven is cold")

def letters(task):
    text = say("writer", task["q"])
    return sum(letter.isascii() and letter.isalpha() for letter in text) / 5

def held(task):
    while task["q"] == "q2" and "GO" not in os.environ:
        time.sleep(0.05)
    return run(task)

def nested(task):
    with agent("billing"):
        text = say("extract", task["q"])
    if text == "crash":
        raise ValueError("the oven is cold")
    say("extract", "good")
    return {"extract": 0.25, "writer": float(say("writer", "good") == "good"), "nobody": 1.0}

def nameless(task):
    client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])
    return 1.0
"""
NO_TORCH = "import sys; sys.modules['torch'] = None; from lightning_trainer.cli import main; main()"


@pytest.mark.torch
def test_of_what_sft_learned_the_run_says_whose_it_is(tmp_path: Path, tiny_model: Path) -> None:
    from lightning_trainer.session.answers import chosen_agents, read_subject

    shutil.copytree(tiny_model, tmp_path / "warm" / "checkpoint")
    (tmp_path / "warm" / "config.json").write_text('{"agents": ["writer"], "policies": {"writer": "lora"}}')
    for name in ("warm", "warm/checkpoint"):
        subject = read_subject(str(tmp_path / name))
        assert getattr(subject, "run", None) == tmp_path / "warm"
        assert chosen_agents(subject) == ("writer",)
    assert chosen_agents(read_subject(str(tiny_model))) is None


@pytest.fixture
def run(folder: Path, tiny_model: Path) -> Path:
    """A run of which nobody but its own options knows who was trained, and how its model writes tool calls."""
    shutil.copytree(tiny_model, folder / "warm" / "checkpoint")
    options = {"agents": ["writer"], "name_by": ["writer=model:gpt"], "tool_format": "pythonic", "max_model_len": 96}
    (folder / "warm" / "config.json").write_text(json.dumps(options))
    return folder / "warm"


@pytest.mark.torch
def test_a_runs_model_writes_and_reads_as_it_did_in_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from lightning_trainer.backends.torch import backend
    from lightning_trainer.session.answers import open_answers, read_subject

    for more, loaded in (({}, ("pythonic", 96)), ({"tool_format": "hermes", "max_model_len": 64}, ("hermes", 64))):
        with open_answers(read_subject(str(run)), **more) as found:
            (engine,) = found.engines
            assert (engine.tool_format, engine.max_model_len) == loaded  # type: ignore[attr-defined]
    asked = []

    def opened(folder: str, **options: Any) -> None:
        asked.append((options["tool_format"], options["max_model_len"]))
        raise ConfigError("that is enough")

    monkeypatch.setattr(backend, "open_torch", opened)
    for command in ("run", "run/checkpoint"):
        CliRunner().invoke(cli, ["serve", command.replace("run", str(run))])
    CliRunner().invoke(cli, ["serve", str(run), "--tool-format", "hermes"])
    assert asked == [("pythonic", 96), ("pythonic", 96), ("hermes", 96)]


def test_a_run_from_a_runs_model_writes_tool_calls_as_that_did(run: Path, tiny_model: Path) -> None:
    from lightning_trainer.config.origin import with_format
    from lightning_trainer.config.train import TrainConfig

    def written(model: Path, **options: Any) -> str | None:
        return with_format(TrainConfig(target="app:run", data=Path("d.jsonl"), model=str(model), **options)).tool_format

    assert [written(run), written(run / "checkpoint")] == ["pythonic", "pythonic"]
    assert written(run, tool_format="hermes") == "hermes"
    assert written(run, backend_options={"tool_format": "hermes"}) is None  # and that of the backend's options goes
    assert [written(tiny_model), written(Path("owner/model"))] == [None, None]


@pytest.mark.torch
def test_what_learns_from_a_runs_model_keeps_its_format(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.kits.sft.config import SftConfig
    from lightning_trainer.kits.sft.sft import sft
    from lightning_trainer.run import embedded

    line = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    Path("said.jsonl").write_text(json.dumps(line) + "\n")
    warm = sft(SftConfig(data=("said.jsonl",), model=str(run), out=Path("warmer"), steps=1, device="cpu"))
    assert json.loads((warm.folder / "config.json").read_text())["tool_format"] == "pythonic"
    tried: list[TrainConfig] = []

    def probe(config: TrainConfig, *_: Any, **__: Any) -> None:
        tried.append(config)
        raise ConfigError("that is enough")

    monkeypatch.setattr(embedded, "probe", probe)
    given = ["--data", "tasks.jsonl", "--device", "cpu", "--model"]
    for model in (run, warm.folder):
        CliRunner().invoke(cli, ["tasks", "app:run", *given, str(model)])
    assert [config.tool_format for config in tried] == ["pythonic", "pythonic"]


def test_a_run_on_verl_and_each_of_its_checkpoints_are_known_as_the_origin_of_their_weights(
    run: Path, tiny_model: Path
) -> None:
    from lightning_trainer.session.answers import name_rules, own_loading, read_subject

    shutil.rmtree(run / "checkpoint")
    for step in (5, 10):
        newest = run / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
        shutil.copytree(tiny_model, newest)
    (run / "checkpoint").symlink_to(newest)
    for model in (run, run / "checkpoint", run / "checkpoints" / "global_step_5" / "actor" / "huggingface"):
        subject = read_subject(str(model))
        assert name_rules(subject) == ("writer=model:gpt",)
        assert own_loading(subject) == {"tool_format": "pythonic", "max_model_len": 96}


def test_what_trains_from_a_runs_model_measures_in_its_format(run: Path, tiny_model: Path) -> None:
    from lightning_trainer.config.loading import load_options
    from lightning_trainer.config.train import TrainConfig

    def measured(model: Path, **options: Any) -> Any:
        config = TrainConfig(target="app:run", data=Path("d.jsonl"), model=str(model), **options)
        return load_options(config).get("tool_format")

    assert [measured(run), measured(run, tool_format="hermes"), measured(tiny_model)] == ["pythonic", "hermes", None]
    assert measured(run, backend_options={"tool_format": "hermes"}) == "hermes"


def test_of_a_run_its_agents_are_measured_and_called_as_it_called_them(run: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def measured(config: EvalConfig, *_: Any, **__: Any) -> None:
        asked.append((config.agents, config.name_by))
        raise ConfigError("that is enough")

    monkeypatch.setattr("lightning_trainer.kits.evaluation.evaluate._measure", measured)
    for more in ([], ["--agents", "checker", "--name-by", "checker=model:gpt"]):
        rl("app:run", "--data", "tasks.jsonl", "--model", str(run), *more)
    assert asked == [(("writer",), ("writer=model:gpt",)), (("checker",), ("checker=model:gpt",))]


def test_the_store_of_an_evaluation_is_named_again_where_its_password_is_not_kept(folder, monkeypatch):
    asked = []

    def evaluated(config: EvalConfig, *_: Any, **__: Any) -> None:
        asked.append(config.store)
        raise ConfigError("that is enough")

    store = "postgresql://me:secret@host/db"
    (folder / "e").mkdir()
    config = EvalConfig(data=Path("tasks.jsonl"), target="app:run", store=store)
    files.write_options(folder / "e", {"config": config.to_json()})
    monkeypatch.setattr("lightning_trainer.kits.evaluation.evaluate.evaluate", evaluated)
    assert "that is enough" in rl("--resume", "e").output
    assert "that is enough" in rl("--resume", "e", "--store", store).output
    assert asked == ["postgresql://me@host/db", store]
    assert "leave out --samples" in rl("--resume", "e", "--store", store, "--samples", "2").output


def test_a_command_with_a_password_is_given_again_to_resume(folder, monkeypatch):
    asked = []

    def evaluated(config: EvalConfig, *_: Any, **__: Any) -> None:
        asked.append((config.command, config.work.reward_command))
        raise ConfigError("that is enough")

    command, reward = "node a.js postgres://me:secret@db/x", "./check postgres://me:secret@db/x"
    config = EvalConfig(data=Path("tasks.jsonl"), command=command, work=Work(reward_command=reward))
    (folder / "e").mkdir()
    files.write_options(folder / "e", {"config": config.to_json()})
    monkeypatch.setattr("lightning_trainer.kits.evaluation.evaluate.evaluate", evaluated)
    assert "secret" not in (folder / "e" / files.ASKED_NAME).read_text()
    for given in ([], ["--command", command]):
        assert "--reward-command again" in rl("--resume", "e", *given).output
    assert asked == []
    rl("--resume", "e", "--command", command, "--reward-command", reward)
    assert asked == [(command, reward)]
    assert "leave out --workdir" in rl("--resume", "e", "--command", command, "--workdir", "w").output


def test_a_work_folder_holds_neither_the_evaluation_nor_its_store(folder: Path, tmp_path_factory) -> None:
    listing = tmp_path_factory.mktemp("listing") / "listing"
    agent = f"""sh -c 'find . -mindepth 1 > {listing}; echo "{{\\"reward\\": 1}}"'"""
    options = ["--data", "tasks.jsonl", "--workdir", ".", "--out", "e", "--store", "records.db", "--workers", "1"]
    with ScriptedServer(reply_to) as server:
        rl("--command", agent, *options, "--endpoint", server.url, "--model", "served")
    assert (folder / "records.db").exists()
    assert sorted(listing.read_text().split()) == ["./app.py", "./tasks.jsonl"]


def reply_to(body: dict[str, Any], seen: int) -> Reply:
    """Task 0 is always good, task 1 crashes, task 2 is good every other time; the checker repeats what it reads."""
    text = body["messages"][-1]["content"]
    said = {"q0": "good", "q1": "crash", "q2": ("good", "bad")[seen % 2]}.get(text, text)
    return Reply(text=said)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "app.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"q": f"q{n}"}) + "\n" for n in range(3)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LIGHTNING_KEY", raising=False)
    return tmp_path


def rl(*args: str) -> Result:
    return CliRunner().invoke(cli, ["eval", *args], catch_exceptions=False)


def last(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_a_program_is_measured_at_its_own_endpoint_and_then_against_another(folder, monkeypatch):
    with ScriptedServer(reply_to) as server:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        found = last(rl("app:run", "--data", "tasks.jsonl", "--samples", "2", "--workers", "1", "--json", "--out", "a"))
        assert {r.body["model"] for r in server.requests} == {"gpt-9"}
    assert found["mean"] == pytest.approx((1 + 0 + 0.5) / 3)
    assert (found["tasks"], found["samples"], found["failed"], found["crashed"]) == (3, 2, 2, 2)
    assert found["pass_at"] == pytest.approx(2 / 3)
    assert found["pass_all"] == pytest.approx(1 / 3)
    assert found["pass_at_each"] == {"1": pytest.approx(0.5), "2": pytest.approx(2 / 3)}
    assert (found["low"], found["high"]) == (pytest.approx(0.069, abs=1e-3), pytest.approx(0.931, abs=1e-3))
    assert found["by_agent"]["writer"]["calls"] == 6
    assert found["by_agent"]["checker"]["calls"] == 4
    assert found["by_agent"]["writer"]["prompt_tokens"] > 0
    lines = [json.loads(line) for line in (folder / "a/samples.jsonl").read_text().splitlines()]
    assert [(s["task"], s["sample"], s["status"]) for s in lines][:4] == [
        (0, 0, "succeeded"), (0, 1, "succeeded"), (1, 0, "crashed"), (1, 1, "crashed"),
    ]  # fmt: skip
    assert "the oven is cold" in lines[2]["error"]
    assert json.loads((folder / "a/summary.json").read_text()) == found
    store = open_store(str(folder / "a/lightning.db"))
    assert {r.rollout_id for r in store.rollouts()} == {s["rollout_id"] for s in lines}
    store.close()

    with ScriptedServer(lambda body, _: Reply(text="good")) as better:
        args = ["app:run", "--data", "tasks.jsonl", "--workers", "1", "--endpoint", better.url, "--model", "gpt-10"]
        shown = rl(*args, "--against", "a", "--out", "b")
        assert {r.body["model"] for r in better.requests} == {"gpt-10"}
    assert "difference, paired over 3 tasks: 0.500 (-0.531 to 0.909)" in shown.stdout
    assert "writer: 3 of 3 answers are 'good'" in shown.stdout
    found = json.loads((folder / "b/summary.json").read_text())
    assert (found["mean"], found["difference"], found["against"]["evaluated"]) == (1.0, pytest.approx(0.5), "a")
    assert found["elsewhere"] == 0

    lower = [{**lines[0], "reward": -1.0}, *lines[1:]]
    (folder / "a/samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lower))
    with ScriptedServer(reply_to) as server:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        found = last(rl("app:run", "--data", "tasks.jsonl", "--workers", "1", "--against", "a", "--out", "d", "--json"))
    assert (found["crashed"], found["failed_reward"], found["against"]["failed_reward"]) == (1, -1.0, -1.0)

    (folder / "tasks.jsonl").write_text(json.dumps({"q": "another"}) + "\n")
    refused = rl("app:run", "--data", "tasks.jsonl", "--against", "a", "--out", "c")
    assert refused.exit_code == 2
    assert "of other tasks" in refused.output
    assert not (folder / "c").exists()


def test_where_failures_are_left_out_a_retry_that_succeeded_counts(folder, monkeypatch):
    def crashes_once(body: dict[str, Any], seen: int) -> Reply:
        return Reply(text="crash" if body["messages"][-1]["content"] == "q1" and not seen else "good")

    args = ["app:run", "--data", "tasks.jsonl", "--workers", "1", "--json"]
    with ScriptedServer(crashes_once) as server:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        found = last(rl(*args, "--failed", "exclude", "--out", "a"))
    assert (found["mean"], found["tasks"], found["crashed"], found["left_out"]) == (1.0, 3, 0, 0)
    lines = [json.loads(line) for line in (folder / "a/samples.jsonl").read_text().splitlines()]
    assert {(s["status"], s["ending"], s["error"]) for s in lines} == {("succeeded", "succeeded", None)}
    refused = rl(*args, "--against", "a", "--out", "b")
    assert refused.exit_code == 2
    assert "the evaluation a has --failed exclude, and this one lowest" in refused.output


@pytest.mark.parametrize("earlier_version", [False, True])
def test_an_evaluation_in_which_slow_samples_count_differently_is_no_baseline(folder, earlier_version):
    (folder / "a").mkdir()
    config = EvalConfig(data=Path("tasks.jsonl"), target="app:run", counting=Counting(timeouts="exclude")).to_json()
    if earlier_version:  # which had no such option, and left slow samples out
        del config["counting"]["timeouts"]
    files.write_options(folder / "a", {"tasks": digest(load_tasks(Path("tasks.jsonl"))), "config": config})
    files.write_samples(folder / "a", [])
    refused = rl("app:run", "--data", "tasks.jsonl", "--against", "a", "--out", "b")
    assert refused.exit_code == 2
    assert "the evaluation a has --timeouts exclude, and this one count" in refused.output
    assert not (folder / "b").exists()


def test_an_evaluation_that_was_killed_goes_on_and_repeats_nothing(folder):
    """Without torch, too."""
    with ScriptedServer(reply_to) as server:
        environment = {**os.environ, "TEST_MODEL_URL": server.url}
        command = [sys.executable, "-c", NO_TORCH, "eval"]
        args = ["app:held", "--data", "tasks.jsonl", "--samples", "2", "--workers", "1", "--out", "e"]
        first = subprocess.Popen([*command, *args], env=environment, stderr=subprocess.PIPE, start_new_session=True)
        assert ended(folder / "e/lightning.db", 4, first)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        assert first.stderr is not None
        first.stderr.close()
        before = len(server.requests)
        again = subprocess.run(
            [*command, "--resume", "e", "--json"],
            env={**environment, "GO": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
        asked = [r.body["messages"][-1]["content"] for r in server.requests[before:]]
    assert asked.count("q2") == 2
    assert not {"q0", "q1"} & set(asked)
    assert "4 samples found in the folder, 2 missing" in again.stderr
    found = json.loads(again.stdout.splitlines()[-1])
    assert (found["tasks"], found["counted"]) == (3, 6)
    lines = [json.loads(line) for line in (folder / "e/samples.jsonl").read_text().splitlines()]
    assert [(s["task"], s["sample"]) for s in lines] == [(task, n) for task in range(3) for n in range(2)]


@pytest.mark.skipif(sys.platform == "win32", reason="a process there can't interrupt itself")
def test_ctrl_c_says_at_once_what_is_cancelled(folder, monkeypatch, capfd):
    first, stopped = iter([True]), threading.Event()

    def interrupt(_body: dict[str, Any], _seen: int) -> Reply:
        if next(first, False):
            os.kill(os.getpid(), signal.SIGINT)
        stopped.wait(60)
        return Reply(text="good")

    with ScriptedServer(interrupt) as server:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        try:
            result = rl("app:run", "--data", "tasks.jsonl", "--workers", "1", "--concurrency", "1", "--out", "e")
        finally:
            stopped.set()
    assert result.exit_code == 130
    assert "(0 of 3) will be cancelled. Press Ctrl-C again to quit now.\n" in capfd.readouterr().err
    assert "Continue with: lightning-rl eval --resume e" in result.output
    assert files.read_options(folder / "e")["seconds"] > 0  # a resumed evaluation adds its own


def ended(path: Path, count: int, process: subprocess.Popen[bytes]) -> bool:
    """Wait until so many rollouts have ended."""
    while process.poll() is None:
        if path.exists():
            store = open_store(str(path))
            try:
                if sum(rollout.status in {"succeeded", "failed"} for rollout in store.rollouts()) >= count:
                    return True
            finally:
                store.close()
        time.sleep(0.1)
    return False


@pytest.mark.parametrize(
    ("agents", "earned"),
    [
        # "extract" stands in two places: the reward reaches both, and a crash counts for whoever spoke in it
        ("*", {"extract": 0.25 * 2 / 3, "writer": 1.0, "nobody": 1.0}),
        ("billing/*,writer", {"billing/extract": 0.25 * 2 / 3, "extract": 0.25, "writer": 1.0, "nobody": 1.0}),
    ],
)
def test_an_agent_that_is_selected_by_its_path_earns_what_its_name_was_given(folder, monkeypatch, agents, earned):
    with ScriptedServer(reply_to) as server:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)  # of whoever is not selected
        args = ["app:nested", "--data", "tasks.jsonl", "--workers", "1", "--endpoint", server.url]
        found = last(rl(*args, "--agents", agents, "--json", "--out", "a"))
        assert "rewards name 'nobody', which made no model call" in rl(*args, "--agents", agents, "--out", "b").stderr
    by_agent = {name: agent["mean"] for name, agent in found["by_agent"].items()}
    assert by_agent == {name: pytest.approx(mean) for name, mean in earned.items()}
    assert sum(found["by_agent"][name]["calls"] for name in ("billing/extract", "extract") if name in by_agent) == 5


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["app:run"], "give the tasks to run"),
        (["--data", "tasks.jsonl"], "name the agent"),
        (["app:run", "--data", "tasks.jsonl", "--endpoint", "nowhere"], "give a URL"),
        (["app:run", "--data", "tasks.jsonl", "--endpoint", "http://127.0.0.1:9/v1"], "can't be reached"),
        (["app:run", "--data", "tasks.jsonl", "--endpoint", "http://127.0.0.1:9", "--model", "m"], "can't be reached"),
        (["app:run", "--data", "tasks.jsonl", "--failed", "often"], "a number, lowest or exclude"),
        (["app:run", "--data", "tasks.jsonl", "--device", "cpu"], "only for weights that are loaded here"),
        (["app:run", "--data", "tasks.jsonl", "--temperature", "0"], "temperature: of calls that come to a model"),
        (["app:run", "--data", "tasks.jsonl", "--sampling", "plain", "--max-tokens", "9"], "max_tokens, sampling: of"),
        (["app:nobody", "--data", "tasks.jsonl"], "app has no 'nobody'"),
        (["app:run", "--data", "tasks.jsonl", "--columns", "q,absent"], "absent"),
        (["app:run", "--data", "tasks.jsonl", "--model", "m", "--endpoint", "http://[::1"], "must be MODEL=URL"),
        (["--resume", "nothing"], "holds no evaluation"),
    ],
)
def test_a_mistake_is_told_and_leaves_no_folder(folder, args, said):
    result = rl(*args)
    assert result.exit_code == 2
    assert said in result.output
    assert not (folder / "evals").exists()


def test_where_only_the_reward_function_fails_it_is_what_to_look_at(folder):
    with ScriptedServer(reply_to) as server:
        args = ["app:answers", "--data", "tasks.jsonl", "--tasks", "1", "--workers", "1", "--endpoint", server.url]
        result = rl(*args, "--reward", "app:no_score", "--max-attempts", "1")
    assert result.exit_code == 3
    assert "the judge is away" in result.output
    assert "Call the reward function by itself on one answer" in result.output


def test_where_no_sample_reached_a_model_the_status_is_the_agents_and_the_endpoint_is_told(folder, monkeypatch):
    raising = "def run(task):\n    raise APIConnectionError('Connection error.')\n"
    (folder / "away.py").write_text(f"class APIConnectionError(Exception): ...\n\n{raising}")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    result = rl("away:run", "--data", "tasks.jsonl", "--workers", "1")
    assert result.exit_code == 3
    assert "all 3 samples" in result.output
    assert "OPENAI_BASE_URL is not set" in result.output
    assert "--model" in result.output


def test_a_model_that_no_call_reaches_is_not_what_was_measured(folder, monkeypatch):
    with ScriptedServer() as server:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        args = ["app:nameless", "--data", "tasks.jsonl", "--workers", "1", "--endpoint", server.url]
        result = rl(*args, "--out", "e")
        assert result.exit_code == 2
        assert "none of 3 model calls reached" in result.output
        result = rl(*args, "--agents", "writer", "--out", "e2")
    assert "none of 3 model calls reached" in result.output


@pytest.mark.torch
def test_a_model_is_measured_and_against_itself_there_is_no_difference(folder, tiny_model):
    pytest.importorskip("torch")
    model = ["--model", str(tiny_model), "--against", str(tiny_model), "--dtype", "float32"]
    found = last(rl("app:letters", "--data", "tasks.jsonl", "--samples", "3", "--workers", "1", *model, "--json"))
    assert found["difference"] == 0.0
    assert found["difference_low"] == -found["difference_high"] < 0.0  # few tasks: others might differ
    assert (found["counted"], found["elsewhere"]) == (9, 0)
    assert found["by_agent"]["writer"]["response_tokens"] > 0
    assert (Path(found["folder"]) / "against/samples.jsonl").exists()


def test_a_judge_gives_the_rewards_of_an_evaluation(folder, monkeypatch):
    """What the program itself returns does not count then, and samples without a verdict are failures."""

    def judge(body: dict[str, Any], seen: int) -> Reply:
        told = next(m["content"] for m in body["messages"] if m["role"] == "user")
        if "user: q1" in told:
            return Reply(text="I would rather not")
        count = told.count("<attempt number")
        return Reply(text=json.dumps({"scores": [{"attempt": n, "score": 0.25} for n in range(1, count + 1)]}))

    with ScriptedServer(lambda body, _: Reply(text="good")) as server, ScriptedServer(judge) as judges:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        args = ["app:run", "--data", "tasks.jsonl", "--samples", "2", "--workers", "1", "--json", "--out", "e"]
        judged = [
            "--reward",
            "judge",
            "--judge",
            f"endpoint={judges.url}",
            "--judge",
            "model=j",
            "--judge",
            "retries=0",
        ]
        found = last(rl(*args, *judged, "--judge", f"endpoint={judges.url}"))
    assert (found["mean"], found["tasks"], found["left_out"]) == (0.25, 2, 2)
    lines = [json.loads(line) for line in (folder / "e/samples.jsonl").read_text().splitlines()]
    assert [s["status"] for s in lines if s["task"] == 1] == ["failed", "failed"]
    assert "the judge gave no verdict" in lines[2]["error"]

    for more, why in (([], "compared only the samples of that evaluation"), (judged, "against each other")):
        refused = rl("app:run", "--data", "tasks.jsonl", "--against", "e", "--out", "f", *more)
        assert refused.exit_code == 2
        assert why in refused.output
        assert "--reward module:function" in refused.output
        assert not (folder / "f").exists()


def test_a_judge_that_does_not_answer_loses_no_sample(folder, monkeypatch):
    """They are kept, and judged once it answers: the program does not run again."""
    silent = [True]

    def judge(body: dict[str, Any], seen: int) -> Reply:
        if silent:
            return Reply(status=500)
        told = next(m["content"] for m in body["messages"] if m["role"] == "user")
        count = told.count("<attempt number")
        return Reply(text=json.dumps({"scores": [{"attempt": n, "score": 0.25} for n in range(1, count + 1)]}))

    with ScriptedServer(lambda body, _: Reply(text="good")) as server, ScriptedServer(judge) as judges:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        args = ["app:run", "--data", "tasks.jsonl", "--samples", "2", "--workers", "1", "--json", "--out", "e"]
        judged = [f"endpoint={judges.url}", "model=j", "retries=0"]
        refused = rl(*args, "--reward", "judge", *(word for option in judged for word in ("--judge", option)))
        assert refused.exit_code == 2
        assert "continue with: lightning-rl eval --resume e" in refused.output.replace("\n", " ")
        drawn = len(server.requests)
        still = rl("--resume", "e", "--json")
        assert "the judge gave no verdict on any of 3 groups" in still.output.replace("\n", " ")
        silent.clear()
        found = last(rl("--resume", "e", "--json"))
    assert (found["mean"], found["counted"], found["left_out"]) == (0.25, 6, 0)
    assert len(server.requests) == drawn


def test_an_evaluation_in_which_everything_crashed_fails_with_the_error(folder, monkeypatch):
    with ScriptedServer(lambda body, _: Reply(text="bad")) as server:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        found = rl("app:crashes", "--data", "tasks.jsonl", "--samples", "2", "--workers", "1", "--json", "--out", "a")
    assert found.exit_code == 3
    told = json.loads(found.stdout.splitlines()[-1])
    assert (told["mean"], told["crashed"]) == (0.0, 6)
    assert "none of 6 samples succeeded. The most frequent error (4 of 6):" in found.stderr
    assert "the oven is cold" in found.stderr
