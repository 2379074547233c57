"""The course of a rollout, and the rollouts of a group side by side."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from lightning_spans.adapter.trace import Trace
from lightning_spans.errors import RefusedError
from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.json import dumps
from lightning_spans.store.traces import traces_of
from lightning_trainer.kits.judging.spans import EVALUATE
from lightning_trainer.kits.view.answers.groups import GroupPage, Member, RolloutRow
from lightning_trainer.kits.view.answers.rollouts import AttemptRow, Event, RolloutPage
from lightning_trainer.kits.view.names import chosen_by, names_of
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.reading import others
from lightning_trainer.kits.view.reading.learning import judged_in
from lightning_trainer.kits.view.reading.steps import (
    crash_reward,
    failed_of,
    group_rows,
    outcomes_of,
    rollout_row,
    rollouts_in,
    seconds_of,
    task_text,
    trained_in,
)
from lightning_trainer.kits.view.reading.transcripts import alike, events_of, reward_row
from lightning_trainer.kits.view.runs import Run
from lightning_trainer.rl.batch.calls import CountedCall
from lightning_trainer.run.group_ids import step_of

_MEMBERS: Final = 8  # rollouts side by side in a page
_TASK: Final = 5000


def side_by_side(reader: StoreReader, run: Run, group: str, *, after: int) -> GroupPage:
    """Return rollouts of a group side by side, starting at one of them, and how many first calls all share.

    Raises:
        RefusedError: there is no such group.
    """
    rollouts = rollouts_in(reader, [group])
    if not rollouts:
        raise RefusedError(f"there is no group {group!r} in this run")
    row = group_rows(reader, run, step_of(group), rollouts)[0]
    judged, chosen = judged_in(reader, run, group), chosen_by(run)
    traces: dict[str | None, Trace] = {}
    shown = row.rollouts[after : after + _MEMBERS]
    first = row.rollouts[0]  # all are compared with it, on every page
    ids = [each.attempt_id for each in (first, *shown) if each.attempt_id is not None]
    for trace in traces_of(reader, attempt_ids=ids):
        traces[trace.attempt_id] = trace
    members = [_member(each, traces.get(each.attempt_id), judged, chosen) for each in shown]
    start = [] if first in shown else [_member(first, traces.get(first.attempt_id), judged, chosen)]
    step = step_of(group)
    following = after + _MEMBERS
    return GroupPage(
        group_id=group,
        mode=step.mode,
        step=step.number,
        task=task_text(rollouts[0], _TASK),
        alike=alike([member.events for member in (*start, *members)]) if len(row.rollouts) > 1 else 0,
        mean=row.mean,
        deviation=row.deviation,
        members=members,
        total=len(row.rollouts),
        next=following if following < len(row.rollouts) else None,
    )


def _member(
    row: RolloutRow, trace: Trace | None, judged: Sequence[CountedCall], chosen: Sequence[str] | None
) -> Member:
    return Member(
        row=row,
        rewards=[reward_row(reward) for reward in trace.rewards] if trace is not None else [],
        advantages=_advantages(judged, row.attempt_id, chosen),
        events=_steps_of(trace, judged, chosen) if trace is not None else [],
    )


def _steps_of(trace: Trace, judged: Sequence[CountedCall], chosen: Sequence[str] | None) -> list[Event]:
    """Return the model calls and tools of an attempt, which are compared."""
    events = events_of(trace, judged, chosen)
    return [event for event in events if event.turn is not None or event.operation == "execute_tool"]


def _advantages(
    judged: Sequence[CountedCall], attempt_id: str | None, chosen: Sequence[str] | None
) -> dict[str, float]:
    """Return the mean advantage of each agent's calls in an attempt."""
    own = [call for call in judged if call.transition.attempt_id == attempt_id]
    names = names_of((call.transition.path for call in own), chosen)
    by_agent: defaultdict[str, list[float]] = defaultdict(list)
    for call in own:
        if not math.isnan(call.advantage):
            by_agent[names[call.transition.path] or ""].append(call.advantage)
    return {agent: statistics.fmean(values) for agent, values in by_agent.items()}


def as_it_went(reader: StoreReader, run: Run, rollout: str, attempt: str | None) -> RolloutPage:
    """Return an attempt of a rollout: the requested one, otherwise the one that counts, otherwise the last.

    Raises:
        RefusedError: there is no such rollout.
    """
    asked, trace = trace_of(run, reader, rollout, attempt)
    attempts = others.attempt_rows(reader, rollout)
    group = asked.group_id if asked is not None else None
    members = reader.rollouts(group_ids=[group]) if group is not None else []
    row = None
    if asked is not None:
        outcome = outcomes_of(reader, run, [asked])[rollout]
        crashed = crash_reward(reader, run, step_of(asked.group_id), [outcome])
        with reader.reading() as connection:
            row = rollout_row(run, outcome, crashed, trained_in(connection, run))
    ids = [each.rollout_id for each in members]
    return page_of(run, reader, asked, trace, attempts=attempts, members=ids, row=row)


def trace_of(run: Run, reader: StoreReader, rollout: str, attempt: str | None) -> tuple[Rollout | None, Trace]:
    """Return a rollout and the trace of an attempt: the requested one, otherwise the counting one or the last."""
    asked = next(iter(reader.rollouts(rollout_ids=[rollout])), None)
    if attempt is None and asked is not None:
        outcome = outcomes_of(reader, run, [asked])[rollout]
        counted = outcome.counts(failed_of(run)) or (outcome.attempts[-1] if outcome.attempts else None)
        attempt = counted.attempt_id if counted is not None else None
    attempts, rollouts = ([attempt], None) if attempt is not None else (None, [rollout])
    read = traces_of(reader, attempt_ids=attempts, rollout_ids=rollouts)
    found = [trace for trace in read if trace.rollout_id in (rollout, None)]
    if not found and asked is None:
        raise RefusedError(f"there is no rollout {rollout!r} in this store")
    return asked, found[-1] if found else Trace.build([], rollout_id=rollout)


def loose_trace(reader: StoreReader, trace_id: str) -> Trace:
    """Return a trace that belongs to no rollout.

    Raises:
        RefusedError: there is no such trace.
    """
    spans, calls = reader.spans(trace_ids=[trace_id]), reader.calls(trace_ids=[trace_id])
    if not spans and not calls:
        raise RefusedError(f"there is no trace {trace_id!r} in this store")
    return Trace.build(spans, calls)


def page_of(
    run: Run,
    reader: StoreReader,
    asked: Rollout | None,
    trace: Trace,
    *,
    attempts: list[AttemptRecord],
    members: list[str],
    row: RolloutRow | None,
) -> RolloutPage:
    """Return the page of a trace.

    Args:
        run: run of the trace.
        reader: of its store.
        asked: its rollout; None if it belongs to none.
        trace: the trace.
        attempts: of the rollout.
        members: rollouts of its group.
        row: the rollout's status and reward.
    """
    judged, chosen = judged_in(reader, run, asked.group_id if asked is not None else None), chosen_by(run)
    events = events_of(trace, judged, chosen)
    step = step_of(asked.group_id) if asked is not None else None
    unjoined: dict[str, int] = {}
    for half in trace.unjoined:
        unjoined[half.reason] = unjoined.get(half.reason, 0) + 1
    return RolloutPage(
        rollout_id=trace.rollout_id,
        attempt_id=trace.attempt_id,
        group_id=asked.group_id if asked is not None else None,
        mode=step.mode if step is not None else None,
        step=step.number if step is not None else None,
        task=task_text(asked, _TASK) if asked is not None else "",
        task_json=dumps(dict(asked.task)).decode().strip() if asked is not None else None,
        status=row.status if row is not None else "",
        reward=row.reward if row is not None else None,
        attempts=[
            AttemptRow(
                attempt_id=each.attempt_id, number=each.number, status=each.status, worker=each.worker,
                error=each.error, seconds=seconds_of(each),
            )
            for each in attempts
        ],
        members=members,
        agents=[name for name in names_of(trace.agent_paths, chosen).values() if name is not None],
        rewards=[reward_row(reward) for reward in trace.rewards],
        events=events,
        spans=len(trace),
        calls=len(trace.chats),
        tools=len(trace.tools),
        unjoined=unjoined,
        ms=_took(events),
    )  # fmt: skip


def _took(events: Sequence[Event]) -> float:
    """Return the duration of an attempt in milliseconds, without a judge's later verdict on it."""
    ends = [(event.operation == EVALUATE, event.start_ms + event.ms) for event in events]
    return max((end for verdict, end in ends if not verdict), default=max((end for _, end in ends), default=0.0))
