from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_spans.errors import LightningError, RewardError
from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import Store, open_store
from lightning_trainer.intervals import estimate_mean
from lightning_trainer.report.progress import Silent
from lightning_trainer.rl import rollouts as module
from lightning_trainer.rl.rollouts import Outcome, StalledError, outcomes, plan, wait
from lightning_trainer.rl.scores import Score, constant_rewards, difference, score, total
from lightning_trainer.session.answers import AnswerSource
from lightning_trainer.session.session import Session


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(str(tmp_path / "store.db"))
    yield store
    store.close()


def batch(tasks: int = 1, size: int = 2, max_attempts: int = 2) -> list[Rollout]:
    rows = [{"n": number} for number in range(tasks)]
    return plan(rows, name="run:t0", size=size, mode="train", max_attempts=max_attempts, timeout_s=10.0)


def end(store: Store, status: str, value: float | None = None, error: str | None = None) -> AttemptRecord:
    """Run the rollout that waits longest."""
    [attempt] = store.claim("worker", limit=1)
    ids = {"rollout_id": attempt.rollout.rollout_id, "attempt_id": attempt.attempt_id}
    rewards = [] if value is None else [Reward(value=value, **ids)]
    store.finish(attempt.attempt_id, attempt.fence, status=status, rewards=rewards, error=error)  # type: ignore[arg-type]
    return attempt


def wait_for(store: Store, rollouts: list[Rollout], told: list[int] | None = None) -> None:
    wait(
        store,
        rollouts,
        check=lambda: None,
        describe=lambda: "worker 7 runs 1: run:t0-0-0",
        on_progress=(told if told is not None else []).append,
        poll_s=0.01,
    )


def test_each_place_in_a_batch_is_a_group_even_of_the_same_task() -> None:
    rollouts = plan([{"q": 1}, {"q": 1}], name="run:t3", size=3, mode="train", max_attempts=1, timeout_s=None)
    assert [r.group_id for r in rollouts] == ["run:t3-0"] * 3 + ["run:t3-1"] * 3
    assert len({r.rollout_id for r in rollouts}) == 6


def test_waits_until_all_have_ended_and_tells_how_many_have(store: Store) -> None:
    rollouts, told = batch(), []
    store.enqueue(rollouts)
    end(store, "succeeded", 1.0)
    end(store, "failed", error="no")
    end(store, "failed", error="again")
    wait_for(store, rollouts, told)
    assert told == [2]


def test_attempt_without_a_usable_reward_stops_the_wait_and_shows_its_task(store: Store) -> None:
    rollouts = batch()
    store.enqueue(rollouts)
    end(store, "failed", error="RewardError: reward is None. Return a number.")
    with pytest.raises(RewardError, match=r"reward is None\. Return a number\.\nThe task was \{'n': 0\}"):
        wait_for(store, rollouts)


def test_wait_that_nothing_ends_is_an_error_that_names_what_stalls(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLACK_S", -9.8)
    rollouts = batch()
    store.enqueue(rollouts)
    [attempt] = store.claim("worker-a", limit=1)
    with pytest.raises(StalledError, match="1 rollouts wait and 1 run") as caught:
        wait_for(store, rollouts)
    assert attempt.attempt_id in str(caught.value)
    assert "worker-a" in str(caught.value)
    assert "worker 7 runs 1" in str(caught.value)


def test_busy_workers_do_not_stall_while_rollouts_queued_before_end(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that only `sleep` moves, by less than a rollout may take; meanwhile the runner ends one rollout."""
    runner = SimpleNamespace(check=lambda: None, wake=lambda: None, describe=lambda: "worker 7 runs 1", ended=0)
    session = Session(store=store, runner=runner, url="", app=None, answers=AnswerSource())  # type: ignore[arg-type]
    ahead = batch(tasks=4, size=1)
    held_out = plan([{}], name="run.0:v", size=1, mode="val", max_attempts=1, timeout_s=10.0)
    session.queue(ahead)
    session.queue(held_out)
    seconds = 0.0

    def sleep(_: float) -> None:
        nonlocal seconds
        seconds += 40.0
        end(store, "succeeded", 1.0)
        runner.ended += 1

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: seconds, sleep=sleep))
    [outcome] = session.wait(held_out, Silent(), "validation")
    assert outcome.attempt is not None
    assert seconds == 200.0, "more than the 70 s in which one rollout has to end"


def test_check_ends_the_wait(store: Store) -> None:
    def check() -> None:
        raise LightningError("the runner died")

    rollouts = batch()
    store.enqueue(rollouts)
    with pytest.raises(LightningError, match="the runner died"):
        wait(store, rollouts, check=check, describe=str, on_progress=lambda _: None)


def test_only_the_successful_attempt_of_a_rollout_counts(store: Store) -> None:
    rollouts = batch(size=1)
    store.enqueue(rollouts)
    end(store, "failed", -5.0, error="first try")
    second = end(store, "succeeded", 1.0)
    [outcome] = outcomes(store, rollouts)
    assert outcome.attempt is not None
    assert outcome.attempt.attempt_id == second.attempt_id
    assert [reward.value for reward in outcome.rewards] == [1.0]
    assert [attempt.status for attempt in outcome.attempts] == ["failed", "succeeded"]
    assert outcome.error is None


def test_rollout_that_never_succeeded_keeps_its_last_error_and_no_reward(store: Store) -> None:
    rollouts = batch(size=1)
    store.enqueue(rollouts)
    end(store, "failed", error="first")
    end(store, "timeout", error="second")
    [outcome] = outcomes(store, rollouts)
    assert (outcome.attempt, outcome.rewards, outcome.error) == (None, (), "second")


def test_outcomes_keep_the_order_of_the_rollouts(store: Store) -> None:
    rollouts = batch(tasks=2)
    store.enqueue(rollouts)
    for value in range(4):
        end(store, "succeeded", float(value))
    found = outcomes(store, list(reversed(rollouts)))
    assert [o.rollout.rollout_id for o in found] == [r.rollout_id for r in reversed(rollouts)]
    assert [o.rewards[0].value for o in found] == [3.0, 2.0, 1.0, 0.0]


def outcome(*rewards: tuple[str | None, float], failed: bool = False, crashed: bool = False) -> Outcome:
    rollout = batch(size=1)[0]
    attempt = AttemptRecord(attempt_id="a", rollout=rollout, number=1, fence=1, worker="w")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": "a"}
    return Outcome(
        rollout=rollout,
        attempt=None if failed or crashed else attempt,
        attempts=(attempt,),
        crash=attempt if crashed else None,
        rewards=tuple(Reward(agent=agent, value=value, **ids) for agent, value in rewards),
    )


def test_total_is_the_shared_rewards_and_the_mean_of_the_agents_own() -> None:
    assert total(outcome((None, 1.0), (None, 0.5)).rewards) == 1.5
    assert total(outcome(("writer", 1.0), ("rewriter", 0.0)).rewards) == 0.5
    assert total(outcome((None, 1.0), ("writer", 1.0), ("writer", 1.0), ("rewriter", 0.0)).rewards) == 2.0


def test_score_leaves_failures_out_or_counts_them_as_told() -> None:
    found = [outcome((None, 1.0)), outcome((None, 0.0)), outcome(crashed=True)]
    told = score(found, "exclude")
    assert (told.reward, told.rollouts, told.failed, told.tasks) == (0.5, 3, 1, 1)
    assert score(found, -1.0).reward == 0.0
    assert told.reward_all == pytest.approx(1 / 3)
    assert score([outcome(failed=True)], "exclude").reward is None
    assert score([outcome(failed=True)], -1.0).reward is None, "no policy made it fail"


def test_a_task_that_a_step_takes_several_times_is_one_task_of_its_score() -> None:
    """Eight places of two tasks say no more than two tasks do."""
    rollouts = plan(
        [{"q": 1, "kind": "a"}, {"kind": "a", "q": 1}, {"q": 2}],
        name="run:t0", size=1, mode="train", max_attempts=1, timeout_s=None,
    )  # fmt: skip
    found = [
        replace(outcome((None, value)), rollout=each) for value, each in zip((1.0, 0.0, 0.5), rollouts, strict=True)
    ]
    told = score(found, "exclude")
    assert (told.reward, told.tasks) == (0.5, 2)
    once = estimate_mean([0.5, 0.5])
    assert (told.low, told.high) == (once.low, once.high)


def test_a_score_is_that_of_the_agents_that_are_trained() -> None:
    found = [
        outcome(("router", 1.0), ("writer", 0.0)),
        outcome(("router", 0.0), ("writer", 0.0), (None, 0.5)),
        outcome(("writer", 0.0)),  # says nothing of the router
    ]
    assert score(found, "exclude", ["router"]).reward == 0.75
    assert score(found, "exclude", ["rout*", "writer"]).reward == score(found, "exclude").reward
    assert score(found, "exclude", ["nobody"]).reward == score(found, "exclude").reward
    assert score([outcome((None, 0.5))], "exclude", ["router"]).reward == 0.5
    shared = outcome(("writer", 1.0), (None, 0.5))
    assert score([shared, outcome(("router", 0.0))], "exclude", ["router"]).reward == 0.25


def test_two_scores_are_compared_by_task_and_agent() -> None:
    def scored(*rewards: tuple[float, float]) -> Score:
        found = []
        for number, (router, writer) in enumerate(rewards):
            each = outcome(("router", router), ("writer", writer))
            found.append(replace(each, rollout=replace(each.rollout, task={"q": number})))
        return score(found, "exclude", ["router"])

    before, after = scored((0.0, 1.0), (0.2, 1.0), (0.4, 0.0)), scored((0.5, 1.0), (0.2, 0.0))
    assert [difference(after, before, name)[0].mean for name in ("", "router", "writer")] == pytest.approx(
        [0.25, 0.25, -0.5]
    )
    assert difference(after, before)[1] == 2


def test_score_by_agent_counts_only_rollouts_in_which_it_got_a_reward() -> None:
    found = score([outcome(("writer", 1.0), ("rewriter", 0.0)), outcome(("writer", 0.0))], "exclude")
    assert found.by_agent == {"rewriter": 0.0, "writer": 0.5}


def test_an_agent_that_earns_the_same_in_every_rollout_is_named() -> None:
    found = [outcome(("router", 0.0), ("writer", 1.0)), outcome(("router", 0.0), ("writer", 0.5)), outcome(failed=True)]
    agents = ["router", "writer", "checker"]
    assert constant_rewards(found, agents) == {"router": 0.0}
    assert constant_rewards(found[:1], agents) == {}, "one rollout says nothing"
    assert constant_rewards([*found, outcome(("router", 0.0), (None, 1.0))], agents) == {}, "it shares what all earn"


def test_score_comes_back_from_its_metrics() -> None:
    found = score([outcome(("writer", 1.0), ("rewriter", 0.0)), outcome(failed=True)], "exclude")
    assert Score.from_metrics({**found.metrics(), "loss": 1.0}) == found


def test_waiting_reads_no_task_and_an_error_still_shows_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts, read = batch(tasks=2, size=4), list[object]()
    store.enqueue(rollouts)
    page = type(store).page

    def recorded(self: Store, *args: object, **more: object) -> object:
        found = page(self, *args, **more)  # type: ignore[arg-type]
        read.extend(found.records)
        return found

    monkeypatch.setattr(type(store), "page", recorded)

    def check() -> None:
        if len(read) > 20:
            end(store, "failed", error="RewardError: reward is None.")

    with pytest.raises(RewardError, match=r"The task was \{'n': 0\}"):
        wait(store, rollouts, check=check, describe=str, on_progress=lambda _: None, poll_s=0.0)
    assert read
    assert not [record for record in read if isinstance(record, (Rollout, AttemptRecord))]
