"""Rewards by source, the fleet, and traces outside of rollouts."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, func, select

from lightning_spans.schema.attempts import AttemptRecord
from lightning_spans.schema.json import loads
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import CHAT
from lightning_spans.store.protocol import Where, whole_list
from lightning_spans.store.sql import schema
from lightning_spans.store.sql.read import among
from lightning_trainer.kits.judging.spans import EVALUATE, EXPLANATION, NAME
from lightning_trainer.kits.view.answers.learning import Judgement, RewardsPage, SourceRow
from lightning_trainer.kits.view.answers.store import (
    FleetPage,
    LoosePage,
    LooseRow,
    RunningRow,
    WorkerRow,
)
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.reading.steps import group_ids, rollouts_in, task_text, trained_in
from lightning_trainer.kits.view.reading.texts import legible
from lightning_trainer.kits.view.runs import Run
from lightning_trainer.rl.scores import agents_totals, lowest, trained_reward
from lightning_trainer.run.group_ids import Step

_MOST: Final = 2000  # most attempts in the scatter plot
_TASK: Final = 120  # characters of a task in a table
_WORDS: Final = 1000  # characters of a verdict
_NEWEST: Final = 20_000  # spans that one page of loose traces reads


def rewards_page(reader: StoreReader, run: Run, step: Step) -> RewardsPage:
    """Return the rewards of a step by source, and of each attempt: that with the lowest reward of any agent first."""
    rollouts = rollouts_in(reader, group_ids(reader, run, step))
    rewards = whole_list(reader, Reward, Where(rollout_ids=[each.rollout_id for each in rollouts]))
    by_source: defaultdict[str, list[float]] = defaultdict(list)
    by_attempt: defaultdict[str, list[Reward]] = defaultdict(list)
    for reward in rewards:
        by_source[reward.source].append(reward.value)
        by_attempt[reward.attempt_id].append(reward)
    sources = [
        SourceRow(
            source=source, rule=source in run.rules, rewards=len(values), mean=statistics.fmean(values),
            low=min(values), high=max(values),
        )
        for source, values in sorted(by_source.items())
    ]  # fmt: skip
    shown = sorted(by_attempt.values(), key=lambda its: _lowest(run, its))[:_MOST]
    tasks = {each.rollout_id: task_text(each, _TASK) for each in rollouts}
    with reader.reading() as connection:
        agents = trained_in(connection, run)
    verdicts = _verdicts(reader, [its[0].attempt_id for its in shown])
    return RewardsPage(
        sources=sources,
        attempts=[_judgement(run, its, verdicts[its[0].attempt_id], agents, tasks[its[0].rollout_id]) for its in shown],
        total=len(by_attempt),
    )


def _verdicts(reader: StoreReader, attempt_ids: Sequence[str]) -> defaultdict[str, dict[str, tuple[str, str]]]:
    """Return by attempt and source the span of a verdict, and its text."""
    spans = schema.spans.c
    found: defaultdict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    with reader.reading() as connection:
        chosen = among(connection, spans.attempt_id, attempt_ids)
        query = select(spans.attempt_id, spans.span_id, spans.attributes).where(chosen, spans.operation == EVALUATE)
        for attempt_id, span_id, attributes in connection.execute(query):
            values = loads(attributes)
            found[attempt_id][str(values.get(NAME))] = (span_id, legible(str(values.get(EXPLANATION) or ""))[:_WORDS])
    return found


def _outcome(run: Run, rewards: Sequence[Reward]) -> list[Reward]:
    return [reward for reward in rewards if reward.source not in run.rules]


def _lowest(run: Run, rewards: Sequence[Reward]) -> float:
    outcome = _outcome(run, rewards)
    return lowest(outcome) if outcome else math.inf


def _judgement(
    run: Run,
    rewards: Sequence[Reward],
    verdicts: Mapping[str, tuple[str, str]],
    agents: frozenset[str] | None,
    task: str,
) -> Judgement:
    outcome = _outcome(run, rewards)
    by_source: defaultdict[str, float] = defaultdict(float)
    spans: dict[str, str] = {}
    for reward in sorted(rewards, key=lambda each: -abs(each.value)):
        by_source[reward.source] += reward.value
        if reward.span_id is not None:
            spans.setdefault(reward.source, reward.span_id)
    told = {source: verdict for source, verdict in verdicts.items() if source in by_source}
    return Judgement(
        rollout_id=rewards[0].rollout_id,
        attempt_id=rewards[0].attempt_id,
        outcome=trained_reward(outcome, agents) if outcome else None,
        by_agent=agents_totals(outcome),
        lowest=lowest(outcome) if outcome else None,
        task=task,
        by_source=dict(by_source),
        spans=spans | {source: span_id for source, (span_id, _) in told.items()},
        said={source: words for source, (_, words) in told.items()},
    )


def fleet_page(reader: StoreReader) -> FleetPage:
    """Return the workers, the length of the queue, and the attempts that have run the longest."""
    attempts, rollouts = schema.attempts.c, schema.rollouts.c
    by_worker = select(
        attempts.worker, attempts.status, func.count(), func.max(func.coalesce(attempts.ended_ns, attempts.started_ns))
    ).group_by(attempts.worker, attempts.status)
    oldest = (
        select(attempts.rollout_id, attempts.attempt_id, attempts.worker, attempts.started_ns, rollouts.timeout_s)
        .join(schema.rollouts, rollouts.rollout_id == attempts.rollout_id)
        .where(schema.RUNNING)
        .order_by(attempts.started_ns)
        .limit(50)
    )
    with reader.reading() as connection:
        rows = connection.execute(by_worker).all()
        under_way = connection.execute(oldest).all()
        queued = connection.scalar(select(func.count()).select_from(schema.rollouts).where(schema.QUEUED))
    workers: defaultdict[str, dict[str, int]] = defaultdict(dict)
    last: defaultdict[str, int] = defaultdict(int)
    for worker, status, number, at in rows:
        workers[worker][status] = number
        last[worker] = max(last[worker], at or 0)
    now = time.time()
    return FleetPage(
        queued=queued or 0,
        running=sum(status.get("running", 0) for status in workers.values()),
        workers=[
            WorkerRow(
                worker=worker, attempts=sum(status.values()), running=status.get("running", 0), status=status,
                last_s=last[worker] / 1e9 if last[worker] else None,
            )
            for worker, status in sorted(workers.items())
        ],
        oldest=[
            RunningRow(rollout_id=rollout, attempt_id=attempt, worker=worker, seconds=now - at / 1e9, limit_s=limit)
            for rollout, attempt, worker, at, limit in under_way
        ],
    )  # fmt: skip


def loose_page(reader: StoreReader, *, before: int | None, limit: int = 50) -> LoosePage:
    """Return traces that belong to no rollout, the newest first; one page reads a bounded number of spans."""
    spans = schema.spans.c
    query = select(spans.seq, spans.trace_id, spans.rollout_id).order_by(spans.seq.desc()).limit(_NEWEST)
    query = query.where(spans.seq < before) if before is not None else query
    found: dict[str, None] = {}
    last = None
    with reader.reading() as connection:
        rows = connection.execute(query).all()
        for row in rows:
            if row.rollout_id is None:
                if row.trace_id not in found and len(found) == limit:
                    break
                found.setdefault(row.trace_id)
            last = row.seq
        whole = _outside_rollouts(connection, list(found))
    more = (bool(rows) and last != rows[-1].seq) or len(rows) == _NEWEST
    traces = [  # a trace with a newer span was on an earlier page
        _loose(trace_id, its)
        for trace_id in found
        if (its := whole[trace_id]) and (before is None or max(row.seq for row in its) < before)
    ]
    return LoosePage(traces=traces, next=last if more else None)


def _outside_rollouts(connection: Connection, trace_ids: Sequence[str]) -> defaultdict[str, list[Any]]:
    """Return by trace all its spans that belong to no rollout, without their messages."""
    spans = schema.spans.c
    columns = (
        spans.seq, spans.trace_id, spans.parent_id, spans.operation, spans.name, spans.agent, spans.origin,
        spans.start_ns, spans.status,
    )  # fmt: skip
    chosen = among(connection, spans.trace_id, trace_ids)
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for row in connection.execute(select(*columns).where(chosen, spans.rollout_id.is_(None))):
        found[row.trace_id].append(row)
    return found


def _loose(trace_id: str, rows: Sequence[Any]) -> LooseRow:
    first = min(rows, key=lambda row: (row.parent_id is not None, row.start_ns))
    return LooseRow(
        trace_id=trace_id,
        name=first.name,
        origin=first.origin,
        start_s=min(row.start_ns for row in rows) / 1e9,
        spans=len(rows),
        calls=sum(row.operation == CHAT for row in rows),
        errors=sum(row.status == "error" for row in rows),
        agents=sorted({row.agent for row in rows if row.agent is not None}),
    )


def attempt_rows(reader: StoreReader, rollout_id: str) -> list[AttemptRecord]:
    """Return the attempts of a rollout in their order."""
    found = whole_list(reader, AttemptRecord, Where(rollout_ids=[rollout_id]))
    return sorted(found, key=lambda attempt: attempt.number)
