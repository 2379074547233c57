"""What a deletion reaches: the traces that it means, and which of the recorded sources of checkpoints it deletes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import Span
from lightning_spans.store import Store
from lightning_spans.store.protocol import DeleteFilter, Where, each
from lightning_spans.store.traces import each_trace
from lightning_trainer.lineage.search import each_step

_AT_ONCE: Final = 500  # ids of one request
_ENDED: Final = ("succeeded", "failed", "cancelled")


def name_traces(store: Store, origin: str | None, wanted: Callable[[Trace], bool]) -> DeleteFilter:
    """Return the filter that deletes all wanted traces without an attempt, by the ids of their records."""
    traces, calls = set[str](), set[str]()
    for trace in each_trace(store, origin=origin):
        if trace.attempt_id is None and wanted(trace):
            own = [node.call for node in trace] + [half.call for half in trace.lone_calls]
            traceless = {call.call_id for call in own if call is not None and call.trace_id is None}
            calls |= traceless
            traces |= {node.span.trace_id for node in trace if node.call is None or node.call.call_id not in traceless}
    return DeleteFilter(trace_ids=sorted(traces), call_ids=sorted(calls), origin=origin)


def find_deleted(store: Store, runs: Sequence[Path], wanted: DeleteFilter) -> set[str]:
    """Return the ids in the manifests of folders of runs whose records a deletion deletes.

    Args:
        store: with the records.
        runs: the folders; manifests are found at any depth.
        wanted: the deletion. If it names ids, these are returned.

    Raises:
        ConfigError: a manifest was changed.
    """
    named = {one for ids in (wanted.rollout_ids, wanted.trace_ids, wanted.call_ids) for one in ids or ()}
    if named or wanted.rollout_ids is not None or wanted.trace_ids is not None:
        return named
    rollouts, traces, calls = set[str](), set[str](), set[str]()
    for step in each_step(runs):
        rollouts.update(step.get("rollouts", ()))
        traces.update(step.get("tasks", ()))
        # records of rollouts are found by these; but examples of `sft` name a trace without one as their rollout
        if "rollouts" not in step or any(source.startswith("origin:") for source in step.get("sources", ())):
            traces.update(step.get("traces", ()))
            calls.update(step.get("calls", ()))
    return {
        *_find_ended_rollouts(store, rollouts, wanted),
        *_old_records(store, [Where(trace_ids=ids, origin=wanted.origin) for ids in _parts(traces)], wanted),
        *_old_records(store, [Where(call_ids=ids, origin=wanted.origin) for ids in _parts(calls)], wanted),
    }


def _find_ended_rollouts(store: Store, known: set[str], wanted: DeleteFilter) -> Iterator[str]:
    for ids in _parts(known):
        where = Where(rollout_ids=ids, origin=wanted.origin)
        ended = {one.rollout_id for one in each(store, Rollout, where) if one.status in _ENDED}
        if wanted.before_ns is not None:
            attempts = each(store, AttemptRecord, where)
            ended -= {one.rollout.rollout_id for one in attempts if (one.ended_ns or 0) >= wanted.before_ns}
        yield from ended


def _old_records(store: Store, places: Iterable[Where], wanted: DeleteFilter) -> Iterator[str]:
    """Yield the ids of traces and calls outside of rollouts that are old enough."""
    for where in places:
        kinds: tuple[type[Span | Call], ...] = (Call,) if where.call_ids is not None else (Span, Call)
        for record in (one for kind in kinds for one in each(store, kind, where)):
            if record.rollout_id is None and (wanted.before_ns is None or record.end_ns < wanted.before_ns):
                yield from filter(None, (record.trace_id, getattr(record, "call_id", None)))


def _parts(ids: set[str]) -> Iterator[list[str]]:
    ordered = sorted(ids)
    return (ordered[first : first + _AT_ONCE] for first in range(0, len(ordered), _AT_ONCE))
