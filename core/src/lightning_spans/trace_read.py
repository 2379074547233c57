"""From a store to traces: what belongs to which attempt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from lightning_spans.rewards import Reward
from lightning_spans.spans import TRAINING, Span
from lightning_spans.store import Call, Store
from lightning_spans.trace import Trace
from lightning_spans.trace_tree import Key

Ids: TypeAlias = Sequence[str] | None


@dataclass(slots=True)
class _Heap:
    """What one trace is made of."""

    rollout_id: str | None = None
    attempt_id: str | None = None
    spans: list[Span] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)

    def trace(self) -> Trace:
        return Trace.build(self.spans, self.calls, self.rewards, rollout_id=self.rollout_id, attempt_id=self.attempt_id)


def read_traces(store: Store, rollout_ids: Ids, attempt_ids: Ids, origin: str | None = None) -> list[Trace]:
    """Read the traces of attempts, those of which nothing was recorded among them, in the order of their start."""
    everything = rollout_ids is None and attempt_ids is None
    heaps: dict[str, _Heap] = {}  # by attempt, else by trace
    where: dict[str, Any] = {"rollout_ids": rollout_ids, "attempt_ids": attempt_ids}
    if origin is not None:
        where["origin"] = origin
    for attempt in store.attempts(**where):
        heaps[attempt.attempt_id] = _Heap(attempt.rollout.rollout_id, attempt.attempt_id)
    spans = store.spans(**where)
    calls = store.calls(**where)
    rewards = store.rewards(rollout_ids=rollout_ids, attempt_ids=attempt_ids)
    if origin is not None:
        rewards = [reward for reward in rewards if reward.attempt_id in heaps]
    if not everything:
        heaps.update(_new_heaps(heaps, [*spans, *calls, *rewards]))
        # Spans and calls that lie in the same traces but do not say to which attempt they belong: another
        # instrumentation's, another gateway's.
        traces = sorted(
            {span.trace_id for span in spans} | {call.trace_id for call in calls if call.trace_id is not None}
        )
        # What production sent is of no attempt, whatever trace it names.
        spans = [span for span in store.spans(trace_ids=traces) if span.attempt_id or span.origin == TRAINING]
        calls += [call for call in store.calls(trace_ids=traces) if call.attempt_id is None]
    owners = _Owners(spans)
    for span in spans:
        key = owners.of_span(span)
        if everything or key in heaps:
            heaps.setdefault(key, _Heap()).spans.append(span)
    for call in calls:
        key = owners.of_call(call)
        if everything or key in heaps:
            heaps.setdefault(key, _Heap()).calls.append(call)
    for reward in rewards:
        heaps.setdefault(reward.attempt_id, _Heap()).rewards.append(reward)
    return [heap.trace() for heap in heaps.values()]


def _new_heaps(heaps: dict[str, _Heap], records: Iterable[Span | Call | Reward]) -> Iterator[tuple[str, _Heap]]:
    """Make heaps for attempts that the queue does not know: traces made without it."""
    for record in records:
        if record.attempt_id is not None and record.attempt_id not in heaps:
            yield record.attempt_id, _Heap(record.rollout_id, record.attempt_id)


class _Owners:
    """Finds the attempt that a span or call belongs to: its own word, else its nearest ancestor's, else its trace's.

    The last holds where a trace has one attempt only, as when the user's own outermost span is around it.
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
        """Give the attempt, else the trace id."""
        return span.attempt_id or self._of_key((span.trace_id, span.span_id))

    def of_call(self, call: Call) -> str:
        """Give the attempt, else the trace id, else the call's own id."""
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
