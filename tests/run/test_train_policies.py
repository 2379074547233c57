"""Whole runs with several policies: who is answered by which, what is trained, saved, gone on from and served."""

# ruff: noqa: F811 - a fixture is imported

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lightning_spans.errors import UnknownAgentError
from lightning_spans.store import open_store

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from lightning_trainer import train
from lightning_trainer.report.alarms import Alarm
from lightning_trainer.report.progress import Silent
from lightning_trainer.run.state import read_state
from lightning_trainer.run.train import describe
from support.models.tiny import make_tiny_model
from support.training.policies import calls, config, digest, folder, lines  # noqa: F401 - a fixture among them


def test_each_agent_is_trained_on_its_own_adapter_and_the_checker_stays(tiny_model: Path, folder: Path) -> None:
    before = digest(tiny_model)
    result = train(config(tiny_model))
    answered = {(call.agent, call.policy) for call in calls(folder / "out")}
    assert answered == {("writer", "writer"), ("rewriter", "rewriter"), ("checker", "base")}
    last = lines(folder / "out")[-1]
    assert (last["policy_version/writer"], last["policy_version/rewriter"]) == (2, 2)
    assert last["calls_dropped/agent_not_selected"] == 6
    assert {"loss/writer", "loss/rewriter", "reward/writer", "reward/rewriter"} <= last.keys()
    watched = {"entropy/writer", "response_tokens/checker", "groups_without_signal", "staleness", "reward_source/run"}
    assert watched | {"tokens_generated", "rollout_seconds", "adapt_seconds", "update_seconds"} <= last.keys()
    assert (last["staleness"], last["calls_per_rollout"]) == (0.0, 3.0)
    assert last["policy_of"] == {"writer": "writer", "rewriter": "rewriter"}
    for what in ("token", "gradient"):
        assert sum(last[f"{what}_share/{name}"] for name in ("writer", "rewriter")) == pytest.approx(1.0)
    assert result.checkpoint is not None
    for name in ("writer", "rewriter"):
        assert (result.checkpoint / name / "adapter_model.safetensors").is_file()
    assert not (result.checkpoint / "base").exists()
    assert digest(tiny_model) == before


def test_run_with_policies_goes_on_exactly_where_it_stopped(tiny_model: Path, folder: Path) -> None:
    train(config(tiny_model, steps=3, save_every=1, keep=5, out="whole"))
    train(config(tiny_model, steps=2, save_every=1, keep=5, out="halves"))
    train(config(tiny_model, steps=3, save_every=1, keep=5, out=None, resume="halves"))
    for name in ("writer", "rewriter"):
        whole, halves = (digest(folder / out / "checkpoint" / name) for out in ("whole", "halves"))
        assert whole.keys() == halves.keys()
    names = ("step", "reward/writer", "reward/rewriter", "policy_version/writer", "tokens")
    assert [[line[n] for n in names] for line in lines(folder / "whole")] == [
        [line[n] for n in names] for line in lines(folder / "halves")
    ]


def test_agent_without_a_policy_keeps_its_own_endpoint(tiny_model: Path, folder: Path) -> None:
    train(config(tiny_model, target="policy_agent:alone", policies="writer=lora", steps=1))
    assert {(call.agent, call.policy) for call in calls(folder / "out")} == {("writer", "writer")}


def test_agents_share_an_adapter_beside_one_of_another(tiny_model: Path, folder: Path) -> None:
    train(config(tiny_model, policies="writer=lora:team,rewriter=lora:team,checker=lora", steps=1))
    assert {(call.agent, call.policy) for call in calls(folder / "out")} == {
        ("writer", "team"),
        ("rewriter", "team"),
        ("checker", "checker"),
    }
    assert lines(folder / "out")[-1]["policy_version/team"] == 1


class Noting(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_agent_that_does_not_speak_yet_is_warned_of_and_its_adapter_stays(tiny_model: Path, folder: Path) -> None:
    progress = Noting()
    policies = "writer=lora,editor=lora,rewriter=base,checker=base"
    result = train(config(tiny_model, policies=policies, steps=2), progress)
    warned = [note for note in progress.notes if note.startswith("WARNING: editor not seen in ")]
    assert ["in 1 step," in warned[0], "in 2 steps," in warned[1]] == [True, True]
    assert all("Agents seen: checker, rewriter, writer." in note for note in warned)
    assert result.steps == 2
    assert "policy_version/editor" in lines(folder / "out")[-1]
    assert lines(folder / "out")[-1]["policy_version/editor"] == 0


def test_selected_agent_that_no_reward_names_is_named_in_a_dry_run_and_once_in_training(
    tiny_model: Path, folder: Path
) -> None:
    asked = config(tiny_model, policies="writer=lora:team,rewriter=lora:team,checker=lora:team")
    described = describe(asked)
    assert "checker: 6 calls, would not be trained: no reward. Give it one" in described.text
    assert [described.facts["agents"][name]["trained"] for name in ("checker", "writer")] == [False, True]
    train(asked, progress := Noting())
    [warning] = [note for note in progress.notes if note.startswith("WARNING: no reward")]
    why = "so nothing is learned there: the rewards name only rewriter, writer"
    assert warning == f"WARNING: no reward for checker, {why}. Reward checker too."


SOMETIMES = """
from pathlib import Path
from policy_agent import letters, say

async def run(task):
    draft = await say("checker", task["q"])
    return 0.5 if Path("rest").exists() else letters(await say("writer", draft))
"""


class RestInSecondStep(Noting):
    def step(self, step: int, metrics: Any) -> None:
        Path("rest").touch() if step == 0 else Path("rest").unlink(missing_ok=True)


def test_a_step_without_a_usable_call_teaches_nothing_and_the_run_continues(tiny_model: Path, folder: Path) -> None:
    (folder / "sometimes.py").write_text(SOMETIMES)
    options = {"target": "sometimes:run", "policies": "writer=lora,checker=base", "entropy_coef": 0.01}
    progress = RestInSecondStep()
    train(config(tiny_model, steps=3, **options), progress=progress)
    assert [line["calls_trained"] for line in lines(folder / "out")] == [6.0, 0.0, 6.0]
    said = [note for note in progress.notes if "has no signal" in note]
    assert said == ["step 2 has no signal: none of its calls can be used for training"]


def test_misspelt_agent_and_a_selection_that_nobody_meets_are_refused_at_once(tiny_model: Path, folder: Path) -> None:
    with pytest.raises(UnknownAgentError, match=r"'wirter' was never seen, but 'writer' was"):
        train(config(tiny_model, policies="wirter=lora,rewriter=lora,writer=base,checker=base", steps=1))
    with pytest.raises(UnknownAgentError, match=r"'editor' was never seen. Agents seen: checker, rewriter, writer"):
        train(config(tiny_model, policies="editor=lora,rewriter=base,writer=base,checker=base", steps=1, out="two"))


def test_serve_answers_for_every_adapter_by_name(tiny_model: Path, folder: Path) -> None:
    train(config(tiny_model, steps=1))
    command = [sys.executable, "-m", "lightning_trainer.cli", "serve", "out/checkpoint"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = json.loads(process.stdout.readline())
            key = Path(ready["key_file"]).read_text().strip()
            listed = httpx.get(f"{ready['url']}/v1/models", headers={"authorization": f"Bearer {key}"}).json()
            assert ready["models"] == [model["id"] for model in listed["data"]] == ["base", "writer", "rewriter"]
            with openai.OpenAI(base_url=f"{ready['url']}/v1", api_key=key) as client:
                for name in ready["models"]:
                    reply = client.chat.completions.create(
                        model=name, max_tokens=3, messages=[{"role": "user", "content": "hello"}]
                    )
                    assert reply.model == name
                with pytest.raises(openai.NotFoundError, match="Models: base, writer, rewriter"):
                    client.chat.completions.create(model="editor", messages=[{"role": "user", "content": "hello"}])
        finally:
            process.terminate()


class Watching(Silent):
    def __init__(self) -> None:
        self.seen: set[str] = set()

    def stopping(self) -> None:
        pass

    def alarms(self, texts: Sequence[str]) -> None:
        self.seen |= set(texts)


def test_alarms_reach_the_screen_the_log_and_the_result(
    tiny_model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarm = Alarm("made_up", 1, "Look at this.")
    monkeypatch.setattr("lightning_trainer.report.metrics.active_alarms", lambda history: [alarm] if history else [])
    progress = Watching()
    result = train(config(tiny_model, steps=1), progress)
    assert progress.seen == {"Look at this."}
    assert result.alarms == (alarm,)
    assert '"kind": "alarm"' in (folder / "out" / "metrics.jsonl").read_text()


def test_a_curriculum_goes_on_exactly_where_it_stopped(tiny_model: Path, folder: Path) -> None:
    def run(**options: object) -> list[object]:
        train(config(tiny_model, save_every=1, keep=5, task_order="curriculum", **options))
        out = folder / str(options.get("out") or options.get("resume"))
        store = open_store(str(out / "lightning.db"))
        try:
            tasks = {each.rollout_id.rpartition(":")[2]: each.task for each in store.rollouts()}
        finally:
            store.close()
        successes = read_state((out / "checkpoint").resolve()).successes
        return [tasks, {policy: sorted(known) for policy, known in successes.items()}]

    whole = run(steps=4, out="whole")  # two tasks of four in each: the second half is a second pass
    run(steps=3, out="halves")
    assert run(steps=4, out=None, resume="halves") == whole
    assert set(whole[1]) == {"writer", "rewriter"}  # type: ignore[call-overload]


def test_one_agent_of_a_team_is_distilled_into_a_smaller_model(
    tiny_model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    small = make_tiny_model(
        tmp_path_factory.mktemp("small") / "model", hidden_size=32, intermediate_size=48, num_hidden_layers=1
    )
    policies = "writer=lora,rewriter=base,checker=base"
    learning = {"algorithm": "distil", "teacher": str(tiny_model), "steps": 4, "learning_rate": 3e-2, "batch_size": 4}
    result = train(config(small, policies=policies, **learning))
    steps = [line for line in lines(folder / "out") if line["kind"] == "train"]
    assert {(call.agent, call.policy) for call in calls(folder / "out")} == {
        ("writer", "writer"), ("rewriter", "base"), ("checker", "base"),
    }  # fmt: skip
    teacher, gaps = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), []
    for call in calls(folder / "out"):
        if (call.agent, call.policy_version) == ("writer", 0):
            (choice,) = call.choices
            ids = torch.tensor([*call.prompt_token_ids, *choice.token_ids])
            with torch.no_grad():
                likely = teacher(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            gaps += (torch.tensor(choice.logprobs) - likely[-len(choice.token_ids) :]).tolist()
    assert steps[0]["teacher_kl"] == pytest.approx(sum(gaps) / len(gaps), abs=1e-3)
    assert steps[-1]["teacher_kl"] < steps[0]["teacher_kl"]
    assert result.checkpoint is not None
    assert not (result.checkpoint / "rewriter").exists()
