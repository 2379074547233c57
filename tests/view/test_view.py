"""The viewer's interface answers what the store holds, writes nothing, and lets nobody in without a key."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import stat
import statistics
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from lightning_spans.errors import ConfigError, StoreError
from lightning_spans.schema.attempts import AttemptStatus, End, Rollout
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.replays import Replay
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Span
from lightning_spans.store import open_store
from lightning_trainer.cli.training.viewed import ViewerProgress
from lightning_trainer.intervals import estimate_mean, reward_bounds
from lightning_trainer.kits.judging.asking import JudgeAnswer, JudgeScore
from lightning_trainer.kits.judging.judge import GroupJudge
from lightning_trainer.kits.judging.options import JudgeOptions
from lightning_trainer.kits.view import command as view_command
from lightning_trainer.kits.view import marks as view_marks
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.reading import transcripts
from lightning_trainer.kits.view.reading.pieces import pieces_of
from lightning_trainer.kits.view.reading.texts import legible
from lightning_trainer.kits.view.routes import Views
from lightning_trainer.kits.view.runs import Runs, runs_in
from lightning_trainer.report.log.lines import read
from lightning_trainer.report.metrics import best_step
from lightning_trainer.report.progress import Silent
from lightning_trainer.rl.rollouts import outcomes
from lightning_trainer.rl.scores import Score, difference
from lightning_trainer.session.folder import hold_folder
from support.training.example_runs import FIRST_NS, NASTY, Scene, asks, assistant, cut_short, make_run, user
from support.training.printed import printed
from support.view import Asked


def rollouts_of(ask: Asked, step: int = 0) -> list[str]:
    return [row["rollout_id"] for group in ask("step", step=step)["groups"] for row in group["rollouts"]]


def test_counts_agree_with_traces(ask: Asked, run: Path) -> None:
    ids = rollouts_of(ask)
    assert len(ids) == 8
    for each in ask("facts", rollout=ids):
        lines = printed(run, "--rollout", each["rollout_id"])
        assert each["spans"] == len(lines)
        assert each["calls"] == sum(line["operation"] == "chat" for line in lines)
        assert sum(each["tools"].values()) == sum(line["operation"] == "execute_tool" for line in lines)
        assert each["response_tokens"] == sum(len(line.get("response_token_ids") or ()) for line in lines)
        page = ask("rollout", rollout=each["rollout_id"])
        assert [event["span_id"] for event in page["events"]] == [line["span_id"] for line in lines]


def test_the_numbers_of_a_step_are_those_that_the_run_wrote(ask: Asked, run: Path) -> None:
    for line in (line for line in read(run / "metrics.jsonl") if line["kind"] == "train"):
        rows = [
            row for g in ask("step", step=line["step"])["groups"] for row in g["rollouts"] if row["reward"] is not None
        ]
        assert sum(row["reward"] for row in rows) / len(rows) == pytest.approx(line["reward"])
        account = ask("account", step=line["step"])
        assert account["same_as_run"]
        assert account["seen"] == line["calls_seen"] == account["trained"] + sum(x["calls"] for x in account["losses"])


def test_the_overview_counts_every_rollout_of_the_store(ask: Asked, run: Path) -> None:
    store = open_store(str(run / "lightning.db"))
    every = store.rollouts()
    store.close()
    steps = ask("run")["steps"]
    assert sum(row["rollouts"] for row in steps) == len(every)
    assert {(row["mode"], row["step"]) for row in steps} == {("val", 0), ("train", 0), ("train", 1)}


def test_a_crash_is_shown_with_the_reward_that_it_had_in_the_run(tmp_path: Path) -> None:
    def plays(scene: Scene, skill: float) -> tuple[AttemptStatus, list[Reward], str | None]:
        scene.call(scene.agent("white", None, 500), [user("Your move?")], assistant("e4"))
        if scene.attempt.rollout.rollout_id.endswith("-0"):
            return "failed", [], "ValueError: no such move"
        return "succeeded", [Reward(value=v, agent=a, **scene.ids) for a, v in (("white", -1.0), ("black", 1.0))], None

    run = make_run(tmp_path / "r", steps=1, groups=2, size=2, play=plays)
    [line] = [line for line in read(run / "metrics.jsonl") if line["kind"] == "train"]
    rows = [row for group in Asked(run)("step", step=0)["groups"] for row in group["rollouts"]]
    assert [row["reward"] for row in rows] == [-1.0, 0.0, -1.0, 0.0]
    assert statistics.fmean(row["reward"] for row in rows) == line["reward"]


def test_the_credit_of_a_crash_is_the_lowest_reward_that_its_step_had_without_automatic_rules(tmp_path: Path) -> None:
    def plays(scene: Scene, skill: float) -> tuple[AttemptStatus, list[Reward], str | None]:
        name, group, member = scene.attempt.rollout.rollout_id.rsplit("-", 2)
        agent = scene.agent("white", None, 500)
        scene.call(agent, [user("Your move?")], assistant(f"e{name[-2:]}{group}{member}"))
        if (group, member) == ("0", "0"):
            return "failed", [], "ValueError: no such move"
        scene.tool(agent, "board", "{}", "", error="no")
        lowest = {"t0": -2.0, "t1": -5.0}.get(name[-2:], 0.0)
        return "succeeded", [Reward(value=1.0 if group == "0" else lowest, **scene.ids)], None

    ask = Asked(make_run(tmp_path / "r", steps=2, groups=2, size=2, play=plays))
    crashes = {rollouts_of(ask, step)[0]: reward for step, reward in ((0, -2.0), (1, -5.0))}
    for rollout, reward in crashes.items():
        page = ask("rollout", rollout=rollout)
        [event] = [event for event in page["events"] if event["turn"] is not None]
        call = ask("call", rollout=rollout, attempt=page["attempt_id"], span=event["span_id"])
        assert page["reward"] == event["credit"] == call["choices"][0]["credit"] == reward
    for where in ({}, {"step": 0}, {"step": 1}):
        worst = {link["rollout_id"]: link["credit"] for link in ask("credit", **where)["worst"]}
        assert worst.items() <= crashes.items()
        assert len(worst) == (1 if where else 2)
    assert ask("account", step=0)["same_as_run"]


def test_a_group_has_a_signal_if_the_rewards_of_a_trained_agent_differ(tmp_path: Path) -> None:
    def plays(scene: Scene, skill: float) -> tuple[AttemptStatus, list[Reward], str | None]:
        _, group, member = scene.attempt.rollout.rollout_id.rsplit("-", 2)
        scene.call(scene.agent("writer", None, 500), [user("Go")], assistant("done"))
        if (group, member) in {("0", "1"), ("1", "1")}:
            return "failed", [], "ValueError: no such move"
        value = 0.0 if group == "0" else 1.0
        both = {"writer": value, "critic": float(member) if group == "2" else value}
        return "succeeded", [Reward(value=v, agent=a, **scene.ids) for a, v in both.items()], None

    run = make_run(tmp_path / "r", steps=1, groups=3, size=3, play=plays)
    options = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**options, "agents": ["writer"]}))
    ask = Asked(run)
    assert [group["signal"] for group in ask("step", step=0)["groups"]] == [False, True, False]
    [row] = [row for row in ask("run")["steps"] if row["mode"] == "train"]
    [line] = [line for line in read(run / "metrics.jsonl") if line["kind"] == "train"]
    assert row["flat"] == line["groups_without_signal"] * 3
    (run / "metrics.jsonl").unlink()
    [row] = [row for row in ask("run")["steps"] if row["mode"] == "train"]
    assert row["flat"] == 1, "in the others, what the failures count for is not known yet"


def test_a_run_opens_with_the_held_out_difference_of_each_agent(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=4, groups=1, size=2)
    first, last = (Score.from_metrics(line) for line in read(run / "metrics.jsonl") if line["kind"] == "val")
    headline = Asked(run)("run")["headline"]
    assert [each["agent"] for each in headline["held_out"]] == ["", "checker", "planner", "solver"]
    assert [each["trained"] for each in headline["held_out"]] == [True, False, True, True]
    for each in headline["held_out"]:
        rise, tasks = difference(last, first, each["agent"])
        assert (each["difference"], each["low"], each["high"], each["tasks"]) == (rise.mean, rise.low, rise.high, tasks)
        values = list(last.by_task[each["agent"]].values())
        point = each["points"][-1]
        assert {name: point[name] for name in ("mean", "low", "high")} == estimate_mean(values).to_json()
    assert headline["sentence"].startswith("The held-out reward rose")
    assert headline["best"]["step"] == best_step(
        [line for line in read(run / "metrics.jsonl") if line["kind"] == "val"]
    )
    assert headline["cost"]["rollouts"] == 4 * 2 + 2 * 3 * 2


def test_intervals_of_every_page_use_the_range_of_rewards_that_the_run_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=4, groups=3, size=2)
    options = json.loads((run / "config.json").read_text())
    named = {"target": None, "command": "python team.py", "reward_range": "-5,5"}
    (run / "config.json").write_text(json.dumps({**options, **named}))
    log = run / "metrics.jsonl"
    ended = [line for line in log.read_text().splitlines() if json.loads(line)["step"] < 3 or "val" in line]
    log.write_text("".join(f"{line}\n" for line in ended))
    ask, bounds = Asked(run), reward_bounds([], (-5.0, 5.0))
    [unfinished] = [row for row in ask("run")["steps"] if (row["mode"], row["step"]) == ("train", 3)]
    earned = [[row["reward"] for row in group["rollouts"]] for group in ask("step", step=3)["groups"]]
    known = [[reward for reward in rewards if reward is not None] for rewards in earned]
    so_far = estimate_mean([statistics.fmean(rewards) for rewards in known if rewards], bounds)
    assert [unfinished[name] for name in HEADLINE] == pytest.approx([so_far.mean, so_far.low, so_far.high])
    [own] = [each for each in ask("run")["headline"]["held_out"] if each["agent"] == "solver"]
    _, last = (Score.from_metrics(line) for line in read(log) if line["kind"] == "val")
    tasks = estimate_mean(list(last.by_task["solver"].values()), bounds)
    assert [own["points"][-1][name] for name in ("low", "high")] == [tasks.low, tasks.high]


HEADLINE = ("reward", "reward_low", "reward_high")


@pytest.fixture
def sharing(tmp_path: Path) -> Path:
    """The folder of a run that was cut in step 1 and went on, forked a rollout, and shares its store with another."""
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    cut_short(url, "x-0000aaaa:t1", seed=5)
    run = make_run(tmp_path / "x", steps=2, groups=2, size=4, store_url=url)
    make_run(tmp_path / "x-2", steps=2, groups=1, size=2, store_url=url, seed=1)
    store = open_store(url)
    [first] = store.attempts(rollout_ids=["x-0a1b2c3d:t1-0-0"])
    fork = Rollout(
        rollout_id="x-0a1b2c3d:t1-0-0-1-0", group_id="x-0a1b2c3d:t1-0", task=first.rollout.task, mode="fork",
        replay=Replay(attempt_id=first.attempt_id, call=1),
    )  # fmt: skip
    store.enqueue([fork])
    [attempt] = store.claim("runner/one")
    reward = Reward(value=-9.0, rollout_id=fork.rollout_id, attempt_id=attempt.attempt_id, source="run")
    store.finish(attempt.attempt_id, attempt.fence, status="succeeded", rewards=[reward])
    store.close()
    return run


def test_only_rollouts_that_a_step_was_made_of_count(sharing: Path) -> None:
    ask = Asked(sharing)
    overview = {(row["mode"], row["step"]): row for row in ask("run")["steps"]}
    lines = [line for line in read(sharing / "metrics.jsonl") if line["kind"] in ("train", "val")]
    assert {(line["kind"], line["step"]) for line in lines} == overview.keys()
    for line in lines:
        where = {"mode": line["kind"], "step": line["step"]}
        row, page = overview[line["kind"], line["step"]], ask("step", **where)
        rollouts = [each for group in page["groups"] for each in group["rollouts"]]
        rewards = [each["reward"] for each in rollouts if each["reward"] is not None]
        good = [each["reward"] for each in rollouts if each["status"] == "succeeded"]
        assert row["rollouts"] == len(rollouts) == line["rollouts"]
        assert row["groups"] == page["total"] == len(page["groups"])
        assert sum(rewards) / len(rewards) == pytest.approx(line["reward"])
        assert row["low"] == min(good)
        assert [row[name] for name in HEADLINE] == [line[name] for name in HEADLINE]
        assert ask("rewards", **where)["total"] == len(good)
    account, told = ask("account", step=1), next(each for each in lines if (each["kind"], each["step"]) == ("train", 1))
    assert account["seen"] == told["calls_seen"]
    assert account["same_as_run"]


def test_a_group_is_compared_without_its_forks(sharing: Path) -> None:
    ask = Asked(sharing)
    page = ask("group", group="x-0a1b2c3d:t1-0")
    rows = [member["row"] for member in page["members"]]
    assert page["total"] == len(rows) == 4
    assert page["mean"] == pytest.approx(sum(row["reward"] for row in rows) / 4)
    assert "x-0a1b2c3d:t1-0-0-1-0" in ask("rollout", rollout=rows[0]["rollout_id"])["members"]  # to be looked at


def test_a_call_shows_the_tokens_that_were_recorded_and_the_row_that_it_shares(ask: Asked, run: Path) -> None:
    rollout = rollouts_of(ask, 1)[0]
    lines = [line for line in printed(run, "--rollout", rollout) if line["operation"] == "chat"]
    solver = [line for line in lines if line["agent"] == "solver"]
    page = ask("call", rollout=rollout, span=solver[1]["span_id"])
    tokens = page["choices"][0]["tokens"]
    assert [token["id"] for token in tokens] == solver[1]["response_token_ids"]
    assert [token["logprob"] for token in tokens] == solver[1]["logprobs"]
    assert [token["id"] for token in page["prompt"]] == solver[1]["prompt_token_ids"]
    assert "".join(token["text"] for token in tokens).endswith("<|im_end|>")
    assert page["row"]["calls"] == [line["span_id"] for line in solver]
    assert all(token["trained"] for token in tokens)
    assert sum(bool(token["trained"]) for token in page["prompt"]) == len(solver[0]["response_token_ids"])
    assert all(token["advantage"] == page["choices"][0]["advantage"] for token in tokens)


def test_equal_calls_of_one_agent_do_not_share_a_row(tmp_path: Path) -> None:
    def votes(scene: Scene, skill: float) -> tuple[AttemptStatus, list[Reward], str | None]:
        for _ in range(2):
            scene.tokens.clear()  # each is a conversation of its own
            scene.call(scene.agent("voter", None, 500), [user("Is it right?")], assistant("yes"))
        return "succeeded", [Reward(value=float(scene.attempt.rollout.rollout_id[-1]), **scene.ids)], None

    ask = Asked(make_run(tmp_path / "r", steps=1, groups=1, size=2, play=votes))
    [rollout, _] = rollouts_of(ask)
    page = ask("rollout", rollout=rollout)
    spans = [event["span_id"] for event in page["events"] if event["turn"] is not None]
    assert len(spans) == 2
    for span in spans:
        call = ask("call", rollout=rollout, attempt=page["attempt_id"], span=span)
        assert call["row"]["calls"] == [span]


def test_a_call_shows_what_the_update_saw_of_each_token(ask: Asked, run: Path) -> None:
    pages = [
        ask("call", rollout=rollout, span=line["span_id"])
        for rollout in rollouts_of(ask, 1)
        for line in printed(run, "--rollout", rollout)
        if line["operation"] == "chat"
    ]
    read = [page for page in pages if page["untrained"] is None and page["unread"] is None]
    for token in (token for page in read for token in page["choices"][0]["tokens"]):
        assert token["entropy"] == pytest.approx(-0.8 * token["logprob"], rel=1e-3, abs=1e-3)
        assert -0.021 < token["gap"] < 0.031
    assert any(token["gap"] for token in read[-1]["choices"][0]["tokens"])
    whys = {page["agent"]: page["untrained"] for page in pages if page["untrained"] is not None}
    assert whys == {"checker": "agent not selected"}
    for page in pages:
        known = page["choices"][0]["tokens"][0]["entropy"] is not None
        assert known == (page["untrained"] is None and page["unread"] is None)


def test_where_no_update_told_of_tokens_the_page_says_why(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=1, groups=1, size=6)
    shutil.rmtree(run / "tokens")
    ask = Asked(run)
    rollout = rollouts_of(ask)[0]
    line = next(line for line in printed(run, "--rollout", rollout) if line["operation"] == "chat")
    page = ask("call", rollout=rollout, span=line["span_id"])
    assert "does not have this row's tokens" in page["unread"]
    assert page["row"] is not None


def test_a_task_that_was_run_before_and_after_stands_in_both(tmp_path: Path) -> None:
    ask = Asked(make_run(tmp_path / "r", steps=4, groups=1, size=2))
    page = ask("tries")
    assert page["total"] == 3
    for task in page["tasks"]:
        assert [(group["mode"], group["step"]) for group in task["groups"]] == [("val", 0), ("val", 3)]
        for group in task["groups"]:
            rows = ask("group", group=group["group_id"])["members"]
            counted = [m["row"]["reward"] for m in rows if m["row"]["status"] == "succeeded"]
            assert group["mean"] == (pytest.approx(sum(counted) / len(counted)) if counted else None)
    own = ask("tries", group=page["tasks"][0]["groups"][0]["group_id"])
    assert own["tasks"] == page["tasks"][:1]
    assert "--against tiny" in own["commands"][1]
    lone = ask("tries", group="r-0a1b2c3d:t0-0")
    assert len(lone["tasks"][0]["groups"]) == 1
    assert lone["commands"]
    ask("tries", 400, group="none")


def test_what_was_cut_short_is_no_time_that_a_task_was_run(tmp_path: Path) -> None:
    ask = Asked(make_run(tmp_path / "r", steps=4, groups=1, size=2))
    before = ask("tries")
    store = open_store(str(tmp_path / "r" / "lightning.db"))
    [again] = store.rollouts(group_ids=[before["tasks"][0]["groups"][0]["group_id"]])[:1]
    store.enqueue([Rollout(rollout_id="r-0a1b2c3d:t9-0-0", group_id="r-0a1b2c3d:t9-0", task=again.task)])
    assert ask("tries") == before  # it is under way
    store.cancel(["r-0a1b2c3d:t9-0-0"])
    store.close()
    assert ask("tries") == before
    assert ask("tries", group="r-0a1b2c3d:t9-0")["tasks"] == before["tasks"][:1]


def test_integers_that_a_browser_would_round_come_as_text() -> None:
    assert legible({"seeds": [8556470716843700185, 2**53, True]}) == {"seeds": ["8556470716843700185", 2**53, True]}


def test_agents_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "lightning.db"))
    own: dict[str, Any] = {"trace_id": "a" * 32, "agent": "extract"}
    store.add_spans([
        Span(operation="chat", name="m", span_id=f"{at}" * 16, start_ns=at, end_ns=at + 1,
             attributes={"lightning.agent.path": f"{team}/extract"}, **own)
        for at, team in ((1, "billing"), (3, "refund"))
    ])  # fmt: skip
    store.close()
    ask = Asked(tmp_path)
    page = ask("trace", trace="a" * 32)
    assert page["agents"] == [event["agent"] for event in page["events"]] == ["billing/extract", "refund/extract"]
    assert ask("call", trace="a" * 32, span="3" * 16)["agent"] == "refund/extract"


def test_calls_that_were_left_out_are_named_with_the_reason(ask: Asked) -> None:
    (loss,) = ask("account", step=1)["losses"]
    assert loss["reason"] == "agent not selected"
    assert {link["agent"] for link in loss["links"]} == {"checker"}
    assert len(loss["links"]) == loss["calls"]


@pytest.mark.parametrize(("algorithm", "size"), [("reinforce++", 1), ("ppo", 2)])
def test_the_account_of_an_algorithm_without_groups_is_that_of_the_run(
    tmp_path: Path, algorithm: str, size: int
) -> None:
    def plays(scene: Scene, skill: float) -> tuple[AttemptStatus, list[Reward], str | None]:
        group = scene.attempt.rollout.rollout_id.split("-")[-2]
        scene.call(scene.agent("white", None, 500), [user("Your move?")], assistant("e4"))
        return "succeeded", [Reward(value=float(group), **scene.ids)], None

    ask = Asked(make_run(tmp_path / "r", steps=1, groups=2, size=size, play=plays, algorithm=algorithm))
    page = ask("account", step=0)
    assert page["same_as_run"]
    assert (page["seen"], page["trained"], page["losses"]) == (2 * size, 2 * size, [])
    [first, *_] = rollouts_of(ask)
    span = next(event["span_id"] for event in ask("rollout", rollout=first)["events"] if event["turn"] is not None)
    assert ask("call", rollout=first, span=span)["row"]["calls"] == [span]


@pytest.mark.parametrize(
    ("options", "same"),
    [
        pytest.param({}, False, id="known"),
        pytest.param({"kl_in": "reward", "kl_coef": 0.1}, True, id="penalties"),
        pytest.param({"with_prompts": True, "reflector": "m=http://127.0.0.1:1/v1"}, None, id="rows added"),
    ],
)
def test_only_numbers_that_the_store_can_give_are_compared_with_the_run(
    run: Path, tmp_path: Path, options: dict[str, Any], same: bool | None
) -> None:
    copy = edit_run(run, tmp_path / "r", options)
    lines = [{**line, "rows_without_gradient": -1.0} for line in read(run / "metrics.jsonl")]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Asked(copy)("account", step=1)["same_as_run"] is same


def test_rows_on_verl_are_merged_only_if_its_algorithm_merges_them(ask: Asked, run: Path, tmp_path: Path) -> None:
    page = Asked(edit_run(run, tmp_path / "r", {"backend": "verl", "algorithm": "gspo"}))("account", step=1)
    assert page["rows"] == page["trained"] == ask("account", step=1)["trained"] > ask("account", step=1)["rows"]


def edit_run(run: Path, copy: Path, options: dict[str, Any]) -> Path:
    """Copy a run's folder, and change options in its config."""
    shutil.copytree(run, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **options}))
    return copy


def test_a_group_says_how_far_its_rollouts_are_alike_and_what_each_was_worth(ask: Asked) -> None:
    group = ask("step", step=1)["groups"][0]
    page = ask("group", group=group["group_id"])
    assert [member["row"] for member in page["members"]] == group["rollouts"]
    firsts = [next(e for e in member["events"] if e["turn"] == 0)["answer"] for member in page["members"]]
    assert (page["alike"] > 0) == all(answer == firsts[0] for answer in firsts)
    assert any(member["advantages"] for member in page["members"])


def test_a_group_of_several_pages_is_alike_only_as_far_as_all_are(tmp_path: Path) -> None:
    def halves(scene: Scene, skill: float) -> Any:
        agent = scene.agent("one", None, 10)
        number = int(scene.attempt.rollout.rollout_id.rpartition("-")[2])
        scene.call(agent, [user("go")], assistant("left" if number < 8 else "right"))
        scene.call(agent, [user("on")], assistant("done"))
        return "succeeded", [Reward(value=1.0, **scene.ids)], None

    ask = Asked(make_run(tmp_path / "r", steps=1, groups=1, size=16, play=halves))
    group = ask("step", mode="train")["groups"][0]["group_id"]
    first = ask("group", group=group)
    rest = ask("group", group=group, after=first["next"])
    assert len(first["members"]) == len(rest["members"]) == 8
    assert min(first["alike"], rest["alike"]) == 0


def test_the_ids_of_tool_calls_make_no_difference_and_results_bear_the_tools_name(tmp_path: Path) -> None:
    def with_ids(scene: Scene, skill: float) -> Any:
        agent = scene.agent("one", None, 10)
        answer = asks("look", "{}")
        answer["tool_calls"][0]["id"] = told = f"call_{scene.attempt.fence}"
        scene.call(agent, [user("go")], answer)
        heard = {"role": "tool", "tool_call_id": told, "content": "nothing"}
        scene.call(agent, [user("go"), answer, heard], assistant("done"))
        return "succeeded", [Reward(value=1.0, **scene.ids)], None

    ask = Asked(make_run(tmp_path / "r", steps=1, groups=1, size=3, play=with_ids))
    group = ask("step", mode="train")["groups"][0]["group_id"]
    page = ask("group", group=group)
    assert page["alike"] == 2
    (result,) = [said for event in page["members"][0]["events"] for said in event["said"] if said["role"] == "tool"]
    assert result["name"] == "look"


def test_a_verdict_is_shown_with_what_the_judge_was_asked(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", steps=1, groups=1, size=4)
    ask = Asked(folder)
    store = open_store(str(folder / "lightning.db"))
    found = outcomes(store, [each for each in store.rollouts() if ":t0-" in each.rollout_id])

    def send(_: Any, told: Any) -> JudgeAnswer:
        scores = tuple(JudgeScore(0.5, f"<b>number {n}</b>") for n in range(len(told)))
        request = {"messages": [{"role": "user", "content": "which is best?"}]}
        return JudgeAnswer(request, "all the same", scores, None, FIRST_NS, FIRST_NS + 1)

    options = JudgeOptions(endpoint="http://127.0.0.1:9/v1", model="big", rubric="be short")
    with closing(GroupJudge(options, store, send=send)) as judge:
        judged = [each for each in judge.judge(found) if any(r.source == "judge" for r in each.rewards)]
    store.close()
    rollout = judged[0].rollout.rollout_id
    page = ask("rollout", rollout=rollout)
    (verdict,) = [event for event in page["events"] if event["operation"] == "evaluate"]
    assert "score 0.5" in verdict["answer"][0]["text"]
    assert "<b>number" in verdict["answer"][0]["text"]
    assert page["ms"] < 60_000  # the verdict came later
    (asked,) = ask("trace", trace=verdict["asked"][0])["events"]
    assert asked["said"][0]["text"] == "which is best?"
    assert asked["answer"][0]["text"] == "all the same"
    (row,) = [each for each in ask("rewards", step=0)["attempts"] if each["rollout_id"] == rollout]
    assert row["spans"]["judge"] == verdict["span_id"]
    assert "<b>number" in row["said"]["judge"]


def test_credit_can_be_shared_out_otherwise(ask: Asked) -> None:
    own, other = ask("credit", step=1), ask("credit", step=1, credit="last")
    assert own["credit"] == "identical"
    assert {cell["agent"] for cell in own["cells"]} == {"planner", "solver", "checker"}
    assert other["credit"] == "last"
    assert own["cells"] != other["cells"]


def test_calls_that_stand_out_are_listed_once_with_task_and_reward(ask: Asked) -> None:
    page = ask("credit", step=1)
    links = [*page["best"], *page["worst"]]
    rewards = {r["rollout_id"]: (g["task"], r["reward"]) for g in ask("step", step=1)["groups"] for r in g["rollouts"]}
    assert [(link["task"], link["reward"]) for link in links] == [rewards[link["rollout_id"]] for link in links]
    assert len({(link["agent"], link["turn"], link["text"], link["task"]) for link in links}) == len(links)
    assert sum(link["times"] for link in links) > len(links)


def test_percentiles_are_those_of_the_calls_that_were_recorded(ask: Asked, run: Path) -> None:
    lines = [line for r in rollouts_of(ask, 1) for line in printed(run, "--rollout", r) if line["operation"] == "chat"]
    whole, *agents = ask("tools", step=1)["usage"]
    assert whole["number"] == len(rollouts_of(ask, 1))
    for row in agents:
        own = [line for line in lines if line["agent"] == row["agent"]]
        took = [(line["end_ns"] - line["start_ns"]) / 1e6 for line in own]
        tokens = [len(line["response_token_ids"]) for line in own]
        assert row["number"] == len(own)
        assert (row["ms"]["p50"], row["ms"]["most"]) == (pytest.approx(statistics.median(took)), max(took))
        assert row["response_tokens"]["p50"] == pytest.approx(statistics.median(tokens))
        assert min(tokens) <= row["response_tokens"]["p50"] <= row["response_tokens"]["p90"] <= max(tokens)


def test_rewards_are_sorted_by_the_lowest_of_any_agent(ask: Asked) -> None:
    attempts = ask("rewards", step=1)["attempts"]
    lowest = [each["lowest"] for each in attempts]
    assert lowest == sorted(lowest)
    assert all(each["lowest"] == min(each["by_agent"].values()) for each in attempts)
    rows = {row["rollout_id"]: row for group in ask("step", step=1)["groups"] for row in group["rollouts"]}
    assert all(rows[each["rollout_id"]]["lowest"] == each["lowest"] for each in attempts)


def test_a_rule_and_the_outcome_are_kept_apart(ask: Asked) -> None:
    page = ask("rewards", step=0)
    assert {row["source"]: row["rule"] for row in page["sources"]} == {"run": False, "tool_status": True}
    outcomes = {r["rollout_id"]: r["reward"] for g in ask("step", step=0)["groups"] for r in g["rollouts"]}
    assert {a["rollout_id"]: a["outcome"] for a in page["attempts"]} == {
        rollout: reward
        for rollout, reward in outcomes.items()
        if rollout in {a["rollout_id"] for a in page["attempts"]}
    }


def test_tools_that_fail_are_found_with_their_error(ask: Asked, run: Path) -> None:
    (row,) = ask("tools", step=0)["tools"]
    failed = [
        x
        for r in rollouts_of(ask)
        for x in printed(run, "--rollout", r)
        if x["operation"] == "execute_tool" and x["status"] == "error"
    ]
    assert row["errors"] == len(failed) > 0
    assert "SyntaxError" in row["error"]


def test_search_marks_what_it_found_behind_letters_that_fold_to_two(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "lightning.db"))
    store.add_spans([
        Span(
            operation="execute_tool", name="Straße, Maße, Füße: the Word here", trace_id="a" * 32, span_id="1" * 16,
            start_ns=1, end_ns=2,
        )
    ])  # fmt: skip
    store.close()
    (hit,) = Asked(tmp_path)("search", text="word")["hits"]
    assert (hit["before"], hit["match"], hit["behind"]) == ("Straße, Maße, Füße: the ", "Word", " here")


@pytest.mark.parametrize("text", ["invalid syntax", '"expression"', "with the calculator", "no such thing anywhere"])
def test_search_finds_what_was_said_however_it_is_kept(ask: Asked, text: str) -> None:
    hits = ask("search", text=text)["hits"]
    assert bool(hits) == (text != "no such thing anywhere")
    assert all(text in hit["match"].replace("\\", "") for hit in hits)


def test_search_finds_what_a_program_said_that_is_not_attached(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("lightning_trainer.kits.view.reading.search._LOOK_S", -1.0)  # slow: one part for each page
    store = open_store(str(tmp_path / "lightning.db"))
    own: dict[str, Any] = {"start_ns": 1, "end_ns": 2, "policy": "p", "policy_version": 0, "trace_id": "a" * 32}
    asked = {"messages": [{"role": "user", "content": "a needle"}]}
    answer = Choice(0, (2,), (-0.1,), "stop", {"role": "assistant", "content": "a gem"})
    for each in "bc":
        call = Call(call_id=each, response_id=each, span_id=each * 16, request=asked, choices=(answer,), **own)
        store.add_calls([call])
    values = {"lightning.request": json.dumps(asked)}
    store.add_spans([
        Span(operation="chat", name="m", trace_id="a" * 32, span_id="b" * 16, start_ns=1, end_ns=2, attributes=values)
    ])  # fmt: skip
    store.close()
    ask = Asked(tmp_path)
    for text, number in (("a needle", 2), ("a gem", 1)):  # the span of one call tells what it was asked
        page = ask("search", text=text)
        hits = page["hits"] + ask("search", text=text, after=page["next"], calls=page["calls"])["hits"]
        assert [hit["match"] for hit in hits] == [text] * number


def test_passwords_of_a_run_are_not_shown(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "r")
    options = json.loads((folder / "config.json").read_text())
    url = "https://me:pa:ss@judge.example/v1"
    (folder / "config.json").write_text(json.dumps({**options, "judge": {"endpoint": url, "seeds": [url]}}))
    ask = Asked(folder)
    (row,) = ask("runs")
    for shown in (row, ask("run")):
        assert shown["options"]["judge"]["endpoint"] == "https://me:***@judge.example/v1"
        assert "pa:ss" not in json.dumps(shown)


def test_hostile_texts_come_back_as_they_are(ask_nasty: Asked) -> None:
    ids = rollouts_of(ask_nasty)
    facts = ask_nasty("facts", rollout=ids)
    assert len(facts) == len(ids) == 16
    agents = {name for each in facts for name in each["agents"]}
    assert {NASTY[0], NASTY[1], "__proto__"} <= agents
    for rollout in ids:
        page = ask_nasty("rollout", rollout=rollout)
        call = next(event for event in page["events"] if event["turn"] == 0)
        ask_nasty("call", rollout=rollout, span=call["span_id"])
        assert all(len(said["text"]) <= 4000 for event in page["events"] for said in (*event["said"], *event["answer"]))
    for screen in ("account", "credit", "rewards", "tools"):
        ask_nasty(screen, step=0)


@pytest.mark.parametrize("scope", ["attempt", "runner", "evaluator", "live"])
def test_only_keys_for_looking_open_it(ask: Asked, scope: str) -> None:
    more = {"rollout_id": "r", "attempt_id": "a", "fence": 1} if scope == "attempt" else {}
    key = ask.keys.issue(scope, **more)  # type: ignore[arg-type]
    refused = ask.client.get("/api/view/runs", headers={"Authorization": f"Bearer {key}"})
    assert refused.status_code in (401, 403)
    assert ask.client.get("/api/view/runs").status_code == 401
    ask("runs", scope="admin")


def test_every_route_but_that_of_marks_only_reads_and_each_needs_a_key(ask: Asked) -> None:
    paths = {path: set(about) for path, about in ask.app.openapi()["paths"].items()}
    assert len(paths) >= 14
    assert {path: methods for path, methods in paths.items() if methods != {"get"}} == {
        "/api/view/marks": {"get", "post"}
    }
    for path, methods in paths.items():
        for method in methods:
            assert ask.client.request(method, path).status_code == 401, path


def test_a_mark_is_seen_by_others_changed_removed_and_saved_to_a_file(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", steps=1, groups=1, size=2)
    mine, others = Asked(run), Asked(run)
    before = Runs(run).all()[0].changed
    [first, second] = rollouts_of(mine)
    assert mine("marks")["marks"] == []
    mine.post("marks", rollout_id=first, comment="look: half a letter \ud83d", author="ana")
    mine.post("marks", rollout_id=second, span_id="1" * 16, attempt_id=f"{second}.1", comment="odd", author="ana")
    others.post("marks", rollout_id=first, comment="I looked", author="ben")
    assert Runs(run).all()[0].changed != before
    call, whole = sorted(others("marks")["marks"], key=lambda mark: mark["rollout_id"], reverse=True)
    assert (whole["comment"], whole["author"], whole["span_id"]) == ("I looked", "ben", "")
    assert (call["comment"], call["attempt_id"]) == ("odd", f"{second}.1")
    assert whole["task"].startswith("What is")
    out = tmp_path / "marks.jsonl"
    done = CliRunner().invoke(view_command.command, [str(run), "--save-marks", str(out)])
    assert json.loads(done.stdout) == {"marks": 2, "file": str(out)}
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(line["run"], line["rollout_id"], line["comment"]) for line in lines} == {
        ("r", first, "I looked"), ("r", second, "odd"),
    }  # fmt: skip
    assert all(line["task"]["question"].startswith("What is") for line in lines)
    mine.post("marks", rollout_id=first, marked=False)
    assert [mark["rollout_id"] for mark in others("marks")["marks"]] == [second]


def test_a_mark_on_a_trace_outside_of_rollouts_stays_in_a_run_whose_store_has_others(tmp_path: Path) -> None:
    url = str(tmp_path / "shared.db")
    ask = Asked(make_run(tmp_path / "r", steps=1, groups=1, size=2, store_url=url))
    store = open_store(url)
    store.add_spans([Span(operation="chat", name="m", trace_id="b" * 32, span_id="c" * 16, start_ns=1, end_ns=9)])
    store.close()
    [mark] = ask.post("marks", trace_id="b" * 32, comment="look")["marks"]
    assert (mark["trace_id"], mark["comment"]) == ("b" * 32, "look")


def test_a_mark_that_can_not_be_kept_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Asked(make_run(tmp_path / "r", steps=1, groups=1, size=2))
    [first, second] = rollouts_of(ask)
    assert "no rollout 'none'" in ask.post("marks", 400, rollout_id="none")["error"]["message"]
    assert "rollout_id or trace_id" in ask.post("marks", 400)["error"]["message"]
    assert (
        "at most 4000 are allowed" in ask.post("marks", 400, rollout_id=first, comment="x" * 4001)["error"]["message"]
    )
    monkeypatch.setattr(view_marks, "_MOST", 1)
    ask.post("marks", rollout_id=first)
    ask.post("marks", rollout_id=first, comment="again")
    assert "Remove some" in ask.post("marks", 400, rollout_id=second)["error"]["message"]
    assert [mark["comment"] for mark in ask("marks")["marks"]] == ["again"]
    runner = ask.keys.issue("runner")
    refused = ask.client.post("/api/view/marks", json={"run": "r"}, headers={"Authorization": f"Bearer {runner}"})
    assert refused.status_code == 403


@pytest.mark.parametrize("place", ["loose?before=", "search?text=a&after=", "group?group=x&after=", "tries?after="])
def test_places_beyond_what_a_database_holds_are_refused(ask: Asked, place: str) -> None:
    run = ask("runs")[0]["name"]
    key = ask.keys.issue("admin")
    found = ask.client.get(f"/api/view/{place}{2**63}&run={run}", headers={"Authorization": f"Bearer {key}"})
    assert found.status_code == 400


def test_pages_let_nothing_in_from_elsewhere(ask: Asked) -> None:
    for path in ("/view/", "/view/app.js", "/view/app.css"):
        answer = ask.client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    assert ask.client.get("/view/../../secret").status_code == 404
    assert ask.client.get("/view/nothing.js").status_code == 404


def test_reading_changes_no_file(run: Path, ask: Asked) -> None:
    def sums() -> dict[str, str]:
        files = [path for path in run.rglob("*") if path.is_file() and not path.name.endswith("-shm")]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = sums()
    rollout = rollouts_of(ask)[0]
    for what, params in (("run", {}), ("rollout", {"rollout": rollout}), ("account", {"step": 0}), ("fleet", {})):
        ask(what, **params)
    after = sums()
    assert {path: found for path, found in after.items() if path in before} == before


def test_what_is_written_to_a_store_named_by_its_url_is_told(tmp_path: Path) -> None:
    run = Runs(store=f"sqlite:///{tmp_path / 'one.db'}").all()[0]
    store = open_store(run.store)
    before = run.changed
    store.enqueue([Rollout(rollout_id="live-1", group_id="live", task={"q": "new"})])
    assert run.changed != before
    store.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_can_not_be_written_is_read(run: Path) -> None:
    mode = run.stat().st_mode
    run.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        StoreReader(str(run / "lightning.db")).close()
    finally:
        run.chmod(mode)


def test_a_run_is_running_while_a_process_holds_its_folder_or_an_attempt_its_lease(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", steps=1, groups=1, size=2)
    (run,) = Runs(folder).all()
    assert run.state == "stopped"
    before = run.changed
    with hold_folder(folder):
        assert run.state == "running"
        assert run.changed != before  # whoever looks is told
    assert run.state == "stopped"
    (folder / ".held-by").write_text(f"process {2**22 + 1} on {socket.gethostname()}, since then,")  # it was killed
    assert run.state == "stopped"
    store = open_store(run.store)
    (alone,) = Runs(store=run.store).all()
    assert alone.state == "idle"
    store.enqueue([Rollout(rollout_id="x", group_id="g", task={})])
    (attempt,) = store.claim("runner", limit=1, lease_s=60)
    assert run.state == alone.state == "running"
    store.finish_all([End(attempt.attempt_id, attempt.fence, "succeeded", (), None)])
    assert alone.state == "idle"
    store.enqueue([Rollout(rollout_id="y", group_id="g", task={})])
    store.claim("runner", limit=1, lease_s=1e-6)
    assert alone.state == "idle"  # its runner says nothing any more
    with sqlite3.connect(run.store) as file:  # the store lay unused for a day: its clock stood still
        file.execute("UPDATE lease_clock SET now_ns = now_ns - 86400000000000, wrote_ns = 0")
    store.close()
    store = open_store(run.store)
    store.enqueue([Rollout(rollout_id="z", group_id="g", task={})])
    store.claim("runner", limit=1, lease_s=60)
    assert alone.state == "running"
    store.close()


def test_a_run_without_a_store_shows_its_numbers_and_stops_no_other(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "kept")
    shutil.copytree(run, tmp_path / "learned", ignore=shutil.ignore_patterns("lightning.db*"))  # as sft leaves one
    (tmp_path / "latest").symlink_to(tmp_path / "deleted")
    ask = Asked(tmp_path)
    assert {row["name"] for row in ask("runs")} == {"kept", "learned"}
    shown, kept = ask("run", run="learned"), ask("run", run="kept")
    assert shown["train"] == kept["train"]
    assert (shown["steps"], kept["steps"] != []) == ([], True)
    assert "no store" in ask("step", 400, run="learned")["error"]["message"]
    by_name = {each.name: each for each in Runs(tmp_path).all()}
    assert by_name["learned"].state == "stopped"


def test_view_opens_where_the_newest_run_has_no_store(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "kept")
    shutil.copytree(run, tmp_path / "learned", ignore=shutil.ignore_patterns("lightning.db*"))
    os.utime(tmp_path / "kept", (0, 0))
    shown: list[str] = []

    def stop(url: str, *, opened: bool) -> None:
        shown.append(url)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(view_command, "_show", stop)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    for path in (tmp_path, tmp_path / "learned"):
        view_command._serve(Views(Runs(path)), "127.0.0.1", 0, plain=False, opened=False)
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])
    assert len(shown) == 2


def test_what_is_no_store_or_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "no.db").write_text("hello, this is no database at all" * 50)
    for path in (tmp_path / "missing.db", tmp_path / "no.db"):
        with pytest.raises(StoreError):
            StoreReader(str(path))
    with pytest.raises(ConfigError, match=r"host:port/x") as told:
        StoreReader("postgresql://me:secret@host:port/x")
    assert "secret" not in str(told.value)
    with pytest.raises(ConfigError, match="not the folder of a run"):
        runs_in(tmp_path)


def test_traces_outside_of_rollouts_are_listed_and_opened(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "lightning.db"))
    own = {"trace_id": "a" * 32, "origin": "live", "agent": "writer"}
    store.add_spans([
        Span(operation="invoke_agent", name="writer", span_id="1" * 16, start_ns=1, end_ns=9, **own),
        Span(operation="chat", name="m", span_id="2" * 16, parent_id="1" * 16, start_ns=2, end_ns=8, **own),
    ])  # fmt: skip
    store.close()
    ask = Asked(tmp_path)
    assert ask("run")["loose"]
    (trace,) = ask("loose")["traces"]
    assert (trace["name"], trace["calls"], trace["spans"], trace["origin"]) == ("writer", 1, 2, "live")
    page = ask("trace", trace=trace["trace_id"])
    assert [event["name"] for event in page["events"]] == ["writer", "m"]
    assert ask("call", trace=trace["trace_id"], span="2" * 16)["agent"] == "writer"


def test_traces_that_ran_at_the_same_time_are_counted_whole_and_listed_once(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "lightning.db"))
    for place, operation in enumerate(("chat", "chat", "invoke_agent")):  # as many programs at once, or threads, end
        store.add_spans([
            Span(
                operation=operation, name=operation, trace_id=f"{trace:032x}", span_id=f"{trace:08x}{place:08x}",
                parent_id=None if operation == "invoke_agent" else f"{trace:08x}{2:08x}", start_ns=9 - place, end_ns=10,
            )
            for trace in range(1, 71)
        ])  # fmt: skip
    store.close()
    ask = Asked(tmp_path)
    pages = [ask("loose")]
    while pages[-1]["next"] is not None:
        pages.append(ask("loose", before=pages[-1]["next"]))
    traces = [trace for page in pages for trace in page["traces"]]
    assert [trace["trace_id"] for trace in traces] == [f"{number:032x}" for number in range(70, 0, -1)]
    assert {(trace["name"], trace["spans"], trace["calls"]) for trace in traces} == {("invoke_agent", 3, 2)}


def test_a_trace_of_very_many_spans_says_how_many_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "MOST_EVENTS", 3)
    run = make_run(tmp_path / "r", steps=1, groups=1, size=2)
    rollout = Asked(run)("step")["groups"][0]["rollouts"][0]
    lines = printed(run, "--rollout", rollout["rollout_id"])
    page = Asked(run)("rollout", rollout=rollout["rollout_id"])
    counts = [sum(line["operation"] == kind for line in lines) for kind in ("chat", "execute_tool")]
    assert [len(page["events"]), page["spans"], page["calls"], page["tools"]] == [3, len(lines), *counts]


def test_a_long_conversation_is_read_once_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def grows(scene: Scene, skill: float) -> tuple[Any, list[Reward], str | None]:
        agent, messages = scene.agent("writer", None, 900), [user("begin")]
        for number in range(20):
            scene.call(agent, list(messages), assistant(f"answer {number}"))
            messages += [assistant(f"answer {number}"), user(f"go on {number}")]
        scene.call(agent, [user("begin"), user("otherwise")], assistant("yes"))
        return "succeeded", [], None

    run = make_run(tmp_path / "r", steps=1, groups=1, size=2, play=grows)
    marked: list[Any] = []
    mark = transcripts._mark
    monkeypatch.setattr(transcripts, "_mark", lambda message: marked.append(message) or mark(message))
    row = Asked(run)("step")["groups"][0]["rollouts"][0]
    marked.clear()
    calls = [e for e in Asked(run)("rollout", rollout=row["rollout_id"])["events"] if e["turn"] is not None]
    assert [call["known"] for call in calls] == [0, *range(2, 40, 2), 1]
    assert len(marked) == sum(range(1, 41, 2)) + 2 + len(calls)  # each of a prompt, and each answer


def test_pieces_of_letters_are_shown_as_bytes(tmp_path: Path) -> None:
    described = {
        "added_tokens": [{"id": 9, "content": "<|end|>"}],
        "decoder": {"type": "ByteLevel"},
        "model": {"vocab": {"Ġhello": 0, "âĤ": 1, "¬": 2, "âĤ¬": 3}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    pieces = pieces_of([tmp_path / "none", tmp_path])
    assert pieces is not None
    assert pieces.texts([0, 1, 2, 3, 9, 77]) == [" hello", "⟨E2 82⟩", "⟨AC⟩", "€", "<|end|>", "⟨77⟩"]


def test_a_server_shows_the_same_pages(run: Path) -> None:
    from lightning_trainer.gateway.app import create_app
    from lightning_trainer.gateway.auth.keys import Keys
    from lightning_trainer.kits.view.pages import add_view
    from lightning_trainer.kits.view.runs import Runs

    url = str(run / "lightning.db")
    store, keys = open_store(url), Keys.fresh()
    app = create_app(store, keys=keys)
    add_view(app, Views(Runs(store=url)))
    with TestClient(app) as client:
        assert client.get("/view/").headers["content-security-policy"]
        assert client.get("/api/view/run?run=store").status_code == 401
        client.headers["Authorization"] = f"Bearer {keys.issue('viewer')}"
        assert len(client.get("/api/view/run?run=store").json()["steps"]) == 3
        assert client.get("/api/rollouts").status_code == 403  # what looks may not do more
    store.close()


class Told(Silent):
    """Hears notes."""

    def __init__(self) -> None:
        self.notes: Queue[str] = Queue()

    def note(self, text: str) -> None:
        self.notes.put(text)


def test_a_run_is_viewed_from_a_process_of_its_own_once_it_has_begun(run: Path, tmp_path: Path) -> None:
    told = Told()
    with ViewerProgress(told, tmp_path) as progress:
        progress.phase("loading")  # nothing is there yet
    with ViewerProgress(told, run) as progress:
        progress.begin(0, 2)
        url = told.notes.get(timeout=60).removeprefix("look at it: ")
        page, _, key = url.partition("#key=")
        headers = {"Authorization": f"Bearer {key}"}
        (row,) = httpx.get(page.replace("/view/", "/api/view/runs"), headers=headers).json()
        assert row["steps"] == 2
    assert told.notes.empty()
    with pytest.raises(httpx.ConnectError):
        httpx.get(page)


def test_the_viewer_of_a_killed_run_ends_too(run: Path) -> None:
    program = """
import sys, threading
from pathlib import Path
from lightning_trainer.cli.training.viewed import ViewerProgress
from lightning_trainer.report.progress import Silent
class Told(Silent):
    def note(self, text):
        print(text, flush=True)
with ViewerProgress(Told(), Path(sys.argv[1])) as progress:
    progress.begin(0, 2)
    threading.Event().wait()
"""
    pipe = subprocess.PIPE
    trainer = subprocess.Popen([sys.executable, "-c", program, str(run)], stdout=pipe, stderr=pipe, text=True)
    assert trainer.stdout is not None
    assert trainer.stderr is not None
    page = trainer.stdout.readline().strip().removeprefix("look at it: ").partition("#key=")[0]
    assert httpx.get(page).status_code == 200
    trainer.kill()
    trainer.wait()
    trainer.stderr.read()  # to its end: the viewer writes there too
    with pytest.raises(httpx.ConnectError):
        httpx.get(page)
