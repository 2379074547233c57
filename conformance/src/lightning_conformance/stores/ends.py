"""What every store promises about the ends of attempts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from lightning_conformance.stores.claims import SHORT_S, claim_alone, outlive_lease, status_of
from lightning_conformance.stores.samples import a_reward, a_rollout
from lightning_spans.errors import LeaseLostError, RefusedError, RewardError
from lightning_spans.schema.attempts import FAILED, UNCOUNTED, UNCOUNTED_MOST, AttemptStatus, End
from lightning_spans.store import Store


class EndPromises:
    """An attempt ends once, with its rewards; a failed one is retried while attempts are left."""

    def test_a_late_result_of_a_lost_lease_is_refused(self, store: Store) -> None:
        """If it fails: compare the fence inside the transaction, and keep no reward of a refused result."""
        rollout = a_rollout()
        late = outlive_lease(store, rollout)
        store.claim("other")
        reward = a_reward(rollout_id=rollout.rollout_id, attempt_id=late.attempt_id)
        with pytest.raises(LeaseLostError):
            store.finish(late.attempt_id, late.fence, status="succeeded", rewards=[reward])
        assert store.rewards(rollout_ids=[rollout.rollout_id]) == []
        assert status_of(store, rollout) == "running"

    def test_a_wrong_fence_is_refused(self, store: Store) -> None:
        """If it fails: the attempt's id alone proves nothing."""
        attempt = claim_alone(store, a_rollout())
        for fence in (attempt.fence - 1, attempt.fence + 1):
            with pytest.raises(LeaseLostError):
                store.finish(attempt.attempt_id, fence, status="succeeded")

    def test_an_end_and_its_rewards_are_one(self, store: Store, reopen: Callable[[], Store]) -> None:
        """If it fails: write status and rewards in one transaction, so that none is seen without the other."""
        rollout = a_rollout()
        attempt = claim_alone(store, rollout)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": attempt.attempt_id}
        rewards = [a_reward(value=0.1, **ids), a_reward(value=1.0, agent="writer", source="score", **ids)]
        assert store.finish(attempt.attempt_id, attempt.fence, status="succeeded", rewards=rewards) == "succeeded"
        store.close()
        again = reopen()
        assert again.rewards(rollout_ids=[rollout.rollout_id]) == rewards
        (kept,) = again.attempts(attempt_ids=[attempt.attempt_id])
        assert (kept.status, kept.rollout.status) == ("succeeded", "succeeded")
        assert kept.ended_ns is not None
        assert again.claim("worker") == []

    def test_the_same_end_told_twice_counts_once(self, store: Store) -> None:
        """If it fails: answer a repeated end as before and write nothing; an answer can be lost on the way."""
        rollout = a_rollout(max_attempts=5)
        attempt = claim_alone(store, rollout)
        reward = a_reward(rollout_id=rollout.rollout_id, attempt_id=attempt.attempt_id)
        for _ in range(2):
            assert store.finish(attempt.attempt_id, attempt.fence, status="failed", rewards=[reward]) == "queued"
        assert len(store.claim("worker", limit=5)) == 1
        again = a_reward(rollout_id=rollout.rollout_id, attempt_id=attempt.attempt_id)
        assert store.finish(attempt.attempt_id, attempt.fence, status="failed", rewards=[again]) == "running"
        assert store.claim("worker") == []
        assert store.rewards(rollout_ids=[rollout.rollout_id]) == [reward]

    def test_several_ends_are_answered_each_for_itself(self, store: Store) -> None:
        """If it fails: a refused end must neither change anything nor affect the others sent with it."""
        rollouts = [a_rollout(max_attempts=1) for _ in range(4)]
        store.enqueue(rollouts)
        one, two, three, four = store.claim("worker", limit=4)
        reward = a_reward(rollout_id=one.rollout.rollout_id, attempt_id=one.attempt_id)
        bad = a_reward(rollout_id=four.rollout.rollout_id, attempt_id=four.attempt_id, value=math.nan)
        ends = [
            End(one.attempt_id, one.fence, "succeeded", [reward]),
            End(two.attempt_id, two.fence + 1, "succeeded"),
            End(three.attempt_id, three.fence, "failed", error="it broke"),
            End(one.attempt_id, one.fence, "succeeded", [reward]),
            End(one.attempt_id, one.fence, "failed"),
            End("nobody's", 1, "succeeded"),
            End(four.attempt_id, four.fence, "succeeded", [bad]),
        ]
        told = store.finish_all(ends)
        assert [told[place] for place in (0, 2, 3)] == ["succeeded", "failed", "succeeded"]
        assert [type(told[place]) for place in (1, 4, 5, 6)] == [
            LeaseLostError, LeaseLostError, RefusedError, RewardError,
        ]  # fmt: skip
        ids = [rollout.rollout_id for rollout in rollouts]
        assert [one.status for one in store.rollouts(rollout_ids=ids)] == ["succeeded", "running", "failed", "running"]
        assert store.rewards(rollout_ids=ids) == [reward]
        assert [one.error for one in store.attempts(rollout_ids=ids)] == [None, None, "it broke", None]
        assert store.finish_all([]) == []

    def test_many_who_end_at_once_are_all_answered(self, store: Store) -> None:
        """If it fails: calls that are processed together must each get their own answer."""
        rollouts = [a_rollout() for _ in range(60)]
        store.enqueue(rollouts)
        taken = store.claim("worker", limit=60)

        def end(place: int) -> str:
            attempt = taken[place]
            try:
                return store.finish(attempt.attempt_id, attempt.fence + (place % 5 == 0), status="succeeded")
            except LeaseLostError as error:
                return "refused" if attempt.attempt_id in str(error) else str(error)

        with ThreadPoolExecutor(16) as pool:
            told = list(pool.map(end, range(60)))
        assert told == ["succeeded" if place % 5 else "refused" for place in range(60)]

    def test_another_end_after_the_end_is_refused(self, store: Store) -> None:
        """If it fails: an attempt ends once; a second, different end must not overwrite the first."""
        attempt = claim_alone(store, a_rollout())
        store.finish(attempt.attempt_id, attempt.fence, status="succeeded")
        with pytest.raises(LeaseLostError):
            store.finish(attempt.attempt_id, attempt.fence, status="failed")

    @pytest.mark.parametrize("status", ["failed", "timeout", "lost"])
    def test_a_failed_attempt_is_retried_while_attempts_are_left(self, store: Store, status: AttemptStatus) -> None:
        """If it fails: queue the rollout again until max_attempts attempts have begun, then fail it."""
        rollout = a_rollout(max_attempts=2)
        first = claim_alone(store, rollout)
        assert store.finish(first.attempt_id, first.fence, status=status, error="it broke") == "queued"
        (second,) = store.claim("worker")
        assert second.failures == (status in FAILED)
        assert store.finish(second.attempt_id, second.fence, status=status) == "failed"
        assert [a.error for a in store.attempts(rollout_ids=[rollout.rollout_id])] == ["it broke", None]
        assert store.claim("worker") == []

    def test_a_rollout_is_not_tried_again_after_a_final_end(self, store: Store) -> None:
        """If it fails: an end with `final` must fail the rollout even if it has tries left."""
        rollout = a_rollout(max_attempts=3)
        attempt = claim_alone(store, rollout)
        end = End(attempt.attempt_id, attempt.fence, "failed", error="it broke", final=True)
        assert store.finish_all([end]) == ["failed"]
        assert store.finish_all([end]) == ["failed"]
        assert store.claim("worker") == []

    @pytest.mark.parametrize("status", UNCOUNTED)
    def test_an_end_without_fault_uses_up_no_try(self, store: Store, status: AttemptStatus) -> None:
        """If it fails: tries that ended released or disturbed do not count towards max_attempts; others do."""
        rollout = a_rollout(max_attempts=1)
        attempt = claim_alone(store, rollout)
        for number in (2, 3):
            assert store.finish(attempt.attempt_id, attempt.fence, status=status) == "queued"
            (attempt,) = store.claim("worker")
            assert (attempt.number, attempt.disturbed) == (number, number - 1 if status == "disturbed" else 0)
            assert attempt.failures == 0
        assert store.finish(attempt.attempt_id, attempt.fence, status="failed") == "failed"

    def test_ends_without_fault_are_bounded(self, store: Store) -> None:
        """If it fails: after UNCOUNTED_MOST of them each one counts, or a rollout could be retried forever."""
        rollout = a_rollout(max_attempts=1)
        attempt = claim_alone(store, rollout)
        for _ in range(UNCOUNTED_MOST):
            assert store.finish(attempt.attempt_id, attempt.fence, status="disturbed") == "queued"
            (attempt,) = store.claim("worker")
        assert store.finish(attempt.attempt_id, attempt.fence, status="disturbed") == "failed"

    def test_a_lease_that_ran_out_after_an_end_without_fault_is_the_first_try(self, store: Store) -> None:
        """If it fails: count the tries of an expired attempt like those of one that ended."""
        rollout = a_rollout(max_attempts=2)
        attempt = claim_alone(store, rollout)
        store.finish(attempt.attempt_id, attempt.fence, status="released")
        store.claim("worker", lease_s=SHORT_S)
        time.sleep(2 * SHORT_S)
        assert [a.number for a in store.claim("worker")] == [3]

    def test_an_end_that_makes_no_sense_changes_nothing(self, store: Store) -> None:
        """If it fails: check attempt, status and rewards before anything is written."""
        rollout = a_rollout()
        attempt = claim_alone(store, rollout)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": attempt.attempt_id}
        with pytest.raises(RefusedError):
            store.finish("nobody's", 1, status="succeeded")
        with pytest.raises(RefusedError):
            store.finish(attempt.attempt_id, attempt.fence, status="running")
        with pytest.raises(RefusedError):
            store.finish(attempt.attempt_id, attempt.fence, status="succeeded", rewards=[a_reward()])
        bad = [a_reward(**ids), a_reward(value=float("nan"), **ids)]
        with pytest.raises(RewardError):
            store.finish(attempt.attempt_id, attempt.fence, status="succeeded", rewards=bad)
        assert status_of(store, rollout) == "running"
        assert store.rewards(rollout_ids=[rollout.rollout_id]) == []
