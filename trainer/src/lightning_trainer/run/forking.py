"""The forks of a step: which calls of its rollouts are drawn again, and what became of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_spans.errors import AgentFailedError, ConfigError
from lightning_spans.schema.agents import selects
from lightning_spans.schema.replays import FORKED, REPLAYED, Replay
from lightning_trainer.forks import Recorded, plan, recorded
from lightning_trainer.gateway.replay.sessions import why_ended
from lightning_trainer.rl.batch import transitions_by_attempt
from lightning_trainer.rl.fork_points import Candidate, candidates, choose
from lightning_trainer.rl.rows import why_untrainable

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace
    from lightning_spans.schema.attempts import Rollout
    from lightning_spans.schema.calls import Call
    from lightning_spans.schema.transitions import Transition
    from lightning_spans.store import Store
    from lightning_trainer.config import TrainConfig
    from lightning_trainer.rl.batch import Traces
    from lightning_trainer.rl.rollouts import Outcome


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """Forks to run.

    Attributes:
        rollouts: of all forks.
        points: the calls that are drawn again.
        refused: calls that can't be, by reason.
    """

    rollouts: tuple[Rollout, ...] = ()
    points: tuple[Candidate, ...] = ()
    refused: Mapping[str, int] = field(default_factory=dict)


def planned(
    config: TrainConfig,
    store: Store,
    outcomes: Sequence[Outcome],
    traces: Traces,
    *,
    name: str,
    step: int,
    spread: Mapping[str, float],
) -> ForkPlan:
    """Plan the forks of a step within its budget; the same for the same seed and rollouts.

    Args:
        config: of the run.
        store: where the rollouts are.
        outcomes: of the step's rollouts, which have all ended.
        traces: reads the traces of attempts.
        name: of the run, unique in the store.
        step: its number.
        spread: what came of alternatives before, see `fork_points.choose`.
    """
    groups = {o.attempt.attempt_id: o.rollout.group_id for o in outcomes if o.attempt is not None and o.crash is None}
    by_attempt = {
        trace.attempt_id: transitions
        for trace in traces(list(groups))
        for transitions, _ in transitions_by_attempt([trace]).values()
    }
    found = candidates([by_attempt.get(name, []) for name in groups], lambda call: not _learns(config, call))
    numbers = random.Random(f"{config.seed}/{step}/forks")
    made: list[Rollout] = []
    points: list[Candidate] = []
    refused: Counter[str] = Counter()
    read: dict[str, Recorded] = {}
    for point in choose(found, len(found), config.fork_at, numbers, spread=spread):
        left = config.fork_count - len(made)
        if left < config.alternatives:
            break
        try:
            if point.record not in read:
                read[point.record] = recorded(store, attempt_id=point.record)
            made += plan(
                read[point.record],
                name=name,
                replay=replay_of(config, point),
                times=config.alternatives,
                group_id=groups[point.record],
                timeout_s=config.timeout_s,
            )
            points.append(point)
        except ConfigError as error:
            refused[str(error)] += 1
    return ForkPlan(tuple(made), tuple(points), dict(refused))


def replay_of(config: TrainConfig, point: Candidate) -> Replay:
    """Say how a call is drawn again in a run. Leaves of a tree are draws of their own; alternatives are coupled."""
    tools = config.fork_tools
    return Replay(
        attempt_id=point.record,
        call=point.call,
        coupled=config.coupled,
        tools=tools.get("*", "replay"),
        run_tools=tuple(name for name, what in tools.items() if what == "run" and name != "*"),
        refuse_tools=tuple(name for name, what in tools.items() if what == "refuse" and name != "*"),
    )


def _learns(config: TrainConfig, call: Transition) -> bool:
    return selects(config.agents or ("*",), call.agent) and why_untrainable(call) is None


@dataclass(frozen=True, slots=True)
class Forked:
    """What became of a step's forks.

    Attributes:
        ended: those that were not as their record, by reason.
        metrics: the same, and what it cost, as numbers by name.
    """

    ended: Mapping[str, int]
    metrics: Mapping[str, float]

    @property
    def line(self) -> str:
        """Say to people what forks cost."""
        m = self.metrics
        return (
            f"{m['forks']:.0f} forks at {m['fork_points']:.0f} calls: {m['fork_calls_drawn']:.0f} model calls made and"
            f" {m['fork_calls_replayed']:.0f} given from the record; what follows the forked calls is"
            f" {m['fork_continuations']:.1f} rollouts long"
        )


def forked(plan: ForkPlan, outcomes: Sequence[Outcome], traces: Traces) -> Forked:
    """Count forks and what they cost.

    Args:
        plan: what was to be run.
        outcomes: of its rollouts.
        traces: reads the traces of attempts.
    """
    its = {trace.attempt_id: trace for trace in traces([*_attempts(outcomes), *{p.record for p in plan.points}])}
    calls = [_calls(its.get(name)) for name in _attempts(outcomes)]
    why = [why_ended(o.attempts[-1], its) for o, its in zip(_begun(outcomes), calls, strict=True)]
    ended = Counter(reason for reason in why if reason is not None)
    failed = sum(o.attempt is None and reason is None for o, reason in zip(_begun(outcomes), why, strict=True))
    drawn = sum(REPLAYED not in call.sampling for own in calls for call in own)
    rest = sum(_rest(own, its.get(_record(o))) for o, own in zip(_begun(outcomes), calls, strict=True))
    metrics = {
        "forks": len(plan.rollouts),
        "fork_points": len(plan.points),
        "forks_ended": sum(ended.values()),
        "forks_failed": failed,
        "forks_refused": sum(plan.refused.values()),
        "fork_calls_drawn": drawn,
        "fork_calls_replayed": sum(map(len, calls)) - drawn,
        "fork_continuations": rest,
    }
    return Forked(dict(ended), {name: float(value) for name, value in metrics.items()})


def refuse_ended(plan: ForkPlan, found: Forked) -> None:
    """Refuse a program that can't be brought back to a single one of its calls.

    Raises:
        AgentFailedError: says what differs, or why nothing could be forked.
    """
    reasons = Counter(found.ended) or Counter(plan.refused)
    if not plan.rollouts or sum(found.ended.values()) == len(plan.rollouts):
        why = "\n".join(f"  {count}: {reason}" for reason, count in reasons.most_common(3))
        what = f"not one of {len(plan.rollouts)} forks" if plan.rollouts else "not one call"
        raise AgentFailedError(
            f"{what} could be brought back to its call, so there are no alternatives to learn from:\n{why}\n"
            "See with `lightning-rl fork --dry-run` where the program differs from one run to the next."
        )


def _begun(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.attempts]


def _attempts(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the attempt of each fork that began: it has one try."""
    return [outcome.attempts[-1].attempt_id for outcome in _begun(outcomes)]


def _calls(trace: Trace | None) -> list[Call]:
    return [] if trace is None else [node.call for node in trace.chats if node.call is not None]


def _record(outcome: Outcome) -> str:
    return "" if outcome.rollout.replay is None else outcome.rollout.replay.attempt_id


def _rest(calls: Sequence[Call], record: Trace | None) -> float:
    """Return the calls of a fork from the drawn one on, in shares of its record's."""
    place = next((n for n, call in enumerate(calls) if FORKED in call.sampling), len(calls))
    return 0.0 if record is None else (len(calls) - place) / max(1, len(record.chats))
