"""Groups of rollouts on the way to verl: watched together, handed on one by one, never waited for without a bound."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from lightning_spans.errors import LightningError
from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import Store, open_store
from lightning_trainer.backends.verl.steps import groups as module
from lightning_trainer.backends.verl.steps.groups import Groups
from lightning_trainer.rl.rollouts import REWARD_ERROR, Outcome


@pytest.fixture
def store(tmp_path):
    opened = open_store(str(tmp_path / "lightning.db"))
    yield opened
    opened.close()


def group(name: str, size: int = 2, timeout_s: float | None = 5.0) -> list[Rollout]:
    return [
        Rollout(rollout_id=f"{name}-{member}", group_id=name, task={}, timeout_s=timeout_s, max_attempts=1)
        for member in range(size)
    ]


def end(store: Store, rollout: Rollout, *, status: str = "succeeded", error: str | None = None) -> None:
    store.claim("worker", limit=100)
    (attempt,) = store.attempts(rollout_ids=[rollout.rollout_id])
    reward = Reward(rollout_id=rollout.rollout_id, attempt_id=attempt.attempt_id, value=1.0)
    rewards = [reward] if status == "succeeded" else []
    store.finish(attempt.attempt_id, attempt.fence, status=status, rewards=rewards, error=error)


def until(condition) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_group_is_handed_on_when_all_of_it_has_ended_and_not_before(store):
    watching, seen = Groups(store, poll_s=0.01), []
    first, second = group("a"), group("b")
    watching.add(first, seen.append)
    watching.add(second, seen.append)
    end(store, first[0])
    end(store, second[0])
    end(store, second[1])
    until(lambda: seen)
    assert [[outcome.rollout.rollout_id for outcome in outcomes] for outcomes in seen] == [["b-0", "b-1"]]
    assert [outcome.rewards[0].value for outcome in seen[0]] == [1.0, 1.0]
    end(store, first[1])
    until(lambda: len(seen) == 2)


def test_groups_are_judged_at_once_and_handed_on_with_what_the_judge_said(store):
    both, seen = threading.Barrier(2, timeout=60), []

    def judging(ended: list[Outcome]) -> list[Outcome]:
        both.wait()  # neither waits for the other
        return [replace(outcome, unjudged="nonsense") for outcome in ended]

    watching = Groups(store, poll_s=0.01, judging=judging, at_once=2)
    for rollouts in (group("a", size=1), group("b", size=1)):
        watching.add(rollouts, seen.append)
        end(store, rollouts[0])
    until(lambda: len(seen) == 2)
    assert [outcome.unjudged for outcomes in seen for outcome in outcomes] == ["nonsense", "nonsense"]


def test_a_judge_that_can_not_be_asked_ends_the_run_with_the_reason(store):
    def judging(ended: list[Outcome]) -> list[Outcome]:
        raise LightningError("the run's server does not answer")

    watching = Groups(store, poll_s=0.01, judging=judging)
    [rollout] = group("a", size=1)
    watching.add([rollout], lambda _: None)
    end(store, rollout)
    until(lambda: failing(watching))
    with pytest.raises(LightningError, match="does not answer"):
        watching.check()


def test_a_rollout_that_failed_is_an_outcome_too(store):
    watching, seen = Groups(store, poll_s=0.01), []
    rollouts = group("a")
    watching.add(rollouts, seen.append)
    end(store, rollouts[0])
    end(store, rollouts[1], status="failed", error="boom")
    until(lambda: seen)
    assert [outcome.error for outcome in seen[0]] == [None, "boom"]


def test_an_agent_that_gives_no_reward_ends_the_run_with_the_reason(store):
    watching = Groups(store, poll_s=0.01)
    rollouts = group("a", size=1)
    watching.add(rollouts, lambda _: None)
    end(store, rollouts[0], status="failed", error=f"{REWARD_ERROR}reward is None.")
    until(lambda: failing(watching))
    with pytest.raises(LightningError, match="reward is None"):
        watching.check()


def failing(watching: Groups) -> bool:
    try:
        watching.check()
    except LightningError:
        return True
    return False


def test_rollouts_that_nobody_runs_are_not_waited_for_for_ever(store, monkeypatch):
    monkeypatch.setattr(module, "SLACK_S", 0.05)
    watching = Groups(store, poll_s=0.01)
    watching.add(group("a", timeout_s=0.05), lambda _: None)
    until(lambda: failing(watching))
    with pytest.raises(LightningError, match="Is a runner running"):
        watching.check()
    with pytest.raises(LightningError):
        watching.add(group("b"), lambda _: None)


def test_what_fails_while_rows_are_made_reaches_the_trainer(store):
    def fail(_: list[Outcome]) -> None:
        raise ValueError("a row")

    watching = Groups(store, poll_s=0.01)
    rollouts = group("a", size=1)
    watching.add(rollouts, fail)
    end(store, rollouts[0])
    until(lambda: failing(watching))
    with pytest.raises(LightningError, match="ValueError: a row"):
        watching.check()
