"""What every store promises about spans, calls and rewards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from lightning_conformance.stores import samples
from lightning_conformance.stores.samples import (
    ANY,
    a_call,
    a_deployment,
    a_reward,
    a_rollout,
    a_span,
    an_assignment,
    an_id,
)
from lightning_spans.errors import RefusedError, RewardError, StoreError
from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import SHADOW, Span
from lightning_spans.store import Store
from lightning_spans.store.deployments import Assignment, Deployment, copy_id
from lightning_spans.store.protocol import Page, Where, each


class RecordPromises:
    """Stored once, returned exactly, found by any list of ids."""

    def test_is_a_store(self, store: Store) -> None:
        """If it fails: a method of `lightning_spans.store.Store` is missing; add it."""
        assert isinstance(store, Store)

    @ANY
    @given(span=samples.spans())
    def test_spans_come_back_as_they_went_in(self, store: Store, span: Span) -> None:
        """If it fails: find the field that loses something in its column or JSON form, and widen it."""
        assert store.add_spans([span]) == 1
        assert store.spans(trace_ids=[span.trace_id]) == [span]

    @ANY
    @given(call=samples.calls())
    def test_calls_come_back_as_they_went_in(self, store: Store, call: Call) -> None:
        """If it fails: find the lossy field. Choices keep their order; None and an empty tuple are different."""
        assert store.add_calls([call]) == 1
        assert store.calls(trace_ids=[call.trace_id or ""]) == [call]

    @ANY
    @given(reward=samples.rewards())
    def test_rewards_come_back_as_they_went_in(self, store: Store, reward: Reward) -> None:
        """If it fails: rewards are float64 until the loss; store them in eight bytes or as JSON's shortest digits."""
        assert store.add_rewards([reward]) == 1
        assert store.rewards(attempt_ids=[reward.attempt_id]) == [reward]

    @ANY
    @given(deployment=samples.deployments())
    def test_deployments_come_back_as_they_went_in(self, store: Store, deployment: Deployment) -> None:
        """If it fails: find the field that loses something in its column or JSON form, and widen it."""
        assert store.add_deployments([deployment]) == 1
        assert store.page(Deployment, newest_first=True, limit=1).records == [deployment]

    def test_of_two_transitions_with_one_number_the_first_counts(self, store: Store) -> None:
        """If it fails: (agent, number) must be unique, or two people who promote at once both believe that they did."""
        first = a_deployment(reason="first")
        assert store.add_deployments([first]) == 1
        assert store.add_deployments([replace(first, reason="second"), replace(first, number=2)]) == 1
        of_agent = [one for one in each(store, Deployment) if one.agent == first.agent]
        assert of_agent == [first, replace(first, number=2)]

    def test_a_conversation_is_assigned_once(self, store: Store) -> None:
        """If it fails: (agent, attempt_id) must be unique; an agent's conversation never changes its policy."""
        first = an_assignment()
        other = replace(first, agent="reader", policy="new")
        assert store.add_assignments([first]) == 1
        assert store.add_assignments([replace(first, policy="new"), other]) == 1
        assert store.page(Assignment, Where(attempt_ids=[first.attempt_id])).records == [first, other]

    def test_assignments_are_deleted_with_their_attempt_or_by_age(self, store: Store) -> None:
        """If it fails: an assignment records who spoke when; it must be deleted with the conversation."""
        rollout = a_rollout()
        store.enqueue([rollout])
        (attempt,) = store.claim("worker")
        store.finish(attempt.attempt_id, attempt.fence, status="succeeded")
        kept = [an_assignment(attempt_id=attempt.attempt_id), an_assignment(at_ns=1_000), an_assignment(at_ns=2_000)]
        store.add_assignments(kept)
        ids = [one.attempt_id for one in kept]
        store.delete(rollout_ids=[rollout.rollout_id])
        assert store.page(Assignment, Where(attempt_ids=ids)).records == kept[1:]
        store.delete(before_ns=2_000)
        assert store.page(Assignment, Where(attempt_ids=ids)).records == kept[2:]

    def test_long_token_arrays_come_back_exactly(self, store: Store) -> None:
        """If it fails: look for a size limit of columns or bodies, and for shortened log-probabilities."""
        tokens, logprobs = tuple(range(100_000)), tuple(-1 / (1 + place) for place in range(100_000))
        call = a_call(trace_id=an_id(), prompt_token_ids=tokens, choices=(Choice(0, tokens, logprobs, "stop"),))
        store.add_calls([call])
        assert store.calls(trace_ids=[call.trace_id or ""]) == [call]

    def test_text_that_is_no_unicode_harms_no_other_field(self, store: Store) -> None:
        """If it fails: half an emoji in a tool's output must not lose the span or its neighbours in the batch."""
        odd = a_span(name="half \ud83d", attributes={"half": "\ud83d", "big": 2**70, "kept": "é"})
        assert store.add_spans([odd, a_span(trace_id=odd.trace_id)]) == 2
        found = next(span for span in store.spans(trace_ids=[odd.trace_id]) if span.span_id == odd.span_id)
        assert found.attributes == odd.attributes

    def test_a_span_delivered_twice_is_stored_once(self, store: Store) -> None:
        """If it fails: a span must be unique within its attempt, and inserting a known one must do nothing."""
        first = a_span(name="first")
        again = a_span(trace_id=first.trace_id, span_id=first.span_id, name="again")
        assert store.add_spans([first, again]) == 1
        assert store.add_spans([again, first]) == 0
        assert store.spans(trace_ids=[first.trace_id]) == [first]

    def test_one_span_id_in_two_traces_is_two_spans(self, store: Store) -> None:
        """If it fails: a span id alone does not identify a span; the key is (trace_id, span_id)."""
        one, other = a_span(span_id="a" * 16), a_span(span_id="a" * 16)
        assert store.add_spans([one, other]) == 2
        assert len(store.spans(trace_ids=[one.trace_id, other.trace_id])) == 2

    def test_a_span_of_another_attempt_takes_nobodys_place(self, store: Store) -> None:
        """If it fails: ids can be guessed or copied; a span with another's ids must not make that one vanish."""
        thief = a_span(rollout_id=an_id(), attempt_id=an_id(), name="thief")
        victims = [replace(thief, attempt_id=attempt_id, name="victim") for attempt_id in (an_id(), None)]
        assert store.add_spans([thief]) == 1
        assert store.add_spans(victims) == 2
        assert store.add_spans([*victims, replace(victims[1], name="again")]) == 0
        assert store.spans(attempt_ids=[victims[0].attempt_id or ""]) == victims[:1]
        assert store.spans(trace_ids=[thief.trace_id]) == [thief, *victims]

    def test_a_call_delivered_twice_is_stored_once_with_its_choices(self, store: Store) -> None:
        """If it fails: check the call's id before its choices are written, or they are duplicated or mixed."""
        first = a_call(trace_id=an_id())
        more = (*first.choices, Choice(1, (5,), (-0.3,), "stop"))
        again = a_call(call_id=first.call_id, trace_id=first.trace_id, choices=more)
        assert store.add_calls([first, again]) == 1
        assert store.add_calls([again]) == 0
        assert store.calls(trace_ids=[first.trace_id or ""]) == [first]

    def test_a_reward_delivered_twice_counts_once(self, store: Store) -> None:
        """If it fails: reward_id must be unique."""
        reward = a_reward()
        assert store.add_rewards([reward, reward]) == 1
        assert store.add_rewards([reward]) == 0
        assert store.rewards(attempt_ids=[reward.attempt_id]) == [reward]

    @pytest.mark.parametrize("value", [math.nan, math.inf, None, "1"])
    def test_a_reward_that_is_no_finite_number_is_refused(self, store: Store, value: Any) -> None:
        """If it fails: check with `rewards.as_reward` before anything is written or sent, the whole list first."""
        good = a_reward()
        with pytest.raises(RewardError):
            store.add_rewards([good, a_reward(value=value)])
        assert store.rewards(attempt_ids=[good.attempt_id]) == []

    def test_adding_nothing_is_nothing(self, store: Store) -> None:
        """If it fails: answer empty lists before making a statement or request of them."""
        assert store.add_spans([]) == store.add_calls([]) == store.add_rewards([]) == store.enqueue([]) == 0

    def test_records_come_in_the_order_of_their_start(self, store: Store) -> None:
        """If it fails: sort by start; for equal starts, and for rewards, by arrival."""
        trace, attempt = an_id(), an_id()
        starts = (30, 10, 20, 10)
        spans = [a_span(trace_id=trace, span_id=f"{place:016x}", start_ns=t) for place, t in enumerate(starts)]
        calls = [a_call(trace_id=trace, response_id=f"{place}", start_ns=t) for place, t in enumerate(starts)]
        rewards = [a_reward(attempt_id=attempt, value=value) for value in (3.0, 1.0, 2.0)]
        store.add_spans(spans)
        store.add_calls(calls)
        store.add_rewards(rewards)
        assert store.spans(trace_ids=[trace]) == [spans[1], spans[3], spans[2], spans[0]]
        assert store.calls(trace_ids=[trace]) == [calls[1], calls[3], calls[2], calls[0]]
        assert store.rewards(attempt_ids=[attempt]) == rewards

    def test_filters_combine_with_and(self, store: Store) -> None:
        """If it fails: a record must be in every given list; None filters nothing, an empty list everything."""
        rollout, trace = an_id(), an_id()
        both = a_span(rollout_id=rollout, attempt_id="1", trace_id=trace)
        store.add_spans([both, a_span(rollout_id=rollout, attempt_id="2"), a_span(attempt_id="1", trace_id=trace)])
        assert store.spans(rollout_ids=[rollout], attempt_ids=["1"], trace_ids=[trace]) == [both]
        assert store.spans(rollout_ids=[rollout], trace_ids=[an_id()]) == []
        assert store.spans(rollout_ids=[rollout], attempt_ids=[]) == []
        assert not store.calls(trace_ids=[])
        assert not store.rewards(rollout_ids=[])
        assert both in store.spans()

    def test_lists_are_read_by_pages(self, store: Store) -> None:
        """If it fails: a page continues after the previous one's last record, and reports when there are no more."""
        origin, attempt = an_id(), an_id()
        spans = [a_span(origin=origin, start_ns=10 - place, end_ns=20) for place in range(5)]
        store.add_spans(spans[:4])
        where = Where(origin=origin)
        first = store.page(Span, where, limit=2)
        assert (first.records, first.next is None) == (spans[:2], False)
        store.add_spans(spans[4:])  # a record added meanwhile comes last, and moves nothing
        second = store.page(Span, where, after=first.next or 0, limit=2)
        third = store.page(Span, where, after=second.next or 0, limit=2)
        assert (second.records, third) == (spans[2:4], Page(spans[4:], None))
        assert list(each(store, Span, where, limit=1)) == spans
        assert list(each(store, Span, where, limit=2, newest_first=True)) == spans[::-1]
        calls = [a_call(origin=origin, trace_id=attempt) for _ in range(3)]
        store.add_calls(calls)
        assert list(each(store, Call, Where(trace_ids=[attempt]), limit=2)) == calls
        assert list(each(store, Call, Where(trace_ids=[attempt]), limit=2, newest_first=True)) == calls[::-1]
        rewards = [a_reward(attempt_id=attempt) for _ in range(3)]
        store.add_rewards(rewards)
        assert list(each(store, Reward, Where(attempt_ids=[attempt]), limit=2)) == rewards
        rollouts = [a_rollout(origin=origin) for _ in range(3)]
        store.enqueue(rollouts)
        attempts = store.claim("worker", limit=2)
        assert [one.attempt_id for one in each(store, AttemptRecord, where, limit=1)] == [
            one.attempt_id for one in attempts
        ]
        waiting = Where(origin=origin, status="queued")
        assert list(each(store, Rollout, waiting, limit=1)) == rollouts[2:]
        with pytest.raises(RefusedError, match="trace_ids"):
            store.page(Reward, Where(trace_ids=[attempt]))

    def test_origins_are_kept_apart(self, store: Store) -> None:
        """If it fails: an origin is a column of spans, calls and rollouts, and filters with the other filters."""
        origin, rollout = an_id(), a_rollout()
        labelled = replace(rollout, rollout_id=an_id(), origin=origin)
        store.enqueue([rollout, labelled])
        store.claim("worker", limit=2)
        span, call = a_span(rollout_id=rollout.rollout_id), a_call(rollout_id=rollout.rollout_id)
        spans = [span, a_span(rollout_id=labelled.rollout_id, origin=origin), a_span(origin=origin)]
        calls = [call, a_call(rollout_id=labelled.rollout_id, origin=origin), a_call(origin=origin)]
        store.add_spans(spans)
        store.add_calls(calls)
        assert store.spans(origin=origin) == spans[1:]
        assert store.calls(origin=origin) == calls[1:]
        assert store.spans(origin=origin, rollout_ids=[labelled.rollout_id, rollout.rollout_id]) == [spans[1]]
        assert store.spans(origin="training", rollout_ids=[labelled.rollout_id, rollout.rollout_id]) == [span]
        assert [one.rollout_id for one in store.rollouts(origin=origin)] == [labelled.rollout_id]
        assert [one.rollout.origin for one in store.attempts(origin=origin)] == [origin]
        assert span in store.spans(origin="training")
        assert store.calls(origin=an_id()) == []

    def test_thousands_of_ids_can_be_asked_for(self, store: Store) -> None:
        """If it fails: split long lists into several statements, or send them in a body; and do not count twice."""
        spans = [a_span(attempt_id=f"many-{place}") for place in range(3000)]
        store.add_spans(spans)
        ids = [span.attempt_id or "" for span in spans]
        assert len(store.spans(attempt_ids=ids + ids)) == 3000
        assert len(store.spans(attempt_ids=ids, trace_ids=[span.trace_id for span in spans[:2000]])) == 2000
        assert not store.calls(attempt_ids=ids)
        assert not store.rewards(attempt_ids=ids)
        assert not store.rollouts(group_ids=ids)

    def test_what_was_acknowledged_is_there_after_reopening(self, store: Store, reopen: Callable[[], Store]) -> None:
        """If it fails: answer only after the commit."""
        span, call, reward = a_span(), a_call(trace_id=an_id()), a_reward()
        store.add_spans([span])
        store.add_calls([call])
        store.add_rewards([reward])
        store.close()
        again = reopen()
        assert again.spans(trace_ids=[span.trace_id]) == [span]
        assert again.calls(trace_ids=[call.trace_id or ""]) == [call]
        assert again.rewards(attempt_ids=[reward.attempt_id]) == [reward]

    def test_ended_rollouts_are_deleted_with_all_that_belongs_to_them(self, store: Store) -> None:
        """If it fails: look for a table that keeps rows, or for one that loses a neighbour's."""
        rollouts = [a_rollout() for _ in range(3)]
        store.enqueue(rollouts)
        for attempt in store.claim("worker", limit=2):
            ids = {"rollout_id": attempt.rollout.rollout_id, "attempt_id": attempt.attempt_id}
            store.add_spans([a_span(**ids)])
            store.add_calls([a_call(**ids)])
            store.finish(attempt.attempt_id, attempt.fence, status="succeeded", rewards=[a_reward(**ids)])
        first, second, waiting = (rollout.rollout_id for rollout in rollouts)
        assert store.delete(rollout_ids=[first, waiting, "nobody's"]) == 1
        assert [one.rollout_id for one in store.rollouts(rollout_ids=[first, second, waiting])] == [second, waiting]
        for read in (store.spans, store.calls, store.rewards, store.attempts):
            assert read(rollout_ids=[first]) == []
            assert len(read(rollout_ids=[second])) == 1
        assert store.delete(rollout_ids=[first], compact=True) == 0
        assert [one.rollout.rollout_id for one in store.claim("worker")] == [waiting]

    def test_old_traces_of_an_origin_are_deleted_and_young_ones_kept(self, store: Store) -> None:
        """If it fails: age counts from the end of a span or call, and from the end of a rollout's last attempt."""
        origin, old, young = an_id(), 1_000, 2_000
        spans = [a_span(origin=origin, start_ns=old, end_ns=time) for time in (old, young)]
        calls = [a_call(origin=origin, trace_id=an_id(), start_ns=old, end_ns=time) for time in (old, young)]
        other = a_span(start_ns=old, end_ns=old)
        store.add_spans([*spans, other])
        store.add_calls(calls)
        (rollout,) = [a_rollout(origin=origin)]
        store.enqueue([rollout])
        (attempt,) = store.claim("worker")
        store.finish(attempt.attempt_id, attempt.fence, status="succeeded")
        assert store.delete(origin=origin, before_ns=young) == 2
        assert (store.spans(origin=origin), store.calls(origin=origin)) == (spans[1:], calls[1:])
        assert store.rollouts(origin=origin)
        assert store.spans(trace_ids=[other.trace_id]) == [other]
        assert store.delete(trace_ids=[spans[1].trace_id, other.trace_id]) == 2
        assert store.delete(origin=origin) == 2  # the young call, and the rollout
        assert store.rollouts(origin=origin) == []

    def test_a_copy_for_a_shadow_is_deleted_with_its_call(self, store: Store) -> None:
        """If it fails: every way to delete a call must also delete the call whose id is `copy_id` of it."""
        origin, trace_id = an_id(), an_id()
        (rollout,) = rollouts = [a_rollout(origin=an_id())]
        store.enqueue(rollouts)
        (attempt,) = store.claim("worker")
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": attempt.attempt_id}
        store.finish(attempt.attempt_id, attempt.fence, status="succeeded")
        calls = [
            a_call(**ids),
            a_call(trace_id=trace_id),
            a_call(),
            a_call(origin=origin, start_ns=1_000, end_ns=2_000),
            a_call(),
        ]
        copies = [a_call(call_id=copy_id(one.call_id), origin=SHADOW) for one in calls]
        store.add_calls([*calls, *copies])
        own = {one.call_id for one in (*calls, *copies)}
        deletions: list[dict[str, Any]] = [
            {"rollout_ids": [rollout.rollout_id]},
            {"trace_ids": [trace_id]},
            {"call_ids": [calls[2].call_id, calls[0].call_id]},
            {"origin": origin, "before_ns": 3_000},
        ]
        for number, filters in enumerate(deletions, start=1):
            assert store.delete(**filters) == 2
            kept = {one.call_id for one in (*calls[number:], *copies[number:])}
            assert {one.call_id for one in store.calls()} & own == kept

    def test_old_rewards_of_conversations_are_deleted(self, store: Store) -> None:
        """If it fails: a reward outside of attempts is as old as its conversation's assignment."""
        old, young = (a_reward(rollout_id=one, attempt_id=one) for one in (an_id(), an_id()))
        store.add_rewards([old, young])
        store.add_assignments(
            [
                an_assignment(attempt_id=old.attempt_id, at_ns=1_000),
                an_assignment(attempt_id=young.attempt_id, at_ns=2_000),
            ]
        )
        store.delete(before_ns=2_000)
        assert store.rewards(attempt_ids=[old.attempt_id, young.attempt_id]) == [young]

    def test_nobody_deletes_everything_by_mistake(self, store: Store) -> None:
        """If it fails: refuse a deletion without any filter."""
        span = a_span()
        store.add_spans([span])
        with pytest.raises(RefusedError, match="delete: give"):
            store.delete()
        assert store.spans(trace_ids=[span.trace_id]) == [span]

    def test_a_closed_store_says_so(self, store: Store) -> None:
        """If it fails: raise StoreError from every method once closed; a second close is not an error."""
        store.close()
        store.close()
        with pytest.raises(StoreError, match="closed"):
            store.add_spans([a_span()])
        with pytest.raises(StoreError, match="closed"):
            store.spans()
        with pytest.raises(StoreError, match="closed"):
            store.claim("worker")
