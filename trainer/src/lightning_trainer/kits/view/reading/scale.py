"""The colours of a run: one scale of rewards and one colour for each agent, the same on all its pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import ColumnElement, func, select, true

from lightning_spans.store.sql import schema
from lightning_trainer.intervals import reward_bounds
from lightning_trainer.kits.view.answers.runs import ScalePage
from lightning_trainer.kits.view.names import chosen_by
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.kits.view.reading.steps import rewards_query, trained_in, within
from lightning_trainer.kits.view.runs import Run
from lightning_trainer.report.log.lines import Line

_BY_AGENT: Final = ("reward/", "response_tokens/", "calls_per_rollout/")  # metrics with an agent's name
_GLOBS: Final = frozenset("*?[")


def scale_of(run: Run, reader: StoreReader | None, *, deployed: bool) -> ScalePage:
    """Return the scale of a run.

    Args:
        run: the run.
        reader: of its store; None if it has none.
        deployed: see `ScalePage`.
    """
    lines = run.lines()
    values = [float(line["reward"]) for line in lines if line.get("reward") is not None]
    agents = _named_in(lines) | {name for name in chosen_by(run) or () if not _GLOBS & set(name)}
    if reader is not None:
        values += _rewards_in(reader, run)
        agents |= _rewarded_in(reader, run)
    low, high, _ = reward_bounds(values, run.declared)
    return ScalePage(low=low, high=high, agents=sorted(agents), deployed=deployed)


def _named_in(lines: Sequence[Line]) -> set[str]:
    names = {name for line in lines if line["kind"] == "train" for name in line}
    return {name.removeprefix(start) for name in names for start in _BY_AGENT if name.startswith(start)}


def _rewards_in(reader: StoreReader, run: Run) -> list[float]:
    """Return the lowest and the highest reward of an attempt, and of an agent."""
    rewards = schema.rewards.c
    with reader.reading() as connection:
        groups = rewards_query(run, trained=trained_in(connection, run)).subquery()
        whole = connection.execute(select(func.min(groups.c.lowest), func.max(groups.c.highest))).one()
        own = select(func.min(rewards.value), func.max(rewards.value)).where(rewards.agent.is_not(None))
        if run.rules:
            own = own.where(rewards.source.not_in(sorted(run.rules)))
        agents = connection.execute(own.where(_in_run(run))).one()
    return [float(value) for value in (*whole, *agents) if value is not None]


def _rewarded_in(reader: StoreReader, run: Run) -> set[str]:
    rewards = schema.rewards.c
    query = select(rewards.agent).distinct().where(rewards.agent.is_not(None), _in_run(run))
    with reader.reading() as connection:
        return {str(name) for name in connection.scalars(query)}


def _in_run(run: Run) -> ColumnElement[bool]:
    if not run.prefix:
        return true()
    return schema.rewards.c.rollout_id.in_(select(schema.rollouts.c.rollout_id).where(within(run)))
