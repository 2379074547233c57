"""Steps, groups and rollouts of a run, from the queue and the rewards: nothing here reads messages."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Select, and_, case, func, or_, select, true

from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.json import dumps
from lightning_spans.store.protocol import Where, whole_list
from lightning_spans.store.sql import schema
from lightning_spans.store.sql.read import among
from lightning_trainer.intervals import Declared, Estimate, estimate_mean, reward_bounds
from lightning_trainer.kits.view.answers.groups import GroupRow, RolloutRow, StepPage
from lightning_trainer.kits.view.answers.runs import StepRow
from lightning_trainer.kits.view.names import chosen_by
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.reading.texts import legible
from lightning_trainer.kits.view.runs import Run
from lightning_trainer.report.log.lines import Line
from lightning_trainer.report.terminal import printable
from lightning_trainer.rl.rollouts import Failed, Outcome, outcomes
from lightning_trainer.rl.scores import agents_totals, lowest, lowest_of, rewards_of, trained_names, trained_reward
from lightning_trainer.run.group_ids import Step, groups_of, step_of

OPEN: Final = ("queued", "running")
_TASK: Final = 300  # characters of a task in a list
_ERROR: Final = 600  # characters of an error, from its end


def steps_by_group(connection: Connection, run: Run) -> dict[str, Step]:
    """Return the groups of a run with their steps; see `run.group_ids.groups_of`."""
    rollouts = schema.rollouts.c
    query = select(rollouts.group_id).group_by(rollouts.group_id).order_by(func.max(rollouts.seq))
    return groups_of(connection.scalars(query.where(within(run))), run.folder, shared=run.shared)


def within(run: Run) -> ColumnElement[bool]:
    """Return the condition that excludes, in the database, most rollouts of other runs in the same store."""
    return schema.rollouts.c.group_id.startswith(run.prefix, autoescape=True) if run.prefix else true()


def group_ids(reader: StoreReader, run: Run, step: Step | None = None) -> list[str]:
    """Return the groups of a run, or of one step of it, in the order of their ids' numbers."""
    with reader.reading() as connection:
        found = steps_by_group(connection, run)
    return sorted((each for each, its in found.items() if step in (None, its)), key=_natural)


def rollouts_in(reader: StoreReader, groups: Sequence[str]) -> list[Rollout]:
    """Return the rollouts of groups without the forks that a run made of them: they are not rollouts of its steps."""
    found = whole_list(reader, Rollout, Where(group_ids=list(groups)))
    return [each for each in found if _counts(step_of(each.group_id), each.replay is not None)]


def _counts(step: Step, is_fork: bool) -> bool:
    return not is_fork or step.mode == "other"


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", text)]


@dataclass(slots=True)
class _Sums:
    """Counts and rewards of a step."""

    groups: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)  # groups with a failure that may count
    status: Counter[str] = field(default_factory=Counter)
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    flat: int = 0


def overview(reader: StoreReader, run: Run) -> list[StepRow]:
    """Return counts and rewards of every step. The database computes them and returns only numbers."""
    steps: defaultdict[Step, _Sums] = defaultdict(_Sums)
    failed = failed_of(run)
    with reader.reading() as connection:
        groups = steps_by_group(connection, run)
        for group_id, status, number in _rows_of_groups(connection.execute(_select_states(run)), groups):
            sums = steps[groups[group_id]]
            sums.groups.add(group_id)
            sums.status[status] += number
            if status == "failed" and failed != "exclude":
                sums.failed.add(group_id)
        earned_by = connection.execute(rewards_query(run, trained=trained_in(connection, run)))
        for group_id, number, reward, low, high in _rows_of_groups(earned_by, groups):
            sums = steps[groups[group_id]]
            sums.lows.append(low)
            sums.highs.append(high)
            sums.means.append(reward / number)
            sums.flat += low == high and group_id not in sums.failed
    logged = {Step(line["kind"], line["step"]): line for line in run.lines()}
    order = sorted(steps, key=lambda each: (each.number, each.mode != "val"))
    declared = run.declared
    return [_row(step, steps[step], logged.get(step), declared) for step in order]


def _row(step: Step, sums: _Sums, line: Line | None, declared: Declared) -> StepRow:
    """Return a step with the mean that the run logged, failures included; without one, of the successes so far."""
    score = estimate_mean(sums.means, reward_bounds([*sums.lows, *sums.highs], declared))
    flat = sums.flat
    if line is not None:
        score = Estimate(line.get("reward"), line.get("reward_low"), line.get("reward_high"))
        logged = line.get("groups_without_signal", math.nan) * line.get("groups", len(sums.groups))
        flat = max(0, min(round(logged), len(sums.groups))) if math.isfinite(logged) else flat
    return StepRow(
        mode=step.mode,
        step=step.number,
        groups=len(sums.groups),
        rollouts=sums.status.total(),
        status=dict(sums.status),
        reward=score.mean,
        reward_low=score.low,
        reward_high=score.high,
        low=min(sums.lows, default=None),
        high=max(sums.highs, default=None),
        flat=flat,
    )


def _rows_of_groups(rows: Iterable[Sequence[Any]], groups: Mapping[str, Step]) -> Iterator[Sequence[Any]]:
    """Return the rows of these groups without those of forks, and without the second column, which marks forks."""
    for group_id, is_fork, *values in rows:
        if group_id in groups and _counts(groups[group_id], bool(is_fork)):
            yield group_id, *values


def _select_states(run: Run) -> Select[Any]:
    rollouts = schema.rollouts.c
    by = (rollouts.group_id, rollouts.replay.is_not(None), rollouts.status)
    return select(*by, func.count()).where(within(run)).group_by(*by)


def trained_in(connection: Connection, run: Run) -> frozenset[str] | None:
    """Return the agents whose rewards count for the run: see `rl.scores.trained_names`."""
    agents = chosen_by(run)
    if agents is None:
        return None
    named = select(schema.rewards.c.agent).distinct().where(schema.rewards.c.agent.is_not(None))
    return trained_names(connection.scalars(named), agents)


def rewards_query(run: Run, trained: frozenset[str] | None = None) -> Select[Any]:
    """Return the query of successful attempts' rewards by group, with forks separate: see `scores.trained_reward`.

    Its columns are the group, whether it is of forks, and the number, sum, lowest and highest of the rewards.
    """
    rewards, attempts, rollouts = schema.rewards.c, schema.attempts.c, schema.rollouts.c
    named = rewards.agent.is_not(None)
    shared = func.sum(case((named, 0.0), else_=rewards.value))
    own = func.sum(case((named, rewards.value), else_=0.0))
    agents = func.count(rewards.agent.distinct())
    by_attempt = select(
        rewards.attempt_id, (shared + own / case((agents == 0, 1), else_=agents)).label("total")
    ).group_by(rewards.attempt_id)
    if trained is not None:
        by_attempt = by_attempt.where(or_(rewards.agent.is_(None), rewards.agent.in_(sorted(trained))))
    if run.rules:
        by_attempt = by_attempt.where(rewards.source.not_in(sorted(run.rules)))
    each = by_attempt.subquery()
    on: ColumnElement[bool] = and_(attempts.attempt_id == each.c.attempt_id, attempts.status == "succeeded")
    value = each.c.total
    by = (rollouts.group_id, rollouts.replay.is_not(None))
    return (
        select(*by, func.count(), func.sum(value), func.min(value).label("lowest"), func.max(value).label("highest"))
        .select_from(each.join(schema.attempts, on).join(schema.rollouts, rollouts.rollout_id == attempts.rollout_id))
        .where(within(run))
        .group_by(*by)
    )


def rewards_by_group(connection: Connection, run: Run, groups: Mapping[str, Step]) -> dict[str, tuple[int, float]]:
    """Return by group the number of successful rollouts with a reward, and the sum of their rewards."""
    rows = _rows_of_groups(connection.execute(rewards_query(run, trained=trained_in(connection, run))), groups)
    return {group: (int(number), float(total)) for group, number, total, _, _ in rows}


def has_loose(connection: Connection) -> bool:
    """Whether any span among the newest belongs to no rollout."""
    spans = schema.spans.c
    newest = select(spans.rollout_id).order_by(spans.seq.desc()).limit(5000).subquery()
    return bool(connection.scalar(select(func.count()).select_from(newest).where(newest.c.rollout_id.is_(None))))


def groups_page(reader: StoreReader, run: Run, step: Step, *, after: int, limit: int) -> StepPage:
    """Return some groups of a step with their rollouts and rewards."""
    ids = group_ids(reader, run, step)
    chosen = ids[after : after + limit]
    found = group_rows(reader, run, step, rollouts_in(reader, chosen))
    order = {group_id: place for place, group_id in enumerate(chosen)}
    rows = sorted(found, key=lambda row: order[row.group_id])
    following = after + limit
    return StepPage(
        mode=step.mode, step=step.number, groups=rows, total=len(ids), next=following if following < len(ids) else None
    )


def outcomes_of(reader: StoreReader, run: Run, rollouts: Sequence[Rollout]) -> dict[str, Outcome]:
    """Return the outcomes of rollouts by id, also of unfinished ones, without the rewards of automatic rules."""
    timeouts, rules = "count" if run.config is None else run.config.timeouts, run.rules
    return {each.rollout.rollout_id: each.without(rules) for each in outcomes(reader, rollouts, timeouts)}


def crash_reward(reader: StoreReader, run: Run, step: Step, outcomes: Iterable[Outcome]) -> float:
    """Return the reward of failures caused by the policy in a step: see `rl.scores.reward_of_failures`."""
    failed = failed_of(run)
    if not isinstance(failed, str):
        return failed
    if all(outcome.crash is None for outcome in outcomes):
        return 0.0  # there is no such failure
    ids = group_ids(reader, run, step)
    with reader.reading() as connection:
        rows = connection.execute(_select_earned(run, among(connection, schema.rollouts.c.group_id, ids))).all()
    earned: defaultdict[str, dict[str | None, float]] = defaultdict(dict)
    for _, attempt_id, agent, value in _rows_of_groups(rows, dict.fromkeys(ids, step)):
        earned[attempt_id][agent] = float(value)
    return min([0.0, *(lowest_of(own.pop(None, 0.0), own.values()) for own in earned.values())])


def _select_earned(run: Run, groups: ColumnElement[bool]) -> Select[Any]:
    """Return the query of each agent's rewards in each successful attempt; the agent None has those of all."""
    rewards, attempts, rollouts = schema.rewards.c, schema.attempts.c, schema.rollouts.c
    on = and_(attempts.attempt_id == rewards.attempt_id, attempts.status == "succeeded")
    joined = schema.rewards.join(schema.attempts, on).join(schema.rollouts, rollouts.rollout_id == attempts.rollout_id)
    by = (rollouts.group_id, rollouts.replay.is_not(None), rewards.attempt_id, rewards.agent)
    chosen = and_(groups, rewards.source.not_in(sorted(run.rules)))
    return select(*by, func.sum(rewards.value)).select_from(joined).where(chosen).group_by(*by)


def group_rows(reader: StoreReader, run: Run, step: Step, rollouts: Sequence[Rollout]) -> list[GroupRow]:
    """Return the rollouts of a step by group; see `rollouts_in`."""
    found = outcomes_of(reader, run, rollouts)
    crashed = crash_reward(reader, run, step, found.values())
    with reader.reading() as connection:
        agents = trained_in(connection, run)
    groups: defaultdict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        groups[rollout.group_id].append(rollout)
    return [
        _group(run, group_id, [found[each.rollout_id] for each in its], crashed, agents)
        for group_id, its in groups.items()
    ]


def tasks_and_rewards(reader: StoreReader, run: Run, rollout_ids: Iterable[str]) -> dict[str, tuple[str, float | None]]:
    """Return the task of each rollout, shortened, and its reward."""
    by_step: defaultdict[Step, list[Rollout]] = defaultdict(list)
    for rollout in whole_list(reader, Rollout, Where(rollout_ids=list(dict.fromkeys(rollout_ids)))):
        by_step[step_of(rollout.group_id)].append(rollout)
    groups = [group for step, its in by_step.items() for group in group_rows(reader, run, step, its)]
    return {row.rollout_id: (group.task, row.reward) for group in groups for row in group.rollouts}


def failed_of(run: Run) -> Failed:
    """Return how the run counts failures."""
    config = run.config
    return config.failed if config is not None else "lowest"


def _group(run: Run, group_id: str, its: Sequence[Outcome], crashed: float, agents: frozenset[str] | None) -> GroupRow:
    rows = [rollout_row(run, outcome, crashed, agents) for outcome in its]
    values = [row.reward for row in rows if row.reward is not None]
    named = {reward.agent for outcome in its for reward in outcome.rewards if reward.agent is not None}
    names = sorted(named if agents is None else named & agents)
    kinds = {
        (crashed,) * max(1, len(names)) if row.status == "crashed" else rewards_of(names, outcome.rewards)
        for row, outcome in zip(rows, its, strict=True)
        if row.reward is not None
    }
    return GroupRow(
        group_id=group_id,
        task=task_text(its[0].rollout, _TASK),
        mean=statistics.fmean(values) if values else None,
        deviation=statistics.pstdev(values) if values else None,
        signal=len(kinds) > 1,
        rollouts=sorted(rows, key=lambda row: _natural(row.rollout_id)),
    )


def rollout_row(run: Run, outcome: Outcome, crashed: float, agents: frozenset[str] | None) -> RolloutRow:
    """Return a rollout as lists show it.

    Args:
        run: the run.
        outcome: of the rollout.
        crashed: reward of a failure caused by the policy.
        agents: see `trained_in`.
    """
    counted = outcome.counts(failed_of(run))
    last = outcome.attempts[-1] if outcome.attempts else None
    attempt = counted or last
    is_crash = counted is not None and counted is outcome.crash
    rewards = () if is_crash else outcome.rewards
    counts = bool(rewards) and counted is not None
    return RolloutRow(
        rollout_id=outcome.rollout.rollout_id,
        attempt_id=attempt.attempt_id if attempt is not None else None,
        status=_status(outcome, is_crash=is_crash),
        attempts=len(outcome.attempts),
        reward=crashed if is_crash else trained_reward(rewards, agents) if counts else None,
        by_agent=agents_totals(rewards),
        lowest=crashed if is_crash else lowest(rewards) if counts else None,
        error=(outcome.error or "")[-_ERROR:] or None if outcome.rollout.status not in OPEN else None,
        kind=_kind(outcome) if outcome.rollout.status not in OPEN else None,
        seconds=seconds_of(attempt),
    )


def _status(outcome: Outcome, *, is_crash: bool) -> str:
    if outcome.rollout.status in OPEN:
        return outcome.rollout.status
    return "crashed" if is_crash else outcome.rollout.status


def _kind(outcome: Outcome) -> str | None:
    """Return the kind of the error: the exception's type, otherwise how the attempt ended."""
    if outcome.error is None:
        return None
    attempt = outcome.crash or (outcome.attempts[-1] if outcome.attempts else None)
    if attempt is not None and attempt.status != "failed":
        return attempt.status
    lines = [line.strip() for line in outcome.error.splitlines() if line.strip()]
    found = re.match(r"([A-Za-z_][\w.]*)(:|$)", lines[-1]) if lines else None
    return found[1].rpartition(".")[2] if found else "failed"


def seconds_of(attempt: AttemptRecord | None) -> float | None:
    """Return how long an attempt took; None while it runs."""
    if attempt is None or attempt.ended_ns is None:
        return None
    return (attempt.ended_ns - attempt.started_ns) / 1e9


def task_text(rollout: Rollout, limit: int) -> str:
    """Return a task as a short text: its only text, or all of it as JSON."""
    texts = [value for value in rollout.task.values() if isinstance(value, str)]
    text = texts[0] if len(texts) == 1 else dumps(dict(rollout.task)).decode()
    return printable(legible(text[:limit]))
