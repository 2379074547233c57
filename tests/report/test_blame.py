"""Blame: credit by agent and turn, and a report that adds up, from a run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import CHAT, EXECUTE_TOOL, Span
from lightning_spans.store import open_store
from lightning_trainer.cli import cli
from lightning_trainer.config.files import to_json
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.report.credit_report import CreditReport, TurnCredit, credit_report, turns_of
from support.rl.world import World


def judged(
    world: World, credit: str, chosen: Sequence[str] | None = None, **options: Any
) -> tuple[list[TurnCredit], CreditReport]:
    batch = world.batch(credit=credit, normalise_std=False, **options)
    return turns_of(batch.calls, chosen), credit_report(batch, world.outcomes, credit)


def team() -> World:
    world = World()
    world.rollout("a", [("worker", "w"), ("rider", "r"), ("worker", "w")], {"worker": 1.0, "rider": 0.0})
    world.rollout("a", [("worker", "w"), ("rider", "r")], {"worker": 0.0, "rider": 0.0, "ghost": 2.0})
    world.rollout("a", [("worker", "w"), (None, "x")], {"worker": 0.5})
    world.rollout("b", [("worker", "w")], None)
    return world


def test_credit_is_gathered_by_agent_and_turn() -> None:
    turns, _ = judged(team(), "per-agent", ["worker"])
    assert [(p.agent, p.turn, p.calls, p.trained) for p in turns] == [
        ("rider", 1, 2, False), ("worker", 0, 3, True), ("worker", 2, 1, True), (None, 1, 1, False),
    ]  # fmt: skip
    first = turns[1]
    assert (first.credit, first.credit_sum, first.credited) == (0.5, 1.5, 3)
    assert (first.compared, first.better, first.worse) == (3, pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert first.contrast == pytest.approx(1 / 3)
    assert (turns[-1].credit, turns[-1].contrast) == (None, None)


def test_the_report_says_what_was_given_and_what_became_of_it() -> None:
    _, report = judged(team(), "per-agent")
    assert (report.rollouts, report.failed, report.attempts, report.calls) == (4, 1, 3, 8)
    assert report.given == {"run": {"worker": 1.5, "rider": 0.0, "ghost": 2.0}}
    assert report.by_agent == {"worker": 1.5, "rider": 0.0}
    assert report.unclaimed == {"ghost": 1}
    assert report.left_out == {"agent not selected": 1}
    text = "\n".join(report.lines())
    assert "1 rewards for ghost reached no agent" in text
    assert "+1.500 for worker" in text


def test_the_report_says_whether_credit_was_conserved() -> None:
    world = World()
    for value in (1.0, 0.25):
        world.rollout("a", [("worker", "w"), ("rider", "r"), ("worker", "w")], {None: value})
    assert any("credit +1.250 over calls, conserved" in line for line in judged(world, "last")[1].lines())
    assert any("+2.500 over agents, shared by several" in line for line in judged(world, "identical")[1].lines())


@pytest.mark.parametrize(("failed", "given"), [("lowest", {"run": 0.5, "failed": 0.0}), ("exclude", {"run": 1.5})])
def test_what_a_retry_earned_after_a_crash_is_given_only_where_it_counts(failed: str, given: dict[str, float]) -> None:
    world = World()
    world.rollout("a", [("worker", "w")], {None: 1.0}, failed_before=[("worker", "crashes")])
    world.rollout("a", [("worker", "w")], {None: 0.5})
    _, report = judged(world, "identical", failed=failed)
    assert report.given == {source: {None: value} for source, value in given.items()}
    assert report.rewards == report.credited == sum(given.values())


def test_what_forks_earned_is_given_only_where_they_are_compared() -> None:
    world = World()
    world.rollout("a", [("worker", "w")], {None: 1.0})
    world.rollout("a", [("worker", "w")], {None: 0.5})
    world.rollout("a", [("worker", "v")], {None: 9.0}, replays=("r0.1", 0))
    assert judged(world, "identical")[1].given == {"run": {None: 1.5}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of two steps of one group each, in whose second rollouts a tool failed."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = TrainConfig(target="a:b", data=Path("x.jsonl"), model="m", agents=("worker",), credit="per-agent")
    (folder / "config.json").write_text(to_json(config))
    store = open_store(str(folder / "lightning.db"))
    for step in (0, 1):
        name = f"run-1:t{step}-0"
        store.enqueue([Rollout(rollout_id=f"{name}-{n}", group_id=name, task={}, mode="train") for n in (0, 1)])
        for number, attempt in enumerate(store.claim("w", limit=2)):
            ids = {"rollout_id": attempt.rollout.rollout_id, "attempt_id": attempt.attempt_id}
            trace = {"trace_id": f"{step}{number}" * 16, **ids}
            spans = [
                Span(operation=CHAT, name="m", span_id="1" * 16, start_ns=1, end_ns=2, agent="worker", **trace),
                Span(operation=CHAT, name="m", span_id="3" * 16, start_ns=3, end_ns=4, agent="rider", **trace),
                Span(
                    operation=EXECUTE_TOOL, name="t", span_id="2" * 16, start_ns=2, end_ns=3, agent="worker",
                    status="error" if number else "ok", **trace,
                ),
            ]  # fmt: skip
            store.add_spans(spans)
            rewards = [Reward(value=1.0 - number, agent="worker", **ids), Reward(value=0.0, agent="rider", **ids)]
            store.finish(attempt.attempt_id, attempt.fence, status="succeeded", rewards=rewards)
    store.close()
    return folder


def lines(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(cli, ["blame", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.output.splitlines()]


def test_a_run_is_read_from_its_folder(run: Path) -> None:
    rider, worker, last = lines(str(run))
    assert (worker["agent"], worker["turn"], worker["calls"], worker["credit"], worker["trained"]) == (
        "worker",
        0,
        4,
        0.5,
        True,
    )
    assert (rider["credit"], rider["contrast"], rider["trained"]) == (0.0, 0.0, False)
    assert last["account"]["rewards"] == 2.0
    assert last["account"]["given"] == {"run": {"worker": 2.0, "rider": 0.0}}


def test_only_what_the_run_learned_from_counts(run: Path, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "shared.db"))
    for start in ("run-0000aaaa", "run-0000bbbb", "run-2-0000cccc"):
        ids = [f"{start}:t0-0-{number}" for number in (0, 1)]
        store.enqueue([Rollout(rollout_id=each, group_id=f"{start}:t0-0", task={}, mode="train") for each in ids])
        for attempt in store.claim("w", limit=2):
            reward = Reward(value=1.0, rollout_id=attempt.rollout.rollout_id, attempt_id=attempt.attempt_id)
            store.finish(attempt.attempt_id, attempt.fence, status="succeeded", rewards=[reward])
    store.close()
    [last] = lines(str(run), "--store", str(tmp_path / "shared.db"))
    assert (last["account"]["rollouts"], last["account"]["rewards"]) == (2, 2.0)
    refused = CliRunner().invoke(cli, ["blame", str(run), "--store", str(tmp_path / "shared.db"), "--step", "2"])
    assert "their ids start with run-" in refused.output


def test_another_credit_a_step_and_automatic_rewards_can_be_asked_for(run: Path) -> None:
    found = lines(str(run), "--credit", "last", "--step", "2", "--rewards", "tool_status=0.1")
    assert found[-1]["account"]["credit"] == "last"
    assert found[-1]["account"]["attempts"] == 2
    assert found[-1]["account"]["given"]["tool_status"] == {"worker": 0.0}
    assert found[-1]["account"]["credited"] == pytest.approx(found[-1]["account"]["rewards"])


def test_steps_count_from_1_as_in_the_terminal(run: Path) -> None:
    of_step_2 = ["--rollout", "run-1:t1-0-1"]
    assert len(lines(str(run), "--step", "2", *of_step_2)) == 3
    for step, message in (("1", "no call of run-1:t1-0-1 counts"), ("0", "no training rollout of step 0 has ended")):
        refused = CliRunner().invoke(cli, ["blame", str(run), "--step", step, *of_step_2])
        assert message in refused.output


@pytest.mark.parametrize(
    "forked",
    [
        pytest.param({"forks": 6, "alternatives": 2, "fork_at": "entropy", "fork_tools": {"*": "run"}}, id="calls"),
        pytest.param({"credit": "identical", "orders": 4, "policies": {"worker": "lora", "b": "lora"}}, id="agents"),
    ],
)
def test_a_run_with_forks_is_shown_under_another_credit(run: Path, forked: dict[str, Any]) -> None:
    values = {"target": "a:b", "data": Path("x.jsonl"), "model": "m", "credit": "counterfactual", **forked}
    (run / "config.json").write_text(to_json(TrainConfig(**values)))
    assert lines(str(run), "--credit", "per-agent")[-1]["account"]["credit"] == "per-agent"


def test_one_rollout_is_shown_call_by_call(run: Path) -> None:
    first, second, last = lines(str(run), "--rollout", "run-1:t1-0-1", "--rewards", "tool_status=0.1")
    assert (first["agent"], first["turn"], first["credit"]) == ("worker", 0, -0.1)
    assert first["advantage"] < 0
    assert second["agent"] == "rider"
    assert "account" in last


def test_the_table_shows_agents_and_the_account(run: Path) -> None:
    result = CliRunner().invoke(cli, ["blame", str(run)])
    assert result.exit_code == 0
    assert "worker" in result.output
    assert "rewards +2.000; credit +2.000 over calls, conserved" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "Give the folder of a run"),
        (["RUN", "--credit", "magic"], "unknown credit 'magic'"),
        (["RUN", "--step", "7"], "no training rollout of step 7 has ended"),
        (["RUN", "--val"], "no held-out rollout has ended"),
        (["RUN", "--rollout", "x"], "no call of x counts in this run. For a held-out rollout, add --val"),
        (["RUN", "--gamma", "0.5"], "has no option 'gamma'"),
    ],
)
def test_what_can_not_be_shown_is_an_error_that_says_what_to_do(run: Path, arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["blame", *(str(run) if a == "RUN" else a for a in arguments)])
    assert result.exit_code == 2
    assert message in result.output
