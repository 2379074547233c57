"""Rewards by source, tools, the fleet, and traces outside of rollouts."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, func, select

from lightning_spans.adapter.nodes import Node
from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.attempts import AttemptRecord
from lightning_spans.schema.json import loads
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import CHAT, TOOL_ARGUMENTS
from lightning_spans.store.protocol import Where, whole_list
from lightning_spans.store.sql import schema
from lightning_spans.store.sql.read import among
from lightning_trainer.kits.judging.spans import EVALUATE, EXPLANATION, NAME
from lightning_trainer.kits.view.answers.calls import CallLink
from lightning_trainer.kits.view.answers.learning import Judgement, RewardsPage, SourceRow
from lightning_trainer.kits.view.answers.store import (
    FleetPage,
    LoosePage,
    LooseRow,
    RunningRow,
    ToolRow,
    ToolsPage,
    WorkerRow,
)
from lightning_trainer.kits.view.names import names_in
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.reading.steps import group_ids, rollouts_in, trained_in
from lightning_trainer.kits.view.reading.texts import legible
from lightning_trainer.kits.view.runs import Run
from lightning_trainer.report.step_metrics import tool_name
from lightning_trainer.rl.scores import earned
from lightning_trainer.run.group_ids import Step

_MOST: Final = 2000  # attempts in a scatter
_WORDS: Final = 1000  # characters of a verdict
_NEWEST: Final = 20_000  # spans that one page of loose traces looks through


def rewards_page(reader: StoreReader, run: Run, step: Step) -> RewardsPage:
    """Return the rewards of a step by source, and of each attempt."""
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
    shown = list(by_attempt.values())[:_MOST]
    with reader.reading() as connection:
        agents = trained_in(connection, run)
    verdicts = _verdicts(reader, [its[0].attempt_id for its in shown])
    return RewardsPage(
        sources=sources,
        attempts=[_judgement(run, its, verdicts[its[0].attempt_id], agents) for its in shown],
        total=len(by_attempt),
    )


def _verdicts(reader: StoreReader, attempt_ids: Sequence[str]) -> defaultdict[str, dict[str, tuple[str, str]]]:
    """Return by attempt, by source: the span of a verdict, and its words."""
    spans = schema.spans.c
    found: defaultdict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    with reader.reading() as connection:
        chosen = among(connection, spans.attempt_id, attempt_ids)
        query = select(spans.attempt_id, spans.span_id, spans.attributes).where(chosen, spans.operation == EVALUATE)
        for attempt_id, span_id, attributes in connection.execute(query):
            values = loads(attributes)
            found[attempt_id][str(values.get(NAME))] = (span_id, legible(str(values.get(EXPLANATION) or ""))[:_WORDS])
    return found


def _judgement(
    run: Run, rewards: Sequence[Reward], verdicts: Mapping[str, tuple[str, str]], agents: frozenset[str] | None
) -> Judgement:
    outcome = [reward for reward in rewards if reward.source not in run.rules]
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
        outcome=earned(outcome, agents) if outcome else None,
        by_source=dict(by_source),
        spans=spans | {source: span_id for source, (span_id, _) in told.items()},
        said={source: words for source, (_, words) in told.items()},
    )


class Tools:
    """Counts tool calls, trace by trace.

    Args:
        chosen: names or globs of the agents that the run trains.
    """

    def __init__(self, chosen: Sequence[str] | None = None) -> None:
        self._chosen = chosen
        self._calls: defaultdict[tuple[str, str | None], list[tuple[Trace, Node]]] = defaultdict(list)
        self._repeated: Counter[tuple[str, str | None]] = Counter()
        self._rollouts = 0

    def add(self, trace: Trace) -> None:
        """Count what a trace's tools did."""
        self._rollouts += 1
        seen: Counter[tuple[str, str | None, str]] = Counter()
        names = names_in(trace, self._chosen)
        for node in trace.tools:
            key = (tool_name(node), names[node])
            self._calls[key].append((trace, node))
            seen[*key, str(node.span.attributes.get(TOOL_ARGUMENTS))] += 1
        for (tool, agent, _), times in seen.items():
            self._repeated[tool, agent] += times - 1

    def page(self) -> ToolsPage:
        """Return a row for each tool of each agent, the most errors first."""
        rows = [self._row(key, calls) for key, calls in self._calls.items()]
        return ToolsPage(rollouts=self._rollouts, tools=sorted(rows, key=lambda row: (-row.errors, -row.calls)))

    def _row(self, key: tuple[str, str | None], calls: Sequence[tuple[Trace, Node]]) -> ToolRow:
        times = [(node.span.end_ns - node.span.start_ns) / 1e6 for _, node in calls]
        failed = [(trace, node) for trace, node in calls if node.span.status == "error"]
        slowest = calls[max(range(len(times)), key=times.__getitem__)]
        return ToolRow(
            tool=key[0],
            agent=key[1],
            calls=len(calls),
            errors=len(failed),
            repeated=self._repeated[key],
            ms_median=statistics.median(times),
            ms_slowest=max(times),
            error=(failed[0][1].error or "")[:300] if failed else None,
            slowest=_tool_link(*slowest),
            failed=_tool_link(*failed[0]) if failed else None,
        )


def _tool_link(trace: Trace, node: Node) -> CallLink:
    return CallLink(
        rollout_id=trace.rollout_id or "",
        attempt_id=trace.attempt_id or "",
        span_id=node.span.span_id,
        agent=node.span.agent,
        turn=0,
        text=legible(str(node.span.attributes.get(TOOL_ARGUMENTS) or "")[:200]),
    )


def fleet_page(reader: StoreReader) -> FleetPage:
    """Return who claims rollouts, what waits, and what has run the longest."""
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
    """Return traces that belong to no rollout, the newest first; one page looks through a bounded number of spans."""
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
    traces = [  # what has a newer span stood on an earlier page
        _loose(trace_id, its)
        for trace_id in found
        if (its := whole[trace_id]) and (before is None or max(row.seq for row in its) < before)
    ]
    return LoosePage(traces=traces, next=last if more else None)


def _outside_rollouts(connection: Connection, trace_ids: Sequence[str]) -> defaultdict[str, list[Any]]:
    """Return by trace all its spans that belong to no rollout, without what was said."""
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
