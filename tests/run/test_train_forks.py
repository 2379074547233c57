"""A team with a free rider is trained by forks of its own rollouts, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_spans.errors import AgentFailedError, ConfigError
from lightning_spans.schema.replays import FORKED, REPLAYED
from lightning_spans.store import open_store
from lightning_spans.store.traces import traces_of

pytest.importorskip("torch")
pytest.importorskip("openai")
pytestmark = pytest.mark.torch

from lightning_trainer import TrainConfig, train
from lightning_trainer.rl.account import UntrainedReason
from lightning_trainer.run.recomputed import recompute_batch
from support.training.programs import SAY, folder_with

TEAM = (
    SAY
    + '''
import itertools

runs = itertools.count()

async def team(task):
    """One reward for all; the rider's words are in nobody's prompt and in no reward."""
    plan = await say("planner", "plan " + task["q"], 3)
    await say("rider", "ride " + task["q"], 3)
    text = await say("writer", "write " + plan, 3)
    return sum(c.isascii() and c.isalpha() for c in plan + text) / 6

async def lonely(task):
    return float(len(await say("planner", "plan " + task["q"], 3)))

async def clock(task):
    await say("planner", "plan " + task["q"] + str(next(runs)), 3)
    return float(len(await say("writer", "write " + task["q"], 3)))
'''
)
folder = folder_with(5, team_program=TEAM)


def config(model: Path, **options: Any) -> TrainConfig:
    chosen: dict[str, Any] = {
        "target": "team_program:team",
        "data": "tasks.jsonl",
        "model": str(model),
        "credit": "counterfactual",
        "out": "out",
        "steps": 1,
        "batch_size": 3,
        "group_size": 1,
        "forks": 18,
        "alternatives": 2,
        "workers": 1,
        "timeout_s": 60,
        "backend_options": {"threads": 1},
        **options,
    }
    return TrainConfig(**chosen)


BY_COALITIONS: dict[str, Any] = {
    "credit": "identical",
    "orders": 2,
    "policies": "planner=lora,rider=lora,writer=lora",
    "alternatives": 3,
    "forks": None,
}


def line(folder: Path) -> dict[str, Any]:
    lines = [json.loads(text) for text in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return next(found for found in lines if found["kind"] == "train")


def test_what_a_rule_gave_forks_is_no_reward_of_the_rollouts(tiny_model: Path, folder: Path) -> None:
    always = {"answer_format": {"weight": 1, "pattern": "(?s).*", "agents": ["planner"]}}
    train(config(tiny_model, rewards=always, forks=6))
    assert line(folder)["reward_source/answer_format"] == 1.0


def test_a_free_rider_learns_nothing_and_its_team_does(tiny_model: Path, folder: Path) -> None:
    train(config(tiny_model))
    metrics = line(folder)
    assert metrics["rollouts"] == 3  # forks are no sample of what the policy earns
    assert (metrics["forks"], metrics["fork_points"]) == (18, 9)
    assert metrics["forks_ended"] == metrics["forks_failed"] == metrics["forks_refused"] == 0
    store = open_store(str(folder / "out" / "lightning.db"))
    try:
        batch, outcomes = recompute_batch(config(tiny_model), store, store.rollouts())
        traces = traces_of(store, attempt_ids=[o.attempt.attempt_id for o in outcomes if o.rollout.replay])
        calls = [node.call for trace in traces for node in trace.chats if node.call is not None]
    finally:
        store.close()
    assert sum(REPLAYED in call.sampling for call in calls) == metrics["fork_calls_replayed"] > 18
    assert sum(FORKED in call.sampling for call in calls) == 18
    compared = [call for call in batch.calls if call.left_out is None]
    assert {call.transition.agent for call in compared} == {"planner", "rider", "writer"}
    assert all(call.advantage == 0.0 for call in compared if call.transition.agent == "rider")
    for agent in ("planner", "writer"):
        assert any(call.advantage != 0.0 for call in compared if call.transition.agent == agent)
    assert all(FORKED in call.transition.sampling or "-" in call.transition.rollout_id for call in compared)
    assert metrics["calls_trained"] == len(compared) == 27
    assert set(batch.account.dropped) <= {UntrainedReason.REPLAYED, UntrainedReason.NO_ALTERNATIVE}


def test_what_agents_add_is_measured_and_the_update_is_that_without_it(tiny_model: Path, folder: Path) -> None:
    options = {**BY_COALITIONS, "batch_size": 2, "group_size": 2, "steps": 2, "learning_rate": 1e-2}
    train(config(tiny_model, **options))
    metrics = line(folder)
    # Three agents, one order and its reverse: nobody, one and one, two and two.
    assert (metrics["rollouts"], metrics["forks"], metrics["fork_points"]) == (4, 20, 4)
    assert metrics["forks_ended"] == metrics["forks_failed"] == metrics["forks_refused"] == 0
    assert metrics["shapley/rider"] == metrics["shapley_error/rider"] == 0.0
    assert {"shapley/planner", "shapley/writer", "shapley_error/planner"} <= metrics.keys()
    assert metrics["calls_trained"] == 12  # the rollouts' own, and none of the coalitions'
    store = open_store(str(folder / "out" / "lightning.db"))
    try:
        forks = [rollout for rollout in store.rollouts() if rollout.replay is not None]
        batch, outcomes = recompute_batch(config(tiny_model, **options), store, store.rollouts())
        traces = {t.attempt_id: t for t in traces_of(store, rollout_ids=[rollout.rollout_id for rollout in forks])}
    finally:
        store.close()
    given = drawn = 0
    for outcome in outcomes:
        replay = outcome.rollout.replay
        for node in () if replay is None else traces[outcome.attempts[-1].attempt_id].chats:
            assert node.call is not None
            assert (node.call.policy == "base") == (node.span.agent in replay.fresh)
            assert node.call.policy == "base" or REPLAYED in node.call.sampling or node.span.agent == "writer"
            given, drawn = given + (REPLAYED in node.call.sampling), drawn + (REPLAYED not in node.call.sampling)
    lines = [json.loads(text) for text in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    both = [found for found in lines if found["kind"] == "train"]
    assert (sum(found["fork_calls_replayed"] for found in both), sum(f["fork_calls_drawn"] for f in both)) == (
        given,
        drawn,
    )
    assert sum(found["fork_tokens_generated"] for found in both) <= 3 * drawn
    assert all(found["fork_tokens_saved"] > found["fork_tokens_replayed"] > 0 for found in both)
    assert not any("coalition" in call.transition.rollout_id for call in batch.calls if call.left_out is None)
    norms = [found["grad_norm"] for found in both]
    train(config(tiny_model, **{**options, "orders": 0, "out": "plain"}))
    lines = [json.loads(text) for text in (folder / "plain" / "metrics.jsonl").read_text().splitlines()]
    plain = [found["grad_norm"] for found in lines if found["kind"] == "train"]
    assert plain == pytest.approx(norms, rel=1e-3), "nothing is trained on coalitions"


def test_a_budget_takes_whole_rollouts(tiny_model: Path, folder: Path) -> None:
    train(config(tiny_model, **{**BY_COALITIONS, "batch_size": 2, "group_size": 2, "forks": 19}))
    metrics = line(folder)
    assert (metrics["forks"], metrics["fork_points"]) == (15, 3)


def test_a_team_of_one_can_not_share(tiny_model: Path, folder: Path) -> None:
    own = {"target": "team_program:lonely", "agents": "planner,writer", "policies": "planner=lora,writer=lora"}
    with pytest.raises(
        AgentFailedError, match="only planner of the agents to be trained made a call: there is no team"
    ):
        train(config(tiny_model, **{**BY_COALITIONS, "group_size": 2, **own}))


def test_a_program_that_never_comes_back_to_its_call_is_refused_with_what_differs(
    tiny_model: Path, folder: Path
) -> None:
    with pytest.raises(AgentFailedError, match=r"not one of 6 forks could be brought back to its call") as caught:
        train(config(tiny_model, target="team_program:clock", forks=6))
    assert "`planner`'s first call" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"credit": "identical", "group_size": 2},
            "forks, alternatives, fork_at and fork_tools need credit = counterfactual",
        ),
        ({"target": None, "command": "node agent.js"}, "a command of another language would run its tools twice"),
        ({"reward": "judge"}, "a judge compares rollouts with others of their group"),
        ({"algorithm": "ppo"}, "algorithm = ppo can't compare a call with its alternatives alone"),
        ({"algorithm": "dapo"}, "Set resample = 0"),
        ({"normalise_std": True}, "amplifies noise"),
        ({"forks": 1}, "no call could be sampled that often"),
        ({"credit": "shapley"}, "its update can point away from the gradient. Set orders = 2"),
        ({"algorithm": "tree-grpo"}, "tree-grpo is removed: it learned no faster than groups. Use grpo"),
        ({"orders": 4, "policies": "a=lora,b=lora"}, "both would take the forks of a step"),
        ({**BY_COALITIONS, "group_size": 2, "policies": {}}, "Give policies, such as --policy writer=lora"),
        ({**BY_COALITIONS, "group_size": 2, "policies": "writer=lora"}, "writer is the only trained agent"),
        ({**BY_COALITIONS, "group_size": 2, "policies": "*=lora:all"}, "Limit the runs per step with forks"),
        ({**BY_COALITIONS, "group_size": 2, "orders": 3}, "orders = 3 is odd"),
        ({**BY_COALITIONS, "group_size": 2, "forks": 4}, "fewer than the 5 runs that one rollout takes"),
        ({**BY_COALITIONS, "group_size": 2, "alternatives": 2}, "Leave alternatives and fork_at out"),
    ],
)
def test_what_can_not_be_together_with_forks_is_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, **options)
    assert says in str(caught.value)


def test_credit_by_forks_sets_its_own_defaults(tmp_path: Path) -> None:
    made = config(tmp_path, group_size=None, forks=None, alternatives=3)
    assert (made.normalise_std, made.group_size, made.fork_count) == (False, 2, 18)
    made = config(tmp_path, **{**BY_COALITIONS, "group_size": 2})
    assert (made.normalise_std, made.fork_count) == (True, 3 * 2 * 5)
    assert config(tmp_path, **{**BY_COALITIONS, "group_size": 2, "orders": 8}).fork_count == 3 * 2 * 7
