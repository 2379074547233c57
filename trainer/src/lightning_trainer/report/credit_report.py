"""Who earned the reward: credit and advantages by agent and turn, and the account behind them. Pure functions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_spans.schema.agents import label, selects
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.batch.calls import CountedCall
from lightning_trainer.rl.rollouts import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCredit:
    """The calls of one agent at one turn.

    Attributes:
        agent: its name; None for calls without one.
        turn: number of the call among all model calls of its attempt, from 0.
        calls: how many, in attempts that count.
        credited: how many of them a reward applies to.
        credit: mean of their credit; None if there is none.
        credit_sum: sum of it.
        contrast: mean absolute advantage, in the algorithm's units; None if not compared.
        compared: how many have an advantage, because there was something to compare them with.
        better: share of the compared calls that did better than what they were compared with.
        worse: share that did worse.
        trained: whether the run trains this agent.
    """

    agent: str | None
    turn: int
    calls: int
    credited: int
    credit: float | None
    credit_sum: float
    contrast: float | None
    compared: int
    better: float
    worse: float
    trained: bool

    def to_json(self) -> dict[str, Any]:
        """Return the turn as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditReport:
    """The rewards that were given, and how they were assigned.

    Attributes:
        credit: name of the assigner.
        rollouts: of the run, as far as they have ended.
        failed: how many of them never succeeded.
        attempts: how many count.
        calls: model calls of all attempts.
        given: sum of the rewards of attempts that count, by source and by the agent that they name (None: the whole
            attempt).
        rewards: sum of all of these.
        credited: sum of the credit of all calls, the choices of a call counted once.
        by_agent: sum of credit over attempts for each agent, counting one call of each per attempt.
        unclaimed: number of rewards that reached no call, by the agent that they name.
        left_out: number of calls that were not compared, by reason.
        flat_groups: groups in which there was nothing to compare.
        groups: of attempts that count.
    """

    credit: str
    rollouts: int
    failed: int
    attempts: int
    calls: int
    given: Mapping[str, Mapping[str | None, float]]
    rewards: float
    credited: float
    by_agent: Mapping[str | None, float]
    unclaimed: Mapping[str, int] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)
    flat_groups: int = 0
    groups: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object; the whole attempt is called ``*``."""
        named = {source: {agent or "*": value for agent, value in by.items()} for source, by in self.given.items()}
        return {**asdict(self), "given": named, "by_agent": {agent or "": v for agent, v in self.by_agent.items()}}

    def lines(self) -> list[str]:
        """Return the report as text, one fact per line."""
        found = [f"{self.rollouts} rollouts, {self.failed} failed; {self.attempts} attempts count, {self.calls} calls"]
        for source, by in sorted(self.given.items()):
            whom = ", ".join(f"{value:+.3f} for {agent or 'the attempt'}" for agent, value in by.items())
            found.append(f"given by {source}: {whom}")
        found.append(
            f"rewards {self.rewards:+.3f}; credit {self.credited:+.3f} over calls, {self._conservation_note()}"
        )
        found += [f"{count} rewards for {agent} reached no agent" for agent, count in self.unclaimed.items()]
        found += [f"{count} calls not compared: {reason}" for reason, count in sorted(self.left_out.items())]
        found.append(f"{self.flat_groups} of {self.groups} groups had nothing to compare")
        return found

    def _conservation_note(self) -> str:
        if math.isclose(self.credited, self.rewards, rel_tol=1e-9, abs_tol=1e-9):
            return "conserved"
        over_agents = sum(self.by_agent.values())
        if math.isclose(over_agents, self.rewards, rel_tol=1e-9, abs_tol=1e-9):
            return f"{over_agents:+.3f} over agents, conserved"
        return f"{over_agents:+.3f} over agents, shared by several"


def turns_of(calls: Iterable[CountedCall], chosen: Sequence[str] | None) -> list[TurnCredit]:
    """Group calls by agent and turn, in the order of names and turns; calls without a name come last.

    Args:
        calls: of attempts that count, compared over all agents.
        chosen: names or globs of the agents that the run trains; None: all that have a name.
    """
    by_turn: defaultdict[tuple[str | None, int], list[CountedCall]] = defaultdict(list)
    for call in calls:
        path = call.transition.path
        by_turn[None if path is None else label(path, chosen), call.transition.turn].append(call)
    patterns = ("*",) if chosen is None else chosen
    order = sorted(by_turn, key=lambda turn: (turn[0] is None, turn[0] or "", turn[1]))
    return [
        _turn_credit(agent, turn, found := by_turn[agent, turn], trained=selects(patterns, found[0].transition.path))
        for agent, turn in order
    ]


def credit_report(batch: Batch, outcomes: Sequence[Outcome], credit: str) -> CreditReport:
    """Return the report.

    Args:
        batch: of these outcomes.
        outcomes: of all rollouts that have ended.
        credit: name of the assigner.
    """
    given: defaultdict[str, defaultdict[str | None, float]] = defaultdict(lambda: defaultdict(float))
    for reward in batch.given:
        given[reward.source][reward.agent] += reward.value
    credited = [call for call in batch.calls if not math.isnan(call.credit)]
    each = {(call.transition.attempt_id, call.transition.span_id): call.credit for call in credited}
    last = {(call.transition.attempt_id, call.transition.agent): call.credit for call in credited}
    by_agent: defaultdict[str | None, float] = defaultdict(float)
    for (_, agent), value in last.items():
        by_agent[agent] += value
    return CreditReport(
        credit=credit,
        rollouts=len(outcomes),
        failed=sum(outcome.attempt is None for outcome in outcomes),
        attempts=len({call.transition.attempt_id for call in batch.calls}),
        calls=batch.account.seen,
        given={source: dict(by) for source, by in given.items()},
        rewards=sum(reward.value for reward in batch.given),
        credited=sum(each.values()),
        by_agent=dict(by_agent),
        unclaimed=dict(batch.account.unclaimed),
        left_out=dict(Counter(call.left_out for call in batch.calls if call.left_out is not None)),
        flat_groups=len(batch.flat_groups),
        groups=len({call.group_id for call in batch.calls}),
    )


def _turn_credit(agent: str | None, turn: int, calls: Sequence[CountedCall], *, trained: bool) -> TurnCredit:
    credit = [call.credit for call in calls if not math.isnan(call.credit)]
    advantages = [call.advantage for call in calls if not math.isnan(call.advantage)]
    return TurnCredit(
        agent=agent,
        turn=turn,
        calls=len(calls),
        credited=len(credit),
        credit=sum(credit) / len(credit) if credit else None,
        credit_sum=sum(credit),
        contrast=sum(map(abs, advantages)) / len(advantages) if advantages else None,
        compared=len(advantages),
        better=sum(advantage > 0 for advantage in advantages) / max(1, len(advantages)),
        worse=sum(advantage < 0 for advantage in advantages) / max(1, len(advantages)),
        trained=trained,
    )
