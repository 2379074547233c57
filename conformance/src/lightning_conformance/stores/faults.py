"""What every store promises when its methods fail: with retries, nothing is lost and nothing is counted twice."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_conformance.plugins.faults import FAULTS, METHODS, Fault, FaultyStore, PlannedFault
from lightning_conformance.stores.samples import (
    ANY,
    a_call,
    a_deployment,
    a_rollout,
    a_span,
    an_assignment,
    an_id,
)
from lightning_spans.errors import LeaseLostError, RefusedError, StoreError
from lightning_spans.schema.attempts import AttemptRecord, End, Rollout
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Span
from lightning_spans.store import Store
from lightning_spans.store.deployments import Assignment, Deployment
from lightning_spans.store.protocol import Where, each

T = TypeVar("T")
_LEASE_S: Final = 0.4
_BOUND_S: Final = 30.0
_PLAN: Final = st.lists(
    st.builds(PlannedFault, st.sampled_from(METHODS), st.sampled_from(FAULTS), st.integers(0, 3)), max_size=8
)


def again(call: Callable[[], T]) -> T:
    """Retry a call until it is answered, as a client does; a refused call is not retried."""
    until = time.monotonic() + _BOUND_S
    while True:
        try:
            return call()
        except (RefusedError, LeaseLostError):
            raise
        except StoreError:
            if time.monotonic() > until:
                raise
            time.sleep(0.005)


@dataclass
class SmallRun:
    """A small run: rollouts of one group and one to cancel, done by a worker that survives the store's faults."""

    store: Any
    rollouts: Sequence[Rollout]
    unwanted: Rollout
    trace_id: str = field(default_factory=an_id)
    _ended: int = 0

    def run(self) -> None:
        """Queue everything and run it."""
        self.queue()
        self.do()

    def queue(self) -> None:
        """Queue the rollouts, and one that is then cancelled."""
        again(lambda: self.store.enqueue([*self.rollouts, self.unwanted]))
        again(lambda: self.store.cancel([self.unwanted.rollout_id]))

    def do(self) -> None:
        """Claim, send and end until nothing is left to do; several workers may do so at once."""
        until = time.monotonic() + _BOUND_S
        while self._waits() and time.monotonic() < until:
            for attempt in again(lambda: self.store.claim("worker", limit=2, lease_s=_LEASE_S)):
                self._attempt(attempt)
            time.sleep(0.01)

    def _odd(self) -> bool:
        self._ended += 1
        return self._ended % 2 == 1

    def _waits(self) -> bool:
        ids = [rollout.rollout_id for rollout in self.rollouts]
        found = again(lambda: self.store.rollouts(rollout_ids=ids))
        return any(rollout.status in ("queued", "running") for rollout in found)

    def _attempt(self, attempt: AttemptRecord) -> None:
        lease = (attempt.attempt_id, attempt.fence)
        if again(lambda: self.store.heartbeat([lease], lease_s=_LEASE_S)):
            return
        ids = {"rollout_id": attempt.rollout.rollout_id, "attempt_id": attempt.attempt_id}
        span, call = a_span(trace_id=self.trace_id, **ids), a_call(trace_id=self.trace_id, **ids)
        given = partial(Reward, rollout_id=ids["rollout_id"], attempt_id=ids["attempt_id"], value=1.0)
        scores = [given(reward_id=f"{attempt.attempt_id} {part}") for part in ("end", "step")]
        again(lambda: self.store.add_spans([span]))
        again(lambda: self.store.add_calls([call]))
        again(lambda: self.store.add_rewards(scores[1:]))
        if self._odd():  # both ways to end an attempt
            end = End(*lease, "succeeded", scores[:1])
            (told,) = again(lambda: self.store.finish_all([end]))
            assert told == "succeeded" or isinstance(told, LeaseLostError)
            return
        try:
            again(lambda: self.store.finish(*lease, status="succeeded", rewards=scores[:1]))
        except LeaseLostError:
            return  # too late: a retry is a new attempt

    def check(self, real: Store) -> None:
        """Compare the contents of the store with the expected ones."""
        ids = [rollout.rollout_id for rollout in self.rollouts]
        stand = Counter(rollout.status for rollout in real.rollouts(rollout_ids=ids))
        assert stand == {"succeeded": len(ids)}
        assert real.rollouts(rollout_ids=[self.unwanted.rollout_id])[0].status == "cancelled"
        assert real.attempts(rollout_ids=[self.unwanted.rollout_id]) == []
        attempts = real.attempts(rollout_ids=ids)
        ended = [attempt for attempt in attempts if attempt.status == "succeeded"]
        assert sorted(attempt.rollout.rollout_id for attempt in ended) == sorted(ids)  # each once
        assert len({attempt.fence for attempt in attempts}) == len(attempts)
        rewards = Counter(reward.reward_id for reward in real.rewards(rollout_ids=ids))
        assert max(rewards.values()) == 1
        assert {name for name in rewards if name.endswith("end")} == {f"{one.attempt_id} end" for one in ended}
        for found in (real.spans(trace_ids=[self.trace_id]), real.calls(trace_ids=[self.trace_id])):
            sent = [record.attempt_id for record in found]
            assert len(set(sent)) == len(sent)
            assert {one.attempt_id for one in ended} <= set(sent)


def _late(fault: Fault) -> int:
    return ("before", "after", "cut", "delay").index(fault)


def some_work(store: Any) -> SmallRun:
    """Make a small run for a store."""
    group = an_id()
    rollouts = [a_rollout(group_id=group, max_attempts=20) for _ in range(3)]
    return SmallRun(store, rollouts, a_rollout())


class FaultPromises:
    """A caller that retries gets its work done once, whatever failed and whenever."""

    @pytest.mark.parametrize("method", [name for name in METHODS if name != "close"])
    def test_a_fault_costs_nothing_but_time(self, store: Store, method: str) -> None:
        """If it fails: the named method is not safe to retry. Make its writes idempotent, or fence them."""
        # Each fault that is an error makes the caller retry, and so meet the next one; the delay is the last.
        faulty = FaultyStore(
            store, [PlannedFault(method, fault, nth) for nth, fault in enumerate(sorted(FAULTS, key=_late))]
        )
        work = some_work(faulty)
        work.run()
        group = work.rollouts[0].group_id
        assert again(lambda: faulty.consume_group(group, "run 1, step 1"))
        assert not again(lambda: faulty.consume_group(group, "run 1, step 2"))
        for read in (faulty.spans, faulty.calls, faulty.rewards, faulty.attempts):
            assert again(partial(read, rollout_ids=[work.rollouts[0].rollout_id]))
        deployment, assignment = a_deployment(), an_assignment()
        again(lambda: faulty.add_deployments([deployment]))
        again(lambda: faulty.add_assignments([assignment]))
        assert again(lambda: faulty.page(Assignment, Where(attempt_ids=[assignment.attempt_id]))).records == [
            assignment
        ]
        assert [one for one in each(store, Deployment) if one.agent == deployment.agent] == [deployment]
        assert again(lambda: faulty.page(Span, Where(rollout_ids=[work.rollouts[0].rollout_id]))).records
        faulty.settled()
        work.check(store)
        gone, *others = (rollout.rollout_id for rollout in work.rollouts)
        again(lambda: faulty.delete(rollout_ids=[gone]))
        faulty.settled()
        assert store.spans(rollout_ids=[gone]) == []
        assert len(store.rollouts(rollout_ids=[gone, *others])) == len(others)
        assert faulty.called(method) >= len(FAULTS), "not every fault was met"

    @ANY
    @given(plan=_PLAN)
    def test_any_faults_cost_nothing_but_time(self, store: Store, plan: list[PlannedFault]) -> None:
        """If it fails: two faults interact. See what the first left behind: a lease, half a transaction, a queue."""
        faulty = FaultyStore(store, plan)
        work = some_work(faulty)
        work.run()
        faulty.settled()
        work.check(store)
