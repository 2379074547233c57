"""What every store promises about the queue of rollouts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given

from lightning_spans.errors import LeaseLostError, RefusedError, RewardError
from lightning_spans.schema.attempts import (
    FAILED,
    UNCOUNTED,
    UNCOUNTED_MOST,
    AttemptRecord,
    AttemptStatus,
    End,
    Rollout,
    RolloutStatus,
)
from lightning_spans.store import Store
from lightning_spans.testing.stores import samples
from lightning_spans.testing.stores.samples import ANY, a_reward, a_rollout, a_span, an_id

_SHORT_S = 0.02  # a lease that runs out while a test sleeps


def _claimed(store: Store, rollout: Rollout, *, lease_s: float = 60.0) -> AttemptRecord:
    """Queue a rollout, alone in the queue, and claim it."""
    store.enqueue([rollout])
    (attempt,) = store.claim("worker", lease_s=lease_s)
    assert attempt.rollout.rollout_id == rollout.rollout_id
    return attempt


def _outlived(store: Store, rollout: Rollout) -> AttemptRecord:
    """Claim a rollout and let the lease run out."""
    attempt = _claimed(store, rollout, lease_s=_SHORT_S)
    time.sleep(2 * _SHORT_S)
    return attempt


def _status(store: Store, rollout: Rollout) -> RolloutStatus:
    return store.rollouts(rollout_ids=[rollout.rollout_id])[0].status


class QueuePromises:
    """Each rollout is run by one at a time, none is forgotten, and late results are refused."""

    @ANY
    @given(rollout=samples.rollouts())
    def test_rollouts_come_back_as_they_went_in(self, store: Store, rollout: Rollout) -> None:
        """If it fails: find the field whose column or JSON form loses something."""
        assert store.enqueue([rollout]) == 1
        assert store.rollouts(rollout_ids=[rollout.rollout_id]) == [rollout]
        assert store.rollouts(group_ids=[rollout.group_id], status="queued") == [rollout]
        assert store.rollouts(group_ids=[rollout.group_id], status="failed") == []

    def test_a_rollout_queued_twice_is_queued_once(self, store: Store) -> None:
        """If it fails: rollout_id must be unique, and a second one leaves the first as it is, ended or not."""
        rollout = a_rollout()
        assert store.enqueue([rollout, rollout]) == 1
        (attempt,) = store.claim("worker", limit=5)
        store.finish(attempt.attempt_id, attempt.fence, status="succeeded")
        assert store.enqueue([rollout]) == 0
        assert _status(store, rollout) == "succeeded"

    def test_rollouts_of_a_generator_are_queued(self, store: Store) -> None:
        """If it fails: they were read to be checked, and nothing was left to be queued."""
        rollout = a_rollout()
        assert store.enqueue(each for each in [rollout]) == 1  # type: ignore[arg-type]  # what a program may do
        store.cancel([rollout.rollout_id])

    def test_a_rollout_without_attempts_is_refused(self, store: Store) -> None:
        """If it fails: max_attempts below 1 could never end; refuse it when it is queued."""
        with pytest.raises(RefusedError, match="max_attempts"):
            store.enqueue([a_rollout(max_attempts=0)])

    @pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf, -math.inf])
    def test_a_rollout_without_time_is_refused(self, store: Store, timeout_s: float) -> None:
        """If it fails: such an attempt is over before it begins, or its timer never rings; refuse it when queued."""
        with pytest.raises(RefusedError, match="timeout_s"):
            store.enqueue([a_rollout(timeout_s=timeout_s)])

    def test_a_rollout_without_an_id_is_refused(self, store: Store) -> None:
        """If it fails: nobody could ask for it; refuse it when it is queued."""
        with pytest.raises(RefusedError, match="rollout_id"):
            store.enqueue([a_rollout(rollout_id="")])

    def test_the_oldest_are_claimed_first_and_no_more_than_asked(self, store: Store) -> None:
        """If it fails: order by the queue, not by id or status."""
        rollouts = [a_rollout() for _ in range(5)]
        store.enqueue(rollouts)
        taken = store.claim("worker", limit=2) + store.claim("worker", limit=9)
        assert [attempt.rollout.rollout_id for attempt in taken] == [rollout.rollout_id for rollout in rollouts]
        assert store.claim("worker") == []

    def test_a_claim_within_a_scope_leaves_what_others_queued(self, store: Store) -> None:
        """If it fails: two runs on one store run each other's rollouts. Begin means begin: no wildcards, same case."""
        theirs, wanted, more, upper = (a_rollout(rollout_id=f"{an_id()}{end}") for end in ("", "_%:a", "é:b", "_%:A"))
        store.enqueue([theirs, wanted, more, upper])
        assert store.claim("worker", limit=9, within=[]) == []
        assert store.claim("worker", limit=9, within=[wanted.rollout_id[:-1] + "A", "%", "_"]) == []
        taken = store.claim("worker", limit=9, within=[wanted.rollout_id[:-1], more.rollout_id[:-1]])
        assert [attempt.rollout.rollout_id for attempt in taken] == [wanted.rollout_id, more.rollout_id]
        rest = store.claim("worker", limit=9)
        assert [attempt.rollout.rollout_id for attempt in rest] == [theirs.rollout_id, upper.rollout_id]

    def test_what_a_lost_lease_left_stays_within_its_scope(self, store: Store) -> None:
        """If it fails: a retry is claimed by whoever comes, whose rollout it is not."""
        late = _outlived(store, a_rollout(rollout_id=f"{an_id()}:a"))
        assert store.claim("other", within=[an_id()]) == []
        (again,) = store.claim("worker", within=[late.rollout.rollout_id])
        assert again.number == 2

    def test_a_claim_tells_what_to_run(self, store: Store) -> None:
        """If it fails: give the rollout with its task, and keep the attempt as given."""
        rollout = a_rollout()
        attempt = _claimed(store, rollout)
        assert (attempt.number, attempt.worker, attempt.status) == (1, "worker", "running")
        assert (attempt.rollout.task, attempt.rollout.status) == (rollout.task, "running")
        assert attempt.lease_until_ns > attempt.started_ns > 0
        (kept,) = store.attempts(attempt_ids=[attempt.attempt_id])
        assert (kept.fence, kept.lease_until_ns, kept.rollout) == (
            attempt.fence, attempt.lease_until_ns, attempt.rollout,
        )  # fmt: skip
        assert store.attempts(rollout_ids=[rollout.rollout_id]) == [kept]
        assert _status(store, rollout) == "running"

    def test_each_rollout_is_claimed_once_by_many_at_a_time(self, store: Store, reopen: Callable[[], Store]) -> None:
        """If it fails: finding and marking rollouts must be one transaction that no other can come between."""
        store.enqueue([a_rollout() for _ in range(60)])
        other = reopen()
        with ThreadPoolExecutor(8) as pool:
            both = [store, other] * 20
            taken = [attempt for some in pool.map(lambda s: s.claim("worker", limit=4), both) for attempt in some]
        counts = Counter(attempt.rollout.rollout_id for attempt in taken)
        assert len(counts) == 60
        assert set(counts.values()) == {1}

    def test_fencing_numbers_only_grow(self, store: Store) -> None:
        """If it fails: a later claim of a rollout must have a higher fence, or a late result looks like a new one."""
        rollout = a_rollout(max_attempts=5)
        fences = [_claimed(store, rollout).fence]
        for _ in range(3):
            (last,) = store.attempts(rollout_ids=[rollout.rollout_id])[-1:]
            store.finish(last.attempt_id, last.fence, status="failed")
            fences += [attempt.fence for attempt in store.claim("worker")]
        assert fences == sorted(set(fences))
        assert len(fences) == 4

    def test_a_lease_that_ran_out_is_lost_and_its_rollout_retried(self, store: Store) -> None:
        """If it fails: a claim must first mark what ran out, and queue those rollouts again at their old place."""
        rollout = a_rollout(max_attempts=2)
        first = _outlived(store, rollout)
        (second,) = store.claim("other")
        assert (second.rollout.rollout_id, second.number) == (rollout.rollout_id, 2)
        assert second.attempt_id != first.attempt_id
        lost, running = store.attempts(rollout_ids=[rollout.rollout_id])
        assert (lost.status, running.status) == ("lost", "running")
        assert lost.ended_ns is not None
        assert lost.error

    def test_a_rollout_fails_when_its_attempts_are_used_up(self, store: Store) -> None:
        """If it fails: count attempts that were lost too, or a task that kills its worker is run for ever."""
        rollout = a_rollout(max_attempts=1)
        _outlived(store, rollout)
        assert store.claim("other") == []
        assert _status(store, rollout) == "failed"

    def test_a_dead_worker_is_noticed_by_whoever_looks(self, store: Store) -> None:
        """If it fails: reading rollouts or attempts must settle leases first, or one who waits for an end waits on."""
        rollout = a_rollout(max_attempts=1)
        _outlived(store, rollout)
        assert _status(store, rollout) == "failed"
        attempt = _outlived(store, a_rollout())
        assert store.attempts(attempt_ids=[attempt.attempt_id])[0].status == "lost"

    def test_a_heartbeat_keeps_the_lease(self, store: Store) -> None:
        """If it fails: a heartbeat sets the end of the lease to now plus lease_s."""
        attempt = _claimed(store, a_rollout(), lease_s=_SHORT_S)
        assert store.heartbeat([(attempt.attempt_id, attempt.fence)], lease_s=60.0) == []
        time.sleep(2 * _SHORT_S)
        assert store.claim("other") == []
        assert store.attempts(attempt_ids=[attempt.attempt_id])[0].lease_until_ns > attempt.lease_until_ns

    def test_a_heartbeat_names_the_lost_leases(self, store: Store) -> None:
        """If it fails: a lease is held by (attempt_id, fence) of a running attempt, and by nothing else."""
        gone = _outlived(store, a_rollout())
        (kept,) = store.claim("other")
        leases = [(gone.attempt_id, gone.fence), (kept.attempt_id, kept.fence), (kept.attempt_id, kept.fence + 1)]
        assert store.heartbeat([*leases, ("nobody's", 1)]) == [gone.attempt_id, kept.attempt_id, "nobody's"]
        assert store.heartbeat([]) == []

    def test_a_late_result_of_a_lost_lease_is_refused(self, store: Store) -> None:
        """If it fails: compare the fence inside the transaction, and keep no reward of a refused result."""
        rollout = a_rollout()
        late = _outlived(store, rollout)
        store.claim("other")
        reward = a_reward(rollout_id=rollout.rollout_id, attempt_id=late.attempt_id)
        with pytest.raises(LeaseLostError):
            store.finish(late.attempt_id, late.fence, status="succeeded", rewards=[reward])
        assert store.rewards(rollout_ids=[rollout.rollout_id]) == []
        assert _status(store, rollout) == "running"

    def test_a_wrong_fence_is_refused(self, store: Store) -> None:
        """If it fails: the attempt's id alone proves nothing."""
        attempt = _claimed(store, a_rollout())
        for fence in (attempt.fence - 1, attempt.fence + 1):
            with pytest.raises(LeaseLostError):
                store.finish(attempt.attempt_id, fence, status="succeeded")

    def test_an_end_and_its_rewards_are_one(self, store: Store, reopen: Callable[[], Store]) -> None:
        """If it fails: write status and rewards in one transaction, so that none is seen without the other."""
        rollout = a_rollout()
        attempt = _claimed(store, rollout)
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
        attempt = _claimed(store, rollout)
        reward = a_reward(rollout_id=rollout.rollout_id, attempt_id=attempt.attempt_id)
        for _ in range(2):
            assert store.finish(attempt.attempt_id, attempt.fence, status="failed", rewards=[reward]) == "queued"
        assert len(store.claim("worker", limit=5)) == 1
        again = a_reward(rollout_id=rollout.rollout_id, attempt_id=attempt.attempt_id)
        assert store.finish(attempt.attempt_id, attempt.fence, status="failed", rewards=[again]) == "running"
        assert store.claim("worker") == []
        assert store.rewards(rollout_ids=[rollout.rollout_id]) == [reward]

    def test_several_ends_are_answered_each_for_itself(self, store: Store) -> None:
        """If it fails: one end that is refused must neither change anything nor harm the others told with it."""
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
        """If it fails: calls that are done together must each get their own answer."""
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
        """If it fails: an attempt ends once; a second, different word about it must not overwrite the first."""
        attempt = _claimed(store, a_rollout())
        store.finish(attempt.attempt_id, attempt.fence, status="succeeded")
        with pytest.raises(LeaseLostError):
            store.finish(attempt.attempt_id, attempt.fence, status="failed")

    @pytest.mark.parametrize("status", ["failed", "timeout", "lost"])
    def test_a_failed_attempt_is_retried_while_attempts_are_left(self, store: Store, status: AttemptStatus) -> None:
        """If it fails: queue the rollout again until max_attempts attempts were begun, then fail it."""
        rollout = a_rollout(max_attempts=2)
        first = _claimed(store, rollout)
        assert store.finish(first.attempt_id, first.fence, status=status, error="it broke") == "queued"
        (second,) = store.claim("worker")
        assert second.failures == (status in FAILED)
        assert store.finish(second.attempt_id, second.fence, status=status) == "failed"
        assert [a.error for a in store.attempts(rollout_ids=[rollout.rollout_id])] == ["it broke", None]
        assert store.claim("worker") == []

    def test_a_rollout_is_not_tried_again_after_a_final_end(self, store: Store) -> None:
        """If it fails: an end with `final` fails the rollout although it has tries left."""
        rollout = a_rollout(max_attempts=3)
        attempt = _claimed(store, rollout)
        end = End(attempt.attempt_id, attempt.fence, "failed", error="it broke", final=True)
        assert store.finish_all([end]) == ["failed"]
        assert store.finish_all([end]) == ["failed"]
        assert store.claim("worker") == []

    @pytest.mark.parametrize("status", UNCOUNTED)
    def test_an_end_without_fault_uses_up_no_try(self, store: Store, status: AttemptStatus) -> None:
        """If it fails: tries that ended released or disturbed don't count towards max_attempts; others do."""
        rollout = a_rollout(max_attempts=1)
        attempt = _claimed(store, rollout)
        for number in (2, 3):
            assert store.finish(attempt.attempt_id, attempt.fence, status=status) == "queued"
            (attempt,) = store.claim("worker")
            assert (attempt.number, attempt.disturbed) == (number, number - 1 if status == "disturbed" else 0)
            assert attempt.failures == 0
        assert store.finish(attempt.attempt_id, attempt.fence, status="failed") == "failed"

    def test_ends_without_fault_are_bounded(self, store: Store) -> None:
        """If it fails: after UNCOUNTED_MOST of them each one counts, or a rollout could be tried for ever."""
        rollout = a_rollout(max_attempts=1)
        attempt = _claimed(store, rollout)
        for _ in range(UNCOUNTED_MOST):
            assert store.finish(attempt.attempt_id, attempt.fence, status="disturbed") == "queued"
            (attempt,) = store.claim("worker")
        assert store.finish(attempt.attempt_id, attempt.fence, status="disturbed") == "failed"

    def test_a_lease_that_ran_out_after_an_end_without_fault_is_the_first_try(self, store: Store) -> None:
        """If it fails: the tries of an expired attempt are counted as those of one that ended."""
        rollout = a_rollout(max_attempts=2)
        attempt = _claimed(store, rollout)
        store.finish(attempt.attempt_id, attempt.fence, status="released")
        store.claim("worker", lease_s=_SHORT_S)
        time.sleep(2 * _SHORT_S)
        assert [a.number for a in store.claim("worker")] == [3]

    def test_an_end_that_makes_no_sense_changes_nothing(self, store: Store) -> None:
        """If it fails: check attempt, status and rewards before anything is written."""
        rollout = a_rollout()
        attempt = _claimed(store, rollout)
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
        assert _status(store, rollout) == "running"
        assert store.rewards(rollout_ids=[rollout.rollout_id]) == []

    def test_what_is_cancelled_is_not_run(self, store: Store) -> None:
        """If it fails: cancel both what waits and what runs; running attempts lose their leases at once."""
        running, waiting, ended = a_rollout(), a_rollout(), a_rollout()
        done = _claimed(store, ended)
        store.finish(done.attempt_id, done.fence, status="succeeded")
        attempt = _claimed(store, running)
        store.enqueue([waiting])
        ids = [rollout.rollout_id for rollout in (running, waiting, ended)]
        assert store.cancel([*ids, "nobody's"]) == 2
        assert store.cancel(ids) == 0
        assert [rollout.status for rollout in store.rollouts(rollout_ids=ids)] == [
            "succeeded",
            "cancelled",
            "cancelled",
        ]
        assert store.claim("worker") == []
        assert store.heartbeat([(attempt.attempt_id, attempt.fence)]) == [attempt.attempt_id]
        with pytest.raises(LeaseLostError):
            store.finish(attempt.attempt_id, attempt.fence, status="succeeded")
        assert store.finish(attempt.attempt_id, attempt.fence, status="cancelled") == "cancelled"

    def test_a_group_enters_training_once(self, store: Store, reopen: Callable[[], Store]) -> None:
        """If it fails: the first consumer keeps the group; the same one may ask again, as a resumed step does."""
        group = an_id()
        assert store.consume_group(group, "run 1, step 3")
        assert store.consume_group(group, "run 1, step 3")
        assert not store.consume_group(group, "run 1, step 4")
        store.close()
        again = reopen()
        assert not again.consume_group(group, "run 2, step 3")
        assert again.consume_group(group, "run 1, step 3")

    def test_one_that_fails_does_not_fail_its_neighbours(self, store: Store) -> None:
        """If it fails: writes that share a transaction need a savepoint each, or to be run again one by one."""
        attempt = _claimed(store, a_rollout())

        def write(place: int) -> int:
            if place % 4:
                return store.add_spans([a_span()])
            with pytest.raises(LeaseLostError):
                store.finish(attempt.attempt_id, attempt.fence + 1, status="succeeded")
            return 0

        with ThreadPoolExecutor(16) as pool:
            assert sum(pool.map(write, range(160))) == 120
