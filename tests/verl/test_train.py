"""Whole runs on verl and vLLM: real trainer, real engine, real agents, a model that fits a test."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl.protocol")

from transformers import AutoModelForCausalLM

from lightning_spans.store import open_store
from lightning_trainer import TrainConfig, train
from lightning_trainer.backends.verl.options.needs import checkpoint_bytes
from lightning_trainer.lineage.reading import read_lineage
from lightning_trainer.models.shape import lora_parameters, read_shape
from lightning_trainer.report.progress import Silent
from support.training.readings import differs, lines, tokens_seen, weights

pytestmark = pytest.mark.timeout(1800)


def test_a_program_learns_is_saved_and_goes_on_exactly(options):
    """Three steps with a LangGraph program; then the last one again, from the checkpoint before it."""
    options |= {"target": "graph_program:run", "val": options["data"], "val_samples": 2}
    whole = train(TrainConfig(**options))
    steps = lines(whole.folder)
    assert len(steps) == whole.steps == 3
    assert all(step["logprob_correlation"] > 0.9999 and step["logprob_gap"] < 1e-3 for step in steps)
    assert all(step["grad_norm"] > 0 and step["rows"] > 0 and step["failed"] == 0 for step in steps)
    assert steps[0]["rows"] > steps[0]["rollouts"], "several rows for a rollout: two agents that do not share a prompt"
    assert whole.before is not None
    assert whole.after is not None
    assert whole.before.rollouts == 12
    assert all(sum(waited_for(step).values()) == pytest.approx(step["seconds"], rel=0.02) for step in steps)
    assert all(waited_for(step)["sampling"] > 0 and waited_for(step)["learner"] > 0 for step in steps)
    assert all(step["tokens_per_second"] > 0 and step["memory_bytes"] > 1e8 for step in steps)
    assert [len(step["calls"]) for step in read_lineage(whole.folder).steps] == [s["calls_trained"] for s in steps]
    for row, seen in tokens_seen(whole.folder):
        assert seen is not None, "each row's tokens are there to look at"
        assert len(seen.gap) == row.mask.sum()
        assert abs(seen.gap).max() < 1e-2
        assert (seen.entropy > 0).all()

    first, last = (whole.folder / "checkpoints" / f"global_step_{step}" for step in (2, 3))
    learned = weights(last)
    assert differs(weights(first), learned) > 1e-5
    shutil.rmtree(last)  # as if the run had been killed in its last step
    (whole.folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    again = train(TrainConfig(**{**options, "out": None, "resume": whole.folder}))
    assert again.folder == whole.folder
    assert again.steps == 3
    redone = lines(whole.folder)
    assert [step["step"] for step in redone] == [0, 1, 2]
    assert redone[2]["reward"] == steps[2]["reward"]
    assert redone[2]["grad_norm"] == pytest.approx(steps[2]["grad_norm"], rel=1e-3)
    assert differs(learned, weights(last)) < 1e-5
    calls = assert_calls_learned_once(whole.folder)
    assert len(calls) == sum(step["calls_trained"] for step in lines(whole.folder))
    assert "attn_implementation" not in json.loads((whole.folder / "checkpoint/config.json").read_text())


def assert_calls_learned_once(folder: Path) -> list[str]:
    """What each step of the newest checkpoint learned from is in the store, and in no other step. Returns the calls."""
    learned = [call for step in read_lineage(folder).steps for call in step["calls"]]
    assert len(learned) == len(set(learned))
    with closing(open_store(f"sqlite:///{folder / 'lightning.db'}")) as store:
        assert set(learned) <= {call.call_id for call in store.calls()}
    return learned


def waited_for(step: dict[str, Any]) -> dict[str, float]:
    names = ("sampling", "program", "learner", "weights", "other")
    return {name: step[f"waited_for/{name}"] for name in names}


class ScriptedJudge(BaseHTTPRequestHandler):
    """Likes the attempt that it is told first best, and gives every third group nonsense."""

    asked = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).asked += 1
        count = body["messages"][-1]["content"].count("<attempt number=")
        scores = [{"attempt": place + 1, "explanation": "", "score": 1 - place / count} for place in range(count)]
        said = "I can't say." if type(self).asked % 3 == 0 else json.dumps({"scores": scores})
        answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.full
def test_a_judge_gives_the_rewards_and_its_failures_are_no_zeros(options):
    server = ThreadingHTTPServer(("127.0.0.1", 0), ScriptedJudge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    judge = {"endpoint": f"http://127.0.0.1:{server.server_port}/v1", "model": "scripted", "retries": 0}
    options |= {"reward": "judge", "judge": judge, "steps": 2, "val": options["data"], "val_samples": 2}
    result = train(TrainConfig(**options))
    server.shutdown()
    steps = lines(result.folder)
    assert len(steps) == 2
    assert all(step["reward_source/judge"] > 0 and step["grad_norm"] > 0 for step in steps)
    assert "reward_source/run" not in steps[0], "what the program returned is no reward"
    assert sum(step["failed"] for step in steps) > 0, "the groups that were given nonsense"
    assert result.after is not None
    assert result.after.reward > 0
    assert (result.folder / "judge.jsonl").read_text().count("\n") > 4, "verdicts are kept where the run is"


@pytest.mark.full
def test_adapters_and_a_critic_learn(options):
    """PPO with a critic, on LoRA, held to the starting policy."""
    result = train(TrainConfig(**{**options, "algorithm": "ppo", "lora_rank": 4, "steps": 2, "kl_coef": 0.01}))
    steps = lines(result.folder)
    assert all(step["logprob_correlation"] > 0.9999 for step in steps)
    assert all(step["verl/critic/vf_loss"] > 0 for step in steps)
    assert steps[1]["grad_norm"] > 0
    assert steps[1]["logprob_gap"] < 1e-5 < steps[1]["verl/actor/reward_kl_penalty"], "vLLM samples with the adapter"
    shape, model = read_shape(options["model"]), Path(options["model"])
    forecast = checkpoint_bytes(shape, adapters=lora_parameters(model, 4), critic=True)
    newest = (result.folder / "checkpoint").resolve().parents[1]
    assert sum(path.stat().st_size for path in newest.rglob("*") if path.is_file()) == pytest.approx(forecast, rel=0.1)
    _, found = AutoModelForCausalLM.from_pretrained(result.folder / "checkpoint", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]


@pytest.mark.full
def test_collecting_while_learning_is_bounded_and_corrected(options):
    """Asynchronous collection, one step stale at most, REINFORCE++, one row for each response."""
    options |= {"algorithm": "reinforce++", "staleness": 1, "loss_aggregation": "sequence-mean", "steps": 4}
    result = train(TrainConfig(**options))
    steps = lines(result.folder)
    assert len(steps) == 4
    assert all(step["verl/training/off_policy/trajectory_staleness/max"] <= 1 for step in steps)
    assert any(step["verl/training/off_policy/trajectory_staleness/max"] == 1 for step in steps)
    assert all("verl/rollout_corr/rollout_is_mean" in step for step in steps)
    assert all(step["logprob_correlation"] > 0.99 for step in steps)
    assert any(seen is not None for _, seen in tokens_seen(result.folder)), "found though learned a step later"
    learned = assert_calls_learned_once(result.folder)
    groups = options["steps"] * options["batch_size"]
    assert len(learned) == groups * options["group_size"] * 2, "whole batches; each attempt calls twice"
    counted = sum(step["calls_trained"] for step in steps)  # with groups collected early, which no step learns from
    assert counted >= len(learned)


class Noting(Silent):
    def __init__(self):
        self.notes = []
        self.standing = []

    def note(self, text):
        self.notes.append(text)

    def stopping(self) -> None:
        pass

    def alarms(self, texts):
        self.standing.append(list(texts))


@pytest.mark.full
def test_groups_without_contrast_raise_an_alarm_and_a_silent_agent_a_warning(options):
    """Every rollout gets the same reward; one of the two agents named never speaks."""
    progress = Noting()
    result = train(TrainConfig(**{**options, "target": "program:praised", "agents": "speaker,listener"}), progress)
    assert [(alarm.name, alarm.step) for alarm in result.alarms] == [("groups_dead", 3)]
    assert "100% of the groups had equal rewards throughout, at a mean of 1.00" in result.alarms[0].text
    assert [line["name"] for line in lines(result.folder, "alarm")] == ["groups_dead"]
    assert [bool(texts) for texts in progress.standing] == [False, False, True]
    for step in lines(result.folder):
        assert (step["groups"], step["groups_without_signal"], step["staleness_max"]) == (2.0, 1.0, 0.0)
        assert (step["reward_source/run"], step["calls_per_rollout/speaker"]) == (1.0, 2.0)
    warned = [note for note in progress.notes if note.startswith("WARNING: listener not seen in ")]
    assert len(warned) == 2
    assert all("Agents seen: speaker." in note for note in warned)
