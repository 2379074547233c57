"""What verl's trainer tells of its steps: the numbers that the torch backend has, the alarms, and who did not speak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import CHAT, EXECUTE_TOOL, TOOL_NAME, Span
from lightning_spans.schema.transitions import Transition
from lightning_trainer.backend_protocol import Start
from lightning_trainer.backends.verl import backend
from lightning_trainer.backends.verl.report import Reporter
from lightning_trainer.backends.verl.steps.empty import EmptyGroups, NothingCollectedError
from lightning_trainer.backends.verl.steps.gathered import GroupCollector, waits_of_step
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.report.metrics import Kind, MetricLog
from lightning_trainer.report.progress import ProgressDisplay, Silent
from lightning_trainer.rl.account import Account, UntrainedReason
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.batch.calls import CountedCall
from lightning_trainer.rl.rollouts import Failed, Outcome
from support.rl.world import World


def options(folder: Path, **more: Any) -> TrainConfig:
    (folder / "tasks.jsonl").write_text("{}\n")
    given = {"target": "a:b", "data": folder / "tasks.jsonl", "model": str(folder), "backend": "verl", "steps": 10}
    return TrainConfig(**{**given, **more})


def gathered(groups: int, *, flat: int) -> GroupCollector:
    """Groups of one rollout that called once and used a tool once, which failed."""
    found = GroupCollector("exclude")
    for number in range(groups):
        ids = {"rollout_id": f"r{number}", "attempt_id": f"r{number}.1"}
        rollout = Rollout(rollout_id=f"r{number}", group_id=f"g{number}", task={})
        attempt = AttemptRecord(
            attempt_id=f"r{number}.1", rollout=rollout, number=1, fence=1, worker="w", status="succeeded"
        )
        reward = Reward(value=0.5, source="run", **ids)
        outcome = Outcome(rollout=rollout, attempt=attempt, attempts=(attempt,), rewards=(reward,))
        call = CountedCall(Transition(agent="solver", turn=0, span_id="s", **ids), f"g{number}", 0.5, 0.0)
        batch = Batch(
            rows=[],
            account=Account(seen=1, dropped={"no tokens recorded": 1}),
            agents={"solver": 1},
            automatic=(Reward(value=-0.1, source="tool_status", agent="solver", span_id="s", **ids),),
            calls=(call,),
            flat_groups=frozenset({f"g{number}"} if number < flat else ()),
        )
        found.add([outcome], batch, [Trace.build([span(CHAT, 1, ids), span(EXECUTE_TOOL, 2, ids)], **ids)])
    return found


def span(operation: str, number: int, ids: dict[str, str]) -> Span:
    return Span(
        trace_id=f"{1:032x}", span_id=f"{number:016x}", parent_id=None, operation=operation, name=operation,
        agent="solver", start_ns=number, end_ns=number + 1, status="error" if operation == EXECUTE_TOOL else "ok",
        attributes={TOOL_NAME: "search"} if operation == EXECUTE_TOOL else {}, **ids,
    )  # fmt: skip


class Told(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.standing: Sequence[str] = ()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stopping(self) -> None:
        pass

    def alarms(self, texts: Sequence[str]) -> None:
        self.standing = texts


def test_numbers_are_those_of_the_torch_backend_and_are_taken_once() -> None:
    found = gathered(4, flat=3)
    numbers, _ = found.take([])
    wanted = {
        "reward": 0.5,
        "rollouts": 4.0,
        "calls_seen": 4.0,
        "groups": 4.0,
        "groups_without_signal": 0.75,
        "reward_source/run": 0.5,
        "reward_source/tool_status": -0.1,
        "calls_per_rollout/solver": 1.0,
        "tool_error_rate/search": 1.0,
    }
    assert {name: numbers[name] for name in wanted} == wanted
    again, _ = found.take([])
    assert (again["rollouts"], again["groups"], "reward" in again) == (0.0, 0.0, False)


@pytest.mark.parametrize(("begun", "rows_first", "limit"), [(False, False, 2), (False, True, 8), (True, False, 8)])
def test_one_batch_without_rows_ends_a_run_that_never_had_some(begun: bool, rows_first: bool, limit: int) -> None:
    empty = EmptyGroups(2)
    nothing = Batch(rows=[], account=Account(seen=1, dropped={"no tokens recorded": 1}), agents={"solver": 1})
    if rows_first:
        empty.add(nothing, [], begun=begun)
        empty.add(replace(nothing, rows=[object()]), [], begun=begun)  # type: ignore[list-item]
    for _ in range(limit - 1):
        empty.add(nothing, [], begun=begun)
    with pytest.raises(NothingCollectedError, match=f"the last {limit} groups .*\n.*solver: 1 calls"):
        empty.add(nothing, [], begun=begun)


@pytest.mark.parametrize("failed", ["exclude", "lowest"])
def test_rewards_of_sources_are_means_over_the_successes_that_count(failed: Failed) -> None:
    world = World()
    for before in ([("writer", "oops")], [("writer", "oops")], None):
        world.rollout("g", [("writer", "w")], {None: 1.0}, failed_before=before)
    world.rollout("g", [("writer", "oops")], None)
    found = GroupCollector(failed)
    found.add(world.outcomes, world.batch(failed=failed), [])
    numbers, _ = found.take([])
    assert numbers["reward_source/run"] == 1.0


def test_dead_groups_raise_an_alarm_and_a_silent_agent_a_warning(tmp_path: Path) -> None:
    progress = Told()
    with closing(MetricLog(tmp_path)) as log:
        reporter = Reporter(log, progress, options(tmp_path, agents="solver,answerer"))
        for step in (1, 2, 3):
            assert not progress.standing
            numbers, _ = gathered(4, flat=4).take([])
            reporter.told("train", step, {f"lightning/{name}": value for name, value in numbers.items()})
        reporter.warn_of_unheard(3)
        assert [alarm.name for alarm in log.raised()] == ["groups_dead"]
    assert progress.standing[0].startswith("In the last 3 steps 100% of the groups had equal rewards")
    assert [note.split(",")[0] for note in progress.notes] == [
        "WARNING: answerer not seen in 1 step",
        "WARNING: answerer not seen in 3 steps",
    ]


@pytest.mark.parametrize(
    ("named", "why"), [(None, "no rollout got a reward"), ("writer", "the rewards name only writer")]
)
def test_a_selected_agent_without_a_reward_is_warned_of_once(tmp_path: Path, named: str | None, why: str) -> None:
    found, progress = GroupCollector("exclude"), Told()
    ids = {"rollout_id": "r", "attempt_id": "r.1"}
    rollout = Rollout(rollout_id="r", group_id="g", task={})
    attempt = AttemptRecord(attempt_id="r.1", rollout=rollout, number=1, fence=1, worker="w", status="succeeded")
    rewards = (Reward(value=0.5, agent=named, **ids),) if named else ()
    outcome = Outcome(rollout=rollout, attempt=attempt, attempts=(attempt,), rewards=rewards)
    missed = CountedCall(
        Transition(agent="solver", turn=0, span_id="s", **ids), "g", 0.0, 0.0, left_out=UntrainedReason.NO_REWARD
    )
    batch = Batch(rows=[], account=Account(), agents={"solver": 1}, calls=(missed,), given=rewards)
    with closing(MetricLog(tmp_path)) as log:
        reporter = Reporter(log, progress, options(tmp_path))
        for step in (1, 2):
            found.add([outcome], batch, [])
            numbers, _ = found.take([])
            reporter.told("train", step, {f"lightning/{name}": value for name, value in numbers.items()})
        assert not [name for line in log.lines("train") for name in line if "unrewarded" in name]
    assert progress.notes == [f"WARNING: no reward for solver, so nothing is learned there: {why}. Reward solver too."]


S = 10**9


def test_step_says_what_it_waited_for_and_after_five_what_to_change(tmp_path: Path) -> None:
    """verl's phases: of 20 s the program takes 12, its one call 4, log-probabilities and update 2, weights 0.5."""
    found = GroupCollector("exclude")
    ids = {"rollout_id": "r", "attempt_id": "r.1"}
    rollout = Rollout(rollout_id="r", group_id="g", task={})
    attempt = AttemptRecord(
        attempt_id="r.1", rollout=rollout, number=1, fence=1, worker="w", status="succeeded", started_ns=0,
        ended_ns=16 * S,
    )  # fmt: skip
    call = Call(call_id="c", response_id="c", start_ns=0, end_ns=4 * S, policy="p", policy_version=0, **ids)
    trace = Trace.build([], [call], **ids)
    batch = Batch(rows=[], account=Account(), agents={})
    found.add([Outcome(rollout=rollout, attempt=attempt, attempts=(attempt,))], batch, [trace])
    _, rollouts = found.take([(0, 17 * S)])
    timing = {"step": 20.0, "gen": 17.5, "old_log_prob": 0.5, "update_actor": 1.5, "update_weights": 0.5}
    parts = waits_of_step(rollouts, timing, 100.0)
    progress = Told()
    with closing(MetricLog(tmp_path)) as log:
        reporter = Reporter(log, progress, options(tmp_path, concurrency=8))
        told = {
            "timing_s/step": 20.0, "actor/perf/max_memory_allocated_gb": 2.0,
            **{f"lightning/{name}": value for name, value in parts.items()},
        }  # fmt: skip
        for step in range(1, 7):
            reporter.told("train", step, told)
        line = dict(log.lines("train")[0])
    assert {name: line[f"waited_for/{name}"] for name in ("sampling", "program", "learner", "weights", "other")} == {
        "sampling": 4.0, "program": 12.0, "learner": 2.0, "weights": 0.5, "other": 1.5,
    }  # fmt: skip
    assert (line["waited_for"], line["tokens_per_second"], line["gpu_memory_bytes"]) == ("program", 25.0, 2 * 1024**3)
    assert progress.notes == [
        (
            "Bottleneck: the program outside of model calls takes 60% of a step of 20.0 s. Start the next step's"
            " rollouts early with --staleness 1, or raise --concurrency (8)."
        )
    ]


def test_progress_knows_how_many_steps_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = options(tmp_path)
    told = Begun()
    run = SimpleNamespace(config=config, folder=tmp_path, log=None, progress=told, steps=10, start=Start(step=3))
    run.identity, run.begin, run.check, run.runner = {}, lambda: None, lambda: None, SimpleNamespace(check=None)
    monkeypatch.setattr(backend, "replace", lambda given, **_: given)
    monkeypatch.setattr(backend, "resolve_model", lambda config, fetch: config)
    monkeypatch.setattr(backend, "serving", lambda run, reporter: nullcontext())
    monkeypatch.setattr(backend, "run_verl", lambda config, site, check: told.step(3, {}))
    monkeypatch.setattr(backend.Reporter, "warn_of_unheard", lambda self, steps: None)
    assert backend.VerlBackend().train(run) == 10  # type: ignore[arg-type]
    assert told.shown == ["4/10"]


@pytest.mark.parametrize(("kind", "numbers"), [("val", {"reward": 0.5, "rollouts": 2.0}), ("train", {"reward": 0.5})])
def test_ctrl_c_once_verl_works_says_that_it_ends_at_once_and_what_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: Kind, numbers: dict[str, float]
) -> None:
    progress = ProgressDisplay("training")
    progress.phase("starting verl and vLLM")
    progress.stopping()
    assert "starting verl and vLLM will be cancelled. Press Ctrl-C again to quit now.\n" in capfd.readouterr().err
    with closing(MetricLog(tmp_path)) as log:
        Reporter(log, progress, options(tmp_path)).told(kind, 0 if kind == "val" else 2, numbers)
    capfd.readouterr()
    progress.stopping()
    assert capfd.readouterr().err == (
        "\nstopping: rollouts and learning on verl will be cancelled, which loses everything after the last checkpoint"
        " (or the whole run, if there is none yet). Press Ctrl-C again to quit now.\n"
    )


class Begun(Silent):
    """Counts as `Shown` does."""

    def __init__(self) -> None:
        self.steps, self.shown = 0, list[str]()

    def begin(self, step: int, steps: int) -> None:
        self.steps = steps

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.shown.append(f"{step + 1}/{self.steps}")
