"""What every store promises about the queue of rollouts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given

from lightning_conformance.stores import samples
from lightning_conformance.stores.samples import ANY, a_rollout, a_span, an_id
from lightning_spans.errors import LeaseLostError, RefusedError
from lightning_spans.schema.attempts import AttemptRecord, Rollout, RolloutStatus
from lightning_spans.store import Store
from lightning_spans.store.protocol import Where
from lightning_spans.store.states import AttemptState, RolloutState

SHORT_S = 0.02  # a lease that expires while a test sleeps


def claim_alone(store: Store, rollout: Rollout, *, lease_s: float = 60.0) -> AttemptRecord:
    """Queue a rollout as the only one in the queue, and claim it."""
    store.enqueue([rollout])
    (attempt,) = store.claim("worker", lease_s=lease_s)
    assert attempt.rollout.rollout_id == rollout.rollout_id
    return attempt


def outlive_lease(store: Store, rollout: Rollout) -> AttemptRecord:
    """Claim a rollout and let the lease expire."""
    attempt = claim_alone(store, rollout, lease_s=SHORT_S)
    time.sleep(2 * SHORT_S)
    return attempt


def status_of(store: Store, rollout: Rollout) -> RolloutStatus:
    """Return the status that the store has for a rollout."""
    return store.rollouts(rollout_ids=[rollout.rollout_id])[0].status


class QueuePromises:
    """Each rollout is run by one worker at a time, and none is forgotten."""

    @ANY
    @given(rollout=samples.rollouts())
    def test_rollouts_come_back_as_they_went_in(self, store: Store, rollout: Rollout) -> None:
        """If it fails: find the field that loses something in its column or JSON form."""
        assert store.enqueue([rollout]) == 1
        assert store.rollouts(rollout_ids=[rollout.rollout_id]) == [rollout]
        assert store.rollouts(group_ids=[rollout.group_id], status="queued") == [rollout]
        assert store.rollouts(group_ids=[rollout.group_id], status="failed") == []

    def test_a_rollout_queued_twice_is_queued_once(self, store: Store) -> None:
        """If it fails: rollout_id must be unique, and a second one must leave the first unchanged, ended or not."""
        rollout = a_rollout()
        assert store.enqueue([rollout, rollout]) == 1
        (attempt,) = store.claim("worker", limit=5)
        store.finish(attempt.attempt_id, attempt.fence, status="succeeded")
        assert store.enqueue([rollout]) == 0
        assert status_of(store, rollout) == "succeeded"

    def test_rollouts_of_a_generator_are_queued(self, store: Store) -> None:
        """If it fails: the check consumed the generator, and nothing was left to queue; make a list of it first."""
        rollout = a_rollout()
        assert store.enqueue(each for each in [rollout]) == 1  # type: ignore[arg-type]  # what a program may do
        store.cancel([rollout.rollout_id])

    def test_a_rollout_without_attempts_is_refused(self, store: Store) -> None:
        """If it fails: a rollout with max_attempts below 1 could never end; refuse it when it is queued."""
        with pytest.raises(RefusedError, match="max_attempts"):
            store.enqueue([a_rollout(max_attempts=0)])

    @pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf, -math.inf])
    def test_a_rollout_without_time_is_refused(self, store: Store, timeout_s: float) -> None:
        """If it fails: such an attempt is over before it begins, or its timer never fires; refuse it when queued."""
        with pytest.raises(RefusedError, match="timeout_s"):
            store.enqueue([a_rollout(timeout_s=timeout_s)])

    def test_a_rollout_without_an_id_is_refused(self, store: Store) -> None:
        """If it fails: a rollout without an id cannot be looked up; refuse it when it is queued."""
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
        """If it fails: match prefixes exactly (no wildcards, same case), or runs on one store mix their rollouts."""
        theirs, wanted, more, upper = (a_rollout(rollout_id=f"{an_id()}{end}") for end in ("", "_%:a", "é:b", "_%:A"))
        store.enqueue([theirs, wanted, more, upper])
        assert store.claim("worker", limit=9, within=[]) == []
        assert store.claim("worker", limit=9, within=[wanted.rollout_id[:-1] + "A", "%", "_"]) == []
        taken = store.claim("worker", limit=9, within=[wanted.rollout_id[:-1], more.rollout_id[:-1]])
        assert [attempt.rollout.rollout_id for attempt in taken] == [wanted.rollout_id, more.rollout_id]
        rest = store.claim("worker", limit=9)
        assert [attempt.rollout.rollout_id for attempt in rest] == [theirs.rollout_id, upper.rollout_id]

    def test_what_a_lost_lease_left_stays_within_its_scope(self, store: Store) -> None:
        """If it fails: a retry must be claimed only within the scope of its rollout."""
        late = outlive_lease(store, a_rollout(rollout_id=f"{an_id()}:a"))
        assert store.claim("other", within=[an_id()]) == []
        (again,) = store.claim("worker", within=[late.rollout.rollout_id])
        assert again.number == 2

    def test_a_claim_tells_what_to_run(self, store: Store) -> None:
        """If it fails: return the rollout with its task, and store the attempt as returned."""
        rollout = a_rollout()
        attempt = claim_alone(store, rollout)
        assert (attempt.number, attempt.worker, attempt.status) == (1, "worker", "running")
        assert (attempt.rollout.task, attempt.rollout.status) == (rollout.task, "running")
        assert attempt.lease_until_ns > attempt.started_ns > 0
        (kept,) = store.attempts(attempt_ids=[attempt.attempt_id])
        assert (kept.fence, kept.lease_until_ns, kept.rollout) == (
            attempt.fence, attempt.lease_until_ns, attempt.rollout,
        )  # fmt: skip
        assert store.attempts(rollout_ids=[rollout.rollout_id]) == [kept]
        assert status_of(store, rollout) == "running"

    def test_each_rollout_is_claimed_once_by_many_at_a_time(self, store: Store, reopen: Callable[[], Store]) -> None:
        """If it fails: find and mark rollouts in one transaction that no other can interrupt."""
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
        fences = [claim_alone(store, rollout).fence]
        for _ in range(3):
            (last,) = store.attempts(rollout_ids=[rollout.rollout_id])[-1:]
            store.finish(last.attempt_id, last.fence, status="failed")
            fences += [attempt.fence for attempt in store.claim("worker")]
        assert fences == sorted(set(fences))
        assert len(fences) == 4

    def test_a_lease_that_ran_out_is_lost_and_its_rollout_retried(self, store: Store) -> None:
        """If it fails: a claim must first mark expired leases, and queue those rollouts again at their old place."""
        rollout = a_rollout(max_attempts=2)
        first = outlive_lease(store, rollout)
        (second,) = store.claim("other")
        assert (second.rollout.rollout_id, second.number) == (rollout.rollout_id, 2)
        assert second.attempt_id != first.attempt_id
        lost, running = store.attempts(rollout_ids=[rollout.rollout_id])
        assert (lost.status, running.status) == ("lost", "running")
        assert lost.ended_ns is not None
        assert lost.error

    def test_a_rollout_fails_when_its_attempts_are_used_up(self, store: Store) -> None:
        """If it fails: count lost attempts too, or a task that kills its worker is run forever."""
        rollout = a_rollout(max_attempts=1)
        outlive_lease(store, rollout)
        assert store.claim("other") == []
        assert status_of(store, rollout) == "failed"

    def test_a_dead_worker_is_noticed_by_whoever_looks(self, store: Store) -> None:
        """If it fails: settle leases before reading rollouts or attempts, or a wait for an end never finishes."""
        rollout = a_rollout(max_attempts=1)
        outlive_lease(store, rollout)
        assert status_of(store, rollout) == "failed"
        attempt = outlive_lease(store, a_rollout())
        assert store.attempts(attempt_ids=[attempt.attempt_id])[0].status == "lost"

    @pytest.mark.parametrize(("kind", "status"), [(RolloutState, "failed"), (AttemptState, "lost")])
    def test_a_dead_worker_is_noticed_by_whoever_looks_at_states(
        self, store: Store, kind: type[RolloutState | AttemptState], status: str
    ) -> None:
        """If it fails: settle leases before reading states of rollouts or attempts, as for these themselves."""
        rollout = a_rollout(max_attempts=1)
        outlive_lease(store, rollout)
        found = store.page(kind, Where(rollout_ids=[rollout.rollout_id])).records
        assert [state.status for state in found] == [status]

    def test_a_heartbeat_keeps_the_lease(self, store: Store) -> None:
        """If it fails: a heartbeat sets the end of the lease to now plus lease_s."""
        attempt = claim_alone(store, a_rollout(), lease_s=SHORT_S)
        assert store.heartbeat([(attempt.attempt_id, attempt.fence)], lease_s=60.0) == []
        time.sleep(2 * SHORT_S)
        assert store.claim("other") == []
        assert store.attempts(attempt_ids=[attempt.attempt_id])[0].lease_until_ns > attempt.lease_until_ns

    def test_a_heartbeat_names_the_lost_leases(self, store: Store) -> None:
        """If it fails: a lease is held by (attempt_id, fence) of a running attempt, and by nothing else."""
        gone = outlive_lease(store, a_rollout())
        (kept,) = store.claim("other")
        leases = [(gone.attempt_id, gone.fence), (kept.attempt_id, kept.fence), (kept.attempt_id, kept.fence + 1)]
        assert store.heartbeat([*leases, ("nobody's", 1)]) == [gone.attempt_id, kept.attempt_id, "nobody's"]
        assert store.heartbeat([]) == []

    def test_what_is_cancelled_is_not_run(self, store: Store) -> None:
        """If it fails: cancel both waiting and running rollouts; running attempts lose their leases at once."""
        running, waiting, ended = a_rollout(), a_rollout(), a_rollout()
        done = claim_alone(store, ended)
        store.finish(done.attempt_id, done.fence, status="succeeded")
        attempt = claim_alone(store, running)
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
        """If it fails: writes that share a transaction each need a savepoint, or must be repeated one by one."""
        attempt = claim_alone(store, a_rollout())

        def write(place: int) -> int:
            if place % 4:
                return store.add_spans([a_span()])
            with pytest.raises(LeaseLostError):
                store.finish(attempt.attempt_id, attempt.fence + 1, status="succeeded")
            return 0

        with ThreadPoolExecutor(16) as pool:
            assert sum(pool.map(write, range(160))) == 120
