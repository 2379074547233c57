"""Tasks that no rollout solves: without --with-prompts a run learns nothing, with it the policy solves them alone."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("openai")
pytest.importorskip("gepa")
pytestmark = pytest.mark.torch

from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.script import Reply
from lightning_spans.errors import ConfigError, LightningError, NothingToLearnError
from lightning_spans.store import open_store
from lightning_spans.store.traces import traces_of
from lightning_trainer import train
from lightning_trainer.gateway.engine import tool_format
from lightning_trainer.gateway.prompt.template import ChatFormat
from lightning_trainer.lineage.manifest import MANIFEST
from lightning_trainer.report.progress import Silent
from lightning_trainer.rl.rows import Row
from lightning_trainer.run.state import read_state
from support.models.updates import make_backend, make_row
from support.training.programs import put_programs
from support.training.tiny_runs import config as tiny_config
from support.training.tiny_runs import lines

OWN = "You answer no."
BETTER = "You may say yes."

PROGRAM = f'''
import openai
import lightning_openai
from lightning_spans import agent

lightning_openai.attach(tracer="embedded")
client = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="mine", max_retries=0)

async def say(name, messages):
    with agent(name):
        reply = await client.chat.completions.create(model="gpt-9", max_tokens=2, messages=messages)
    return reply.choices[0].message.content or ""

async def run(task):
    """Only yes is right. The writer is asked twice, in one conversation."""
    messages = [{{"role": "system", "content": "{OWN}"}}, {{"role": "user", "content": task["q"]}}]
    first = await say("writer", messages)
    messages += [{{"role": "assistant", "content": first}}, {{"role": "user", "content": "sure?"}}]
    await say("writer", messages)
    check = {{"role": "system", "content": "You check the answer."}}
    await say("checker", [check, {{"role": "user", "content": first}}])
    return float(first.startswith("y"))
'''

FOREIGN = """
import json
import os
import sys
import urllib.request

body = {"model": "m", "max_tokens": 2, "messages": [
    {"role": "system", "content": "You answer no."}, {"role": "user", "content": json.load(sys.stdin)["q"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
print(json.dumps({"reward": 0.0}))
"""


def reflector(body: dict[str, Any], seen: int) -> Reply:
    asked = body["messages"][-1]["content"]
    return Reply(text=f"```\n{BETTER if OWN in asked else 'Check it well.'}\n```")


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers no under its own prompt, and under the better one yes every other time."""
    learner = make_backend(tiny_model, algorithm="likelihood", learning_rate=3e-3, loss_aggregation="token-mean")
    chat = ChatFormat(learner.engine.tokenizer, tool_format(learner.engine))

    def example(system: str, number: int, answer: str) -> Row:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"word {number}"}]
        prompt = chat.encode(chat.render(messages, ()))
        return make_row([*prompt, *chat.encode(f"{answer}<|im_end|>")], slice(len(prompt), None))

    rows = [example(OWN, n, "n") for n in range(8)]
    rows += [example(BETTER, n, answer) for n in range(4) for answer in "yn"]
    for _ in range(60):
        learner.update(rows)
    folder = tmp_path_factory.mktemp("taught")
    learner.save(folder, resumable=False)
    learner.close()
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    put_programs(tmp_path, ({"q": f"word {n}"} for n in range(4)), team=PROGRAM, foreign=FOREIGN)
    (tmp_path / "val.jsonl").write_text("".join(json.dumps({"q": f"other {n}"}) + "\n" for n in range(8)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def reflecting() -> Iterator[ScriptedServer]:
    with ScriptedServer(reflector) as server:
        yield server


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def config(model: Path, **options: Any) -> Any:
    own = {"target": "team:run", "val": "val.jsonl", "val_samples": 4, "agents": "writer,checker", "batch_size": 4}
    return tiny_config(model, **{**own, "save_every": 1, "keep": 20, "checkpoint": "full", **options})


def test_without_it_nothing_is_learned_and_no_held_out_task_is_solved(folder: Path, model: Path) -> None:
    with pytest.raises(NothingToLearnError, match="rewards of each group were all equal"):
        train(config(model, steps=8))
    assert [line["reward"] for line in lines(folder / "out", "val")] == [0.0]
    assert {line["reward"] for line in lines(folder / "out")} == {0.0}


def test_successes_under_an_instruction_are_learned_without_it(
    folder: Path, model: Path, reflecting: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_trainer.backends.torch import TorchLearner

    learned: list[Row] = []
    update = TorchLearner.update

    def learning(learner: TorchLearner, rows: list[Row]) -> dict[str, float]:
        learned.extend(rows)
        return update(learner, rows)

    monkeypatch.setattr(TorchLearner, "update", learning)
    told, options = Notes(), {"proposals": 2, "visits": 2, "weight": 2.0}
    settings: dict[str, Any] = {"with_prompts": True, "reflector": reflecting.url, "prompt_options": options}
    train(config(model, steps=3, **settings), told)
    stopped = read_state((folder / "out" / "checkpoint").resolve()).kept["with_prompts"]
    result = train(config(model, steps=9, resume="out", out=None, **settings), told)

    # The policy solves held-out tasks without the instruction, which no call of a validation holds.
    assert result.reward_before == 0.0
    assert result.reward_after is not None
    assert result.reward_after > 0.5
    store = open_store(str(folder / "out" / "lightning.db"))
    rollouts, calls = {r.rollout_id: r for r in store.rollouts()}, store.calls()
    traces = {trace.attempt_id: trace for trace in traces_of(store)}
    store.close()
    modes = {rollouts[str(call.rollout_id)].mode for call in calls if BETTER in json.dumps(dict(call.request))}
    assert modes == {"prompts"}

    # The budget: two proposals, one for each agent, and none again after the run was resumed.
    assert len(reflecting.requests) == 2
    assert [line["agent"] for line in lines(folder / "out", "instruction")] == ["checker", "writer"]
    assert stopped["instructions"][0]["agent"] == "checker"
    steps = lines(folder / "out")
    assert [line["dead_groups"] for line in steps[:2]] == [4, 4]
    assert [line["dead_groups_due"] for line in steps[:2]] == [0, 4]
    assert sum(line["instruction_proposals"] for line in steps) == 2
    assert sum(line["instructed_groups_solved"] for line in steps) >= 4
    assert "4 of them solved; 2 proposals" in told.notes[-1]

    # Rows: the tokens of the agent's own prompt, as the gateway made it for the same task and the same conversation.
    own = {
        (rollouts[str(call.rollout_id)].task["q"], len(call.request["messages"])): call.prompt_token_ids
        for call in calls
        if OWN in json.dumps(dict(call.request)) and rollouts[str(call.rollout_id)].mode == "train"
    }
    distilled = [row for row in learned if rollouts[row.rollout_id].mode == "prompts"]
    assert len(distilled) == sum(line.get("distilled_calls", 0) for line in steps) / 2
    learned_from = [json.loads(line) for line in (folder / "out" / MANIFEST).read_text().splitlines()]
    listed = {call for line in learned_from for call in line.get("calls", ())}
    for row in distilled:
        assert (row.agent, row.transitions) == ("writer", 2)
        first, second = (call for call in traces[row.attempt_id].chats if call.path == "writer")
        assert first.call is not None
        assert second.call is not None
        assert {first.call.call_id, second.call.call_id} <= listed
        prompt = own[rollouts[row.rollout_id].task["q"], 2]
        width = len(prompt) - len(first.call.prompt_token_ids)
        assert tuple(row.tokens[: len(prompt)]) == prompt
        whole = [*second.call.prompt_token_ids, *second.call.choices[0].token_ids]
        assert row.tokens.tolist() == [*prompt, *whole[len(first.call.prompt_token_ids) :]]
        assert len(row.tokens) == len(whole) + width
        assert set(row.advantages[row.mask]) == {2.0}


def test_a_program_whose_prompts_cannot_be_replaced_is_refused_by_name(
    folder: Path, model: Path, reflecting: ScriptedServer
) -> None:
    command = {"target": None, "command": f"{sys.executable} foreign.py", "agents": None}
    options = {**command, "val": None, "prompt_options": {"visits": 1}}
    with pytest.raises(LightningError, match=r"no instruction reached agent .* Train this program without"):
        train(config(model, steps=4, with_prompts=True, reflector=reflecting.url, **options))


def test_no_further_rollout_begins_once_the_tokens_are_used(
    folder: Path, model: Path, reflecting: ScriptedServer
) -> None:
    options = {"visits": 1, "tokens": 2000, "proposals": 5}
    with pytest.raises(NothingToLearnError):
        train(config(model, steps=4, with_prompts=True, reflector=reflecting.url, prompt_options=options))
    assert len(reflecting.requests) == 1
    steps = lines(folder / "out")
    assert [line["instructed_groups"] for line in steps] == [4, 0, 0, 0]
    assert [line["instruction_tokens"] > 0 for line in steps] == [True, False, False, False]


def test_each_proposal_is_tried_on_three_tasks_before_the_run_may_end(folder: Path, model: Path) -> None:
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"q": f"word {n}"}) + "\n" for n in range(12)))
    texts = iter(["Say nothing.", f"{OWN} No.", "Check it.", BETTER])  # the checker's, then the writer's
    with ScriptedServer(lambda _body, _seen: Reply(text=f"```\n{next(texts)}\n```")) as server:
        options = {"visits": 1, "tasks": 1, "proposals": 4}
        own = {"val": None, "reflector": server.url}
        train(config(model, steps=12, with_prompts=True, prompt_options=options, **own))
    steps = lines(folder / "out")
    assert [line["instruction_proposals"] for line in steps[:10]] == [1, 0, 0, 1, 0, 0, 1, 0, 0, 1]
    assert any(line["instructed_groups_solved"] for line in steps[9:])


def test_without_another_model_the_policy_itself_proposes(folder: Path, model: Path) -> None:
    own = shutil.copytree(model, folder / "long")
    settings = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 8192}))
    with pytest.raises(NothingToLearnError):
        train(config(own, steps=1, val=None, max_tokens=20, with_prompts=True, prompt_options={"visits": 1}))
    [proposal] = lines(folder / "out", "instruction")
    assert proposal["agent"] == "checker"
    store = open_store(str(folder / "out" / "lightning.db"))
    [call] = [call for call in store.calls() if call.rollout_id is None]
    store.close()
    assert "You check the answer." in call.request["messages"][0]["content"]
    assert (call.policy, call.sampling["max_tokens"]) == ("long", 20)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_options": {"visit": 3}}, r"unknown option 'visit'. Did you mean 'visits'\?"),
        ({"prompt_options": {"weight": 0}}, "prompt_options: weight"),
        ({"algorithm": "ppo"}, "algorithm = ppo computes advantages in the update"),
        ({"reward": "judge"}, "a judge only ranks rollouts"),
        ({"batch_size": 1}, "Set batch_size to 2 or more"),
        ({"reflector": "http://127.0.0.1:9/v1"}, "endpoint http://127.0.0.1:9/v1"),
    ],
)
def test_what_cannot_work_is_refused_before_a_model_is_loaded(folder: Path, options: dict[str, Any], says: str) -> None:
    from lightning_trainer.kits.prompts.dead_groups.callback import DeadGroupsKind

    with pytest.raises(ConfigError, match=says):
        DeadGroupsKind().check(config(folder, with_prompts=True, **options))


def test_its_options_need_it_and_verl_refuses_it(folder: Path) -> None:
    from lightning_trainer.backends.verl.options.overrides import check

    with pytest.raises(ConfigError, match="reflector and prompt_options are options of with_prompts"):
        config(folder, prompt_options={"visits": 3})
    with pytest.raises(ConfigError, match="with_prompts is for backend = torch or tinker"):
        check(config(folder, with_prompts=True, backend="verl", backend_options={}, checkpoint="newest"))


def test_the_gradient_of_a_distilled_row_is_that_of_supervised_learning(tiny_model: Path) -> None:
    """A row with its own log-probabilities and an advantage of 2 moves the weights as 2 x likelihood does."""
    from lightning_trainer.kits.prompts.dead_groups.distil import _with_logprobs
    from support.models.updates import gradients

    row = make_row([*range(3, 30)], slice(20, None), advantage=2.0)
    learner = make_backend(tiny_model)
    [own] = _with_logprobs([row], learner)
    learner.close()
    policy, _ = gradients(tiny_model, [own], algorithm="grpo")
    likelihood, _ = gradients(tiny_model, [row], algorithm="likelihood")
    for name, gradient in likelihood.items():
        np.testing.assert_allclose(policy[name].numpy(), gradient.numpy(), atol=1e-5)
