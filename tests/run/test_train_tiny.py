"""The whole loop on a tiny random model: a plain program without an endpoint is trained, stopped, resumed."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_spans.errors import AgentFailedError, ConfigError, LightningError
from lightning_spans.store import open_store
from lightning_spans.store.traces import traces_of

pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch


from lightning_trainer import Result, TrainConfig, train
from lightning_trainer.report.progress import Silent
from lightning_trainer.run import loop
from lightning_trainer.run.interrupts import SavedInterrupt
from support.training.programs import folder_with, put_programs
from support.training.tiny_runs import PROGRAMS, StopAt, config, lines, rollouts_of, tasks_of

folder = folder_with(5, **PROGRAMS)


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Path:
    return tiny_model


def learned(out: Path) -> list[dict[str, Any]]:
    """What must be the same when a run is done again, or goes on from a checkpoint.

    Recorded log-probabilities differ in the last digit with the company that a request had in the engine's batch.
    """
    names = ("step", "reward", "tokens", "rows", "policy_version")
    return [
        {
            **{name: line[name] for name in names},
            "loss": pytest.approx(line["loss"], abs=1e-5),
            "grad_norm": pytest.approx(line["grad_norm"], rel=1e-3),
            "entropy": pytest.approx(line["entropy"], rel=1e-4),
        }
        for line in lines(out)
    ]


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Three steps with validation, in one go."""
    folder = tmp_path_factory.mktemp("whole")
    put_programs(folder, 5, **PROGRAMS)
    before = Path.cwd()
    os.chdir(folder)
    try:
        result = train(
            config(
                model, steps=3, val="tasks.jsonl", val_samples=2, val_every=2, save_every=1, keep=3, checkpoint="full"
            )
        )
    finally:
        os.chdir(before)
    return folder, result


def test_run_leaves_everything_it_promises(whole: tuple[Path, Result]) -> None:
    folder, result = whole
    out = folder / "out"
    assert (result.steps, len(result.curve)) == (3, 3)
    assert result.before is not None
    assert result.after is not None
    assert (result.before.rollouts, result.before.failed, result.after.failed) == (10, 0, 0)
    assert result.reward_before == lines(out, "val")[0]["reward"]
    assert [line["step"] for line in lines(out)] == [0, 1, 2]
    assert [line["step"] for line in lines(out, "val")] == [0, 2, 3]
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard").iterdir())
    assert json.loads((out / "config.json").read_text())["group_size"] == 4
    checkpoint = (out / "checkpoint").resolve()
    assert checkpoint.name == "step-000003"
    assert (checkpoint / "config.json").is_file()
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["step-000001", "step-000002", "step-000003"]


def test_held_out_tasks_that_come_later_are_not_compared_with_those_before(
    whole: tuple[Path, Result], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True, symlinks=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "others.jsonl").write_text('{"q": "others"}\n')
    result = train(config(model, steps=3, val="others.jsonl", val_samples=2, resume="out", out=None))
    assert result.after is not None
    assert (result.reward_before, result.scores()[0]["mean"], result.after.rollouts) == (None, None, 2)
    again = train(config(model, steps=3, val="tasks.jsonl", val_samples=2, resume="out", out=None))
    assert (again.before, again.after) == (whole[1].before, whole[1].after)
    assert [line["step"] for line in lines(Path("out"), "val")] == [0, 2, 3, 3]


def test_every_call_is_accounted_for_and_joined_to_its_span(whole: tuple[Path, Result]) -> None:
    out = whole[0] / "out"
    for line in lines(out):
        assert line["calls_seen"] == line["calls_trained"] == 8
        assert line["policy_version"] == line["step"] + 1
        assert line["logprob_gap"] < 1e-3
    store = open_store(str(out / "lightning.db"))
    traces = traces_of(store)
    calls = {call.response_id: call for call in store.calls()}
    store.close()
    chats = [node for trace in traces for node in trace.chats]
    assert len(chats) == len(calls) == 3 * 8 + 3 * 10
    for node in chats:
        call = calls[node.to_json()["response_id"]]
        assert node.span.agent == "writer"
        assert node.to_json()["response_token_ids"] == list(call.choices[0].token_ids or ())
        assert call.rollout_id == node.span.rollout_id


def test_weights_of_each_step_sampled_its_rollouts(whole: tuple[Path, Result]) -> None:
    store = open_store(str(whole[0] / "out" / "lightning.db"))
    versions = {(call.rollout_id or "").rpartition(":")[2].split("-")[0]: call.policy_version for call in store.calls()}
    store.close()
    assert {name: version for name, version in versions.items() if name.startswith("t")} == {"t0": 0, "t1": 1, "t2": 2}


def test_run_is_repeated_from_its_seed_in_any_thread(whole: tuple[Path, Result], folder: Path, model: Path) -> None:
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(train(config(model, steps=2, workers=2))))
    thread.start()
    thread.join()
    assert results[0].curve == whole[1].curve[:2]
    assert learned(folder / "out") == learned(whole[0] / "out")[:2]
    assert tasks_of(folder / "out").items() <= tasks_of(whole[0] / "out").items()


def test_run_goes_on_with_the_same_next_batch_and_the_same_losses(
    whole: tuple[Path, Result], folder: Path, model: Path
) -> None:
    shutil.copytree(whole[0] / "out", folder / "out", symlinks=True)
    result = train(config(model, steps=3, out=None, resume="out/checkpoints/step-000002"))
    assert learned(folder / "out") == learned(whole[0] / "out")
    assert result.curve == whole[1].curve
    again = [r.task for r in rollouts_of(folder / "out") if ":t2-" in r.rollout_id]
    assert again[:8] == again[8:]
    assert len(again) == 16


def test_checkpoint_of_weights_alone_is_a_model_and_no_place_to_go_on_from(folder: Path, model: Path) -> None:
    result = train(config(model, steps=1, checkpoint="weights"))
    assert result.checkpoint is not None
    names = {path.name for path in result.checkpoint.iterdir()}
    assert "model.safetensors" in names
    assert not names & {"trainer.safetensors", "trainer.json"}
    with pytest.raises(ConfigError, match="only weights") as refused:
        train(config(model, out=None, resume="out"))
    assert f"--resume {result.folder}" not in str(refused.value)  # there is nothing to resume from
    assert f"--model {result.checkpoint.resolve()}" in str(refused.value)
    train(config(result.folder, out="next", steps=1))


def test_room_for_checkpoints_is_asked_for_before_anything_begins(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_trainer.backends.torch.needs import room, weights_of

    asked = config(model, steps=1)
    weights = weights_of(asked)
    assert weights is not None
    free = {"bytes": room(asked, weights, 1) - 1}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free["bytes"]))
    with pytest.raises(ConfigError, match="are free in"):
        train(asked)
    assert not (folder / "out").exists()
    free["bytes"] += 1
    train(asked)
    size = sum(path.stat().st_size for path in (folder / "out" / "checkpoint").resolve().iterdir())
    assert size == pytest.approx(weights.checkpoint - 2**23, rel=0.2)


def test_long_steps_are_saved_before_their_number_is_due(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LONGEST_UNSAVED_S", 0)
    train(config(model, steps=3, keep=5, save_every=10))
    assert sorted(path.name for path in (folder / "out" / "checkpoints").iterdir()) == [
        "step-000001", "step-000002", "step-000003",
    ]  # fmt: skip


def test_full_disk_at_a_checkpoint_is_one_error_and_the_last_good_one_stays(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    from lightning_trainer.backends.torch import checkpoint

    write, written = checkpoint.save_file, []

    def full(tensors: Any, path: Path) -> None:
        written.append(path)
        if len(written) > 1:
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        write(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*step-000001 is complete.*--resume out"):
        train(config(model, steps=3, save_every=1))
    assert (folder / "out" / "checkpoint").resolve().name == "step-000001"


def test_ctrl_c_ends_the_step_and_saves(folder: Path, model: Path) -> None:
    before = signal.getsignal(signal.SIGINT)  # a process that was started in the background ignores it
    progress = StopAt(0)
    with pytest.raises(SavedInterrupt, match=r"stopped after 1 step\. Continue with: lightning-rl train --resume out"):
        train(config(model), progress)
    assert progress.told == 1
    assert (folder / "out" / "checkpoint").resolve().name == "step-000001"
    assert signal.getsignal(signal.SIGINT) is before
    assert all(r.status in {"succeeded", "cancelled"} for r in rollouts_of(folder / "out"))


def test_an_error_after_a_step_says_how_to_go_on(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_trainer.backends.torch import TorchLearner

    update, taken, notes, progress = TorchLearner.update, list[int](), list[str](), Silent()
    monkeypatch.setattr(progress, "note", notes.append)

    def failing(learner: TorchLearner, rows: Any) -> dict[str, float]:
        taken.append(len(rows))
        if len(taken) == 2:
            raise AgentFailedError("the disk is gone")
        return update(learner, rows)

    monkeypatch.setattr(TorchLearner, "update", failing)
    with pytest.raises(AgentFailedError, match="the disk is gone"):
        train(config(model, steps=3, save_every=1), progress)
    assert notes[-1] == "saved after 1 step. Continue with: lightning-rl train --resume out"
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    train(config(model, steps=3, resume="out", out=None))
    assert [line["step"] for line in lines(folder / "out")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"group_size": 2}, "group_size = 4, not 2"), ({"seed": 9}, "seed = 0, not 9"), ({"data": "other.jsonl"}, "data")],
)
def test_other_run_can_not_go_on_from_a_checkpoint(
    whole: tuple[Path, Result], folder: Path, model: Path, options: dict[str, Any], message: str
) -> None:
    (folder / "other.jsonl").write_text('{"q": "other"}\n')
    with pytest.raises(ConfigError, match=message):
        train(config(model, out=None, resume=str(whole[0] / "out"), **options))


def test_agents_not_chosen_keep_their_own_endpoint(folder: Path, model: Path) -> None:
    with pytest.raises(LightningError, match="Connection error"):
        train(config(model, target="tiny_agent:two", max_attempts=1))


def test_several_agents_earn_their_own_rewards(folder: Path, model: Path) -> None:
    result = train(config(model, target="tiny_agent:two", agents=None, steps=1, val="tasks.jsonl"))
    assert result.before is not None
    assert set(result.before.by_agent) == {"writer", "rewriter"}
    assert {"reward/writer", "reward/rewriter"} <= set(lines(folder / "out")[0])
    assert lines(folder / "out")[0]["calls_trained"] == 16


def test_run_that_came_to_nothing_leaves_its_folder_to_the_next(
    whole: tuple[Path, Result], folder: Path, model: Path
) -> None:
    for _ in range(2):
        with pytest.raises(LightningError, match="no model call"):
            train(config(model, target="plain_agent:silent"))
    with pytest.raises(ConfigError, match="is not empty"):
        train(config(model, out=str(whole[0] / "out")))


COMMAND = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = {"model": "gpt-9", "messages": [{"role": "user", "content": task["q"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"},
)
text = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"] or ""
print(json.dumps({"reward": sum(c.isascii() and c.isalpha() for c in text) / 5}))
"""


def test_command_that_knows_nothing_of_us_is_trained(folder: Path, model: Path) -> None:
    (folder / "foreign.py").write_text(COMMAND)
    options = {"target": None, "command": f"{sys.executable} foreign.py", "agents": None}
    result = train(config(model, **options, steps=9, until=-1.0, max_tokens=5, temperature=0.7))
    assert result.steps == 2  # two steps running have reached the goal
    assert [line["calls_trained"] for line in lines(folder / "out")] == [8, 8]
    store = open_store(str(folder / "out" / "lightning.db"))
    calls = store.calls()
    store.close()
    assert {call.agent for call in calls} == {"agent"}
    assert {call.sampling["temperature"] for call in calls} == {0.7}
    assert all(len(call.choices[0].token_ids or ()) <= 5 for call in calls)


def test_command_in_a_folder_of_its_own_is_trained_by_a_reward_command(folder: Path, model: Path) -> None:
    (folder / "work").mkdir()
    written = COMMAND.replace("print(", "open('answer', 'w').write(text)\nprint(")
    (folder / "work" / "foreign.py").write_text(written)
    count = "print('{\"reward\": %d}' % sum(c.isascii() and c.isalpha() for c in open('answer').read()))"
    (folder / "work" / "count.py").write_text(count)
    work = {"workdir": "work", "reward_range": "0,5", "reward_command": f"{sys.executable} count.py", "restore": "*.py"}
    named = {"name_by": "writer=model:gpt", "agents": "writer"}
    options = {"target": None, "command": f"{sys.executable} foreign.py", **work, **named}
    result = train(config(model, **options, steps=1, max_tokens=5, temperature=0.7))
    assert result.steps == 1
    store = open_store(str(folder / "out" / "lightning.db"))
    calls, spans, rewards = store.calls(), store.spans(), store.rewards()
    store.close()
    assert {call.agent for call in calls} == {"writer"}
    assert len({reward.value for reward in rewards}) > 1
    assert {span.operation for span in spans} == {"workdir", "reward"}
    assert not (folder / "work" / "answer").exists()


def test_dry_run_says_what_a_run_would_take_and_leaves_nothing(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_trainer.run import embedded
    from lightning_trainer.run.train import describe

    monkeypatch.setattr(embedded, "TRIAL_S", math.inf)
    before = sorted(path.name for path in folder.iterdir())
    described = describe(config(model, steps=3, val="tasks.jsonl"))
    facts = described.facts
    writer = {"calls": 8, "reward": None, "constant": False, "trained": True, "unrewarded": False}  # one reward for all
    assert facts["agents"] == {"writer": writer}
    assert (facts["tasks_tried"], facts["samples"]) == (2, 4)
    assert facts["seconds_step"] > 0
    assert facts["disk_bytes"] >= facts["checkpoint_bytes"] > 0
    assert set(facts["gpu"]) == {"1.5B", "7B", "32B"}
    assert facts["verdict"] in described.text
    assert [name for name in sorted(path.name for path in folder.iterdir()) if name != "__pycache__"] == before

    monkeypatch.setattr(embedded, "TRIAL_S", 0.0)  # the first task is tried in any case, and the step is extrapolated
    brief = describe(config(model, steps=3, val="tasks.jsonl")).facts
    assert (brief["tasks_tried"], brief["rollouts_tried"], brief["agents"]["writer"]["calls"]) == (1, 4, 4)
    assert brief["tokens_generated_step"] > 4


def test_a_trial_goes_on_only_while_its_limit_lets_more_tasks_fit() -> None:
    from lightning_trainer.run.probe import more_tasks

    assert more_tasks(0, 8, 0.0, 10.0) == 1
    assert more_tasks(1, 7, 2.0, 10.0) == 4
    assert more_tasks(1, 7, 0.0, 10.0) == 7
    assert more_tasks(1, 7, 480.0, 10.0) == 0
    assert more_tasks(8, 0, 1.0, 10.0) == 0
    assert more_tasks(0, 8, 0.0, math.inf) == 8


def test_a_dry_run_of_a_run_that_goes_on_tries_what_it_has_learned_and_counts_the_rest(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_trainer.report.forecast import Probe
    from lightning_trainer.run import embedded
    from lightning_trainer.run.data import batch_at, load_tasks
    from lightning_trainer.run.state import State, identity_of, save

    tried = []

    def probe(
        _config: TrainConfig, _tasks: Any, places: list[int], make: Any, *_: Any, update: bool, name: str, **__: Any
    ) -> Probe:
        assert update
        tried.append((places, name, make(_config).loaded))
        return Probe(tried=[], rollouts=1, rollout_seconds=1.0, **tokens)

    tokens: dict[str, Any] = dict.fromkeys(("tokens_prompt", "tokens_generated", "tokens_in_rows"), 0)
    monkeypatch.setattr(embedded, "probe", probe)
    asked = config(model, steps=5)
    save(
        folder / "out",
        State(step=3, identity=identity_of(asked, load_tasks(Path("tasks.jsonl")))),
        lambda _: None,
        keep=1,
    )

    class Loaded(SimpleNamespace):
        loaded: Path | None = None

        def load(self, checkpoint: Path) -> None:
            self.loaded = checkpoint

    backend = embedded.EmbeddedBackend(lambda _: Loaded(), lambda _: None)  # type: ignore[arg-type, return-value]
    afresh = backend.describe(asked, Silent())
    rest = backend.describe(asked.model_copy(update={"resume": folder / "out"}), Silent())
    assert (afresh.facts["steps"], rest.facts["steps"]) == (5, 2)
    assert tried == [
        (batch_at(0, 5, 2, 0), "t0", None),  # the name of a step's batch, from which seeds follow
        (batch_at(3, 5, 2, 0), "t3", (folder / "out" / "checkpoints" / "step-000003").resolve()),
    ]


def test_tasks_tells_which_teach_and_keeps_them(folder: Path, model: Path) -> None:
    from click.testing import CliRunner

    from lightning_trainer.cli import cli

    asked = [
        "tasks",
        "tiny_agent:run",
        "--data",
        "tasks.jsonl",
        "--model",
        str(model),
        "--samples",
        "3",
        "--first",
        "2",
    ]
    done = CliRunner().invoke(cli, [*asked, "--workers", "1", "--keep", "kept.jsonl", "--json"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["place"], len(row["rewards"])) for row in rows] == [(0, 3), (1, 3)]
    kept = [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]
    assert kept == [row["task"] for row in rows if row["teaches"]]
    assert "2 of 2 tried tasks have a signal" in done.stderr
    assert not list(folder.glob(".kept*"))


def test_a_task_teaches_where_an_agent_to_be_trained_earns_differently(folder: Path, model: Path) -> None:
    from click.testing import CliRunner

    from lightning_trainer.cli import cli

    asked = ["tasks", "tiny_agent:in_turns", "--data", "tasks.jsonl", "--model", str(model), "--samples", "4"]
    done = CliRunner().invoke(cli, [*asked, "--first", "2", "--workers", "1", "--agents", "writer", "--json"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows[0]["rewards"] == [0.5] * 4  # of both agents together; the writer's are 0 and 1
    assert sorted(rows[1]["rewards"]) == [0.5, 0.5, 1.0, 1.0]  # the checker's doing
    assert [row["teaches"] for row in rows] == [True, False]
    assert "1 of 2 tried tasks has a signal" in done.stderr


@pytest.mark.parametrize(
    ("data", "keep", "told"),
    [
        ("tasks.jsonl", "tasks.jsonl", "is a file of --data"),
        ("tas*.jsonl", "tasks.jsonl", "is a file of --data"),
        ("tasks.jsonl", "kept.parquet", "ends with .jsonl"),
        ("tasks.jsonl", "tasks.jsonl/kept.jsonl", "can't be written"),
    ],
)
def test_tasks_that_can_not_be_kept_are_not_tried(folder: Path, model: Path, data: str, keep: str, told: str) -> None:
    from click.testing import CliRunner

    from lightning_trainer.cli import cli

    before = (folder / "tasks.jsonl").read_text()
    asked = ["tasks", "tiny_agent:run", "--data", data, "--model", str(model), "--first", "1", "--keep", keep]
    done = CliRunner().invoke(cli, asked)
    assert done.exit_code == 2
    assert told in done.output
    assert "trying" not in done.output
    assert (folder / "tasks.jsonl").read_text() == before
