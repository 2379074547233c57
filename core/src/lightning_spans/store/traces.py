"""From a store to traces: which records belong to which attempt."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Final

from lightning_spans.adapter.trace import Trace
from lightning_spans.adapter.tree import Key
from lightning_spans.schema.attempts import AttemptRecord
from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import SHADOW, TRAINING, Span
from lightning_spans.store.protocol import Ids, Store, Where, each, whole_list

_AT_ONCE: Final = 64  # traces in memory
_FIRST: Final = 8  # if only the newest may be requested


@dataclass(slots=True)
class _Heap:
    """The records of one trace."""

    rollout_id: str | None = None
    attempt_id: str | None = None
    spans: list[Span] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)

    def trace(self) -> Trace:
        return Trace.build(self.spans, self.calls, self.rewards, rollout_id=self.rollout_id, attempt_id=self.attempt_id)


def traces_of(
    store: Store, *, rollout_ids: Ids = None, attempt_ids: Ids = None, origin: str | None = None
) -> list[Trace]:
    """Read traces: one for each attempt, even if nothing was recorded; see `each_trace`."""
    return list(each_trace(store, rollout_ids=rollout_ids, attempt_ids=attempt_ids, origin=origin))


def each_trace(
    store: Store,
    *,
    rollout_ids: Ids = None,
    attempt_ids: Ids = None,
    trace_ids: Ids = None,
    origin: str | None = None,
) -> Iterator[Trace]:
    """Read traces in the order of their start: one for each attempt, even if nothing was recorded.

    Those of attempts that are not in the queue come after those that are. Spans that belong to no attempt give one for
    each trace_id, last. Without ids, a few traces at a time are in memory, and the ids of the rest. A candidate's
    answers to copies of live calls are read only by their origin, ``shadow``, because no user got them.

    Args:
        store: to read from.
        rollout_ids: only attempts of these rollouts.
        attempt_ids: only these attempts.
        trace_ids: only these traces, of what belongs to no attempt.
        origin: only what was recorded under this label, such as ``live``.
    """
    if trace_ids is not None:
        yield from _build_traces(_outside(store, Where(trace_ids=trace_ids, origin=origin)))
    if rollout_ids is not None or attempt_ids is not None:
        wanted = Where(rollout_ids=rollout_ids, attempt_ids=attempt_ids, origin=origin)
        yield from _build_traces(_of_attempts(store, wanted))
    if not (rollout_ids is attempt_ids is trace_ids is None):
        return
    where = Where(origin=origin)
    known: set[str] = set()
    for batch in _batches(attempt.attempt_id for attempt in each(store, AttemptRecord, where)):
        known.update(batch)
        yield from _build_traces(_of_attempts(store, replace(where, attempt_ids=batch)))
    unknown: dict[str, None] = {}
    outside: dict[str, None] = {}  # traces with records that name no attempt
    records: Iterator[Span | Call] = chain(each(store, Span, where), each(store, Call, where))
    for record in records:
        if record.attempt_id is not None:
            unknown.setdefault(record.attempt_id)
        elif record.trace_id is not None:
            outside.setdefault(record.trace_id)
        elif _is_shown(record, origin):
            yield _Heap(calls=[record]).trace()
    if origin is None:
        unknown |= dict.fromkeys(reward.attempt_id for reward in each(store, Reward))
    for batch in _batches(attempt_id for attempt_id in unknown if attempt_id not in known):
        yield from _build_traces(_of_attempts(store, replace(where, attempt_ids=batch)))
    for batch in _batches(outside):
        yield from _build_traces(_outside(store, replace(where, trace_ids=batch)))


def newest_traces(store: Store, *, origin: str | None = None) -> Iterator[Trace]:
    """Read traces, newest first, only as many as requested; see `each_trace`.

    A trace is as new as its newest record. Those with only rewards come last.
    """
    where = Where(origin=origin)
    lists: list[Iterator[AttemptRecord | Span | Call]] = [
        each(store, AttemptRecord, where, limit=_AT_ONCE, newest_first=True),
        each(store, Span, where, limit=_AT_ONCE, newest_first=True),
        each(store, Call, where, limit=_AT_ONCE, newest_first=True),
    ]
    started = (one for one in heapq.merge(*lists, key=_start_ns, reverse=True) if _is_shown(one, origin))
    rewards = each(store, Reward, newest_first=True) if origin is None else ()
    records: Iterator[AttemptRecord | Span | Call | Reward] = chain(started, rewards)
    seen: set[str] = set()
    size = _FIRST
    while batch := list(islice(_new_places(records, seen), size)):
        yield from _in_order(store, where, batch)
        size = min(2 * size, _AT_ONCE)


@dataclass(frozen=True, slots=True)
class _Place:
    """What a record belongs to: an attempt, otherwise a trace, otherwise it is a separate call."""

    key: str
    of_attempt: bool = False
    call: Call | None = None


def _is_shown(record: AttemptRecord | Span | Call, origin: str | None) -> bool:
    return origin == SHADOW or not isinstance(record, Call) or record.origin != SHADOW


def _start_ns(record: AttemptRecord | Span | Call) -> int:
    return record.started_ns if isinstance(record, AttemptRecord) else record.start_ns


def _new_places(records: Iterable[AttemptRecord | Span | Call | Reward], seen: set[str]) -> Iterator[_Place]:
    for record in records:
        if record.attempt_id is not None:
            place = _Place(record.attempt_id, of_attempt=True)
        elif not isinstance(record, Span | Call):
            continue
        elif record.trace_id is not None:
            place = _Place(record.trace_id)
        else:
            place = _Place("", call=record if isinstance(record, Call) else None)
        if place.call is not None or place.key not in seen:
            seen.add(place.key)
            yield place


def _in_order(store: Store, where: Where, places: Sequence[_Place]) -> Iterator[Trace]:
    heaps: dict[str, _Heap] = {}
    if named := [place.key for place in places if place.of_attempt]:
        heaps |= _of_attempts(store, replace(where, attempt_ids=named))
    if traces := [place.key for place in places if place.call is None and not place.of_attempt]:
        heaps |= _outside(store, replace(where, trace_ids=traces))
    for place in places:
        if place.call is not None:
            yield _Heap(calls=[place.call]).trace()
        elif place.key in heaps:
            yield heaps.pop(place.key).trace()
    yield from _build_traces(heaps)


def _build_traces(heaps: Mapping[str, _Heap]) -> Iterator[Trace]:
    return (heap.trace() for heap in heaps.values())


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(names)
    while batch := list(islice(rest, _AT_ONCE)):
        yield batch


def _of_attempts(store: Store, where: Where) -> dict[str, _Heap]:
    """Read the traces of attempts, few enough to be in memory together."""
    heaps: dict[str, _Heap] = {}  # by attempt
    for attempt in whole_list(store, AttemptRecord, where):
        heaps[attempt.attempt_id] = _Heap(attempt.rollout.rollout_id, attempt.attempt_id)
    spans = whole_list(store, Span, where)
    calls = whole_list(store, Call, where)
    rewards = whole_list(store, Reward, replace(where, origin=None))
    if where.origin is not None:
        rewards = [reward for reward in rewards if reward.attempt_id in heaps]
    heaps.update(_new_heaps(heaps, [*spans, *calls, *rewards]))
    # Spans and calls in the same traces that do not name their attempt: another instrumentation's, another
    # gateway's. Records of production belong to no attempt, whatever trace they name.
    traces = sorted({span.trace_id for span in spans} | {call.trace_id for call in calls if call.trace_id is not None})
    spans = [span for span in store.spans(trace_ids=traces) if span.attempt_id or span.origin == TRAINING]
    calls += [call for call in store.calls(trace_ids=traces) if not call.attempt_id and call.origin == TRAINING]
    owners = _Owners(spans)
    for span in spans:
        if (key := owners.of_span(span)) in heaps:
            heaps[key].spans.append(span)
    for call in calls:
        if (key := owners.of_call(call)) in heaps:
            heaps[key].calls.append(call)
    for reward in rewards:
        heaps[reward.attempt_id].rewards.append(reward)
    return heaps


def _outside(store: Store, where: Where) -> dict[str, _Heap]:
    """Read what belongs to no attempt in some traces."""
    heaps: defaultdict[str, _Heap] = defaultdict(_Heap)
    spans, calls = whole_list(store, Span, where), whole_list(store, Call, where)
    owners = _Owners([span for span in spans if span.attempt_id or span.origin == TRAINING])
    attempts = {span.attempt_id for span in spans} | {call.attempt_id for call in calls}
    for span in spans:
        key = owners.of_span(span) if span.origin == TRAINING else span.attempt_id or span.trace_id
        if key not in attempts:
            heaps[key].spans.append(span)
    for call in calls:
        outside = call.attempt_id or call.trace_id or call.call_id
        if (key := owners.of_call(call) if call.origin == TRAINING else outside) not in attempts:
            heaps[key].calls.append(call)
    return heaps


def _new_heaps(heaps: dict[str, _Heap], records: Iterable[Span | Call | Reward]) -> Iterator[tuple[str, _Heap]]:
    """Create heaps for attempts that are not in the queue: traces made without it."""
    for record in records:
        if record.attempt_id is not None and record.attempt_id not in heaps:
            yield record.attempt_id, _Heap(record.rollout_id, record.attempt_id)


class _Owners:
    """Finds the attempt of a span or call: named by itself, otherwise by its nearest ancestor, otherwise its trace's.

    The last is used if a trace has only one attempt, for example if the user's own outermost span surrounds it.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans: dict[Key, Span] = {}
        self._found: dict[Key, str] = {}
        in_trace: defaultdict[str, set[str]] = defaultdict(set)
        for span in spans:
            self._spans.setdefault((span.trace_id, span.span_id), span)
            if span.attempt_id is not None:
                in_trace[span.trace_id].add(span.attempt_id)
        self._only = {trace: next(iter(attempts)) for trace, attempts in in_trace.items() if len(attempts) == 1}

    def of_span(self, span: Span) -> str:
        """Return the attempt, otherwise the trace id."""
        return span.attempt_id or self._of_key((span.trace_id, span.span_id))

    def of_call(self, call: Call) -> str:
        """Return the attempt, otherwise the trace id, otherwise the call's own id."""
        if call.attempt_id or call.trace_id is None:
            return call.attempt_id or call.call_id
        return self._of_key((call.trace_id, call.span_id or ""))

    def _of_key(self, key: Key) -> str:
        path: list[Key] = []
        owner: str | None = None
        seen: set[Key] = set()
        at: Key | None = key
        while at is not None and at not in seen and owner is None:
            seen.add(at)
            path.append(at)
            span = self._spans.get(at)
            owner = self._found.get(at) or (span.attempt_id if span else None)
            at = (at[0], span.parent_id) if span and span.parent_id else None
        owner = owner or self._only.get(key[0]) or key[0]
        for passed in path:
            self._found[passed] = owner
        return owner
