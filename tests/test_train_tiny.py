"""The whole loop on a tiny random model: a plain program without an endpoint is trained, stopped, resumed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_spans.errors import ConfigError, LightningError
from lightning_spans.store import Rollout, open_store
from lightning_spans.trace import traces_of

pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch


from lightning_trainer import Result, TrainConfig, train
from lightning_trainer.interrupts import Interrupted
from lightning_trainer.progress import Silent

AGENT = '''
import openai
import lightning_openai
from lightning_spans import agent

lightning_openai.attach(tracer="embedded")
client = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="mine", max_retries=0)

async def say(name, text):
    with agent(name):
        reply = await client.chat.completions.create(
            model="gpt-9", max_tokens=5, messages=[{"role": "user", "content": text}]
        )
    return reply.choices[0].message.content or ""

async def run(task):
    """Letters are good."""
    text = await say("writer", task["q"])
    return sum(letter.isascii() and letter.isalpha() for letter in text) / 5

async def two(task):
    draft = await say("writer", task["q"])
    final = await say("rewriter", task["q"] + draft)
    return {"writer": sum(c.isascii() and c.isalpha() for c in draft) / 5, "rewriter": float(len(final))}
'''
PLAIN = """
def silent(task):
    return 1.0
"""


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Path:
    return tiny_model


def write_program(folder: Path) -> None:
    (folder / "tiny_agent.py").write_text(AGENT)
    (folder / "plain_agent.py").write_text(PLAIN)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"q": f"say {n}"}) + "\n" for n in range(5)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_program(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config(model: Path, **options: Any) -> TrainConfig:
    chosen: dict[str, Any] = {
        "target": "tiny_agent:run",
        "data": "tasks.jsonl",
        "model": str(model),
        "agents": "writer",
        "out": "out",
        "steps": 2,
        "batch_size": 2,
        "group_size": 4,
        "learning_rate": 3e-3,
        "workers": 1,
        "timeout_s": 60,
        "backend_options": {"threads": 1},
        **options,
    }
    return TrainConfig(**chosen)


def lines(out: Path, kind: str = "train") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


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


def rollouts_of(out: Path) -> list[Rollout]:
    store = open_store(str(out / "lightning.db"))
    try:
        return store.rollouts()
    finally:
        store.close()


def tasks_of(out: Path) -> dict[str, Any]:
    return {r.rollout_id.rpartition(":")[2]: r.task for r in rollouts_of(out) if r.mode == "train"}


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """Three steps with validation, in one go."""
    folder = tmp_path_factory.mktemp("whole")
    write_program(folder)
    before = Path.cwd()
    os.chdir(folder)
    try:
        result = train(config(model, steps=3, val="tasks.jsonl", val_samples=2, val_every=2, save_every=1, keep=3))
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


class StopAt(Silent):
    """Presses Ctrl-C once a step is done."""

    def __init__(self, step: int) -> None:
        self._stop_at = step

    def step(self, step: int, metrics: Any) -> None:
        if step == self._stop_at:
            signal.raise_signal(signal.SIGINT)


def test_ctrl_c_ends_the_step_and_saves(folder: Path, model: Path) -> None:
    before = signal.getsignal(signal.SIGINT)  # a process that was started in the background ignores it
    with pytest.raises(Interrupted, match=r"stopped after 1 step\. Go on with: lightning-rl train --resume out"):
        train(config(model), StopAt(0))
    assert (folder / "out" / "checkpoint").resolve().name == "step-000001"
    assert signal.getsignal(signal.SIGINT) is before
    assert all(r.status in {"succeeded", "cancelled"} for r in rollouts_of(folder / "out"))


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
print(sum(c.isascii() and c.isalpha() for c in text) / 5)
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
