"""Assigns the rewards of each attempt to its calls, and chooses the calls that are compared."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_spans.adapter.nodes import HalfCall
from lightning_spans.adapter.trace import count_joins
from lightning_spans.schema.agents import check_spelling, selects
from lightning_spans.schema.replays import REPLAYED
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.transitions import Transition
from lightning_trainer.choices import Alone
from lightning_trainer.rl.account import Account, UntrainedReason
from lightning_trainer.rl.batch.attempts import (
    CountedAttempt,
    Traces,
    counted_attempt,
    has_fork_ended,
    teams_of,
    transitions_by_attempt,
)
from lightning_trainer.rl.batch.calls import FINAL, Calls, CountedCall, CreditedCall, CreditedValue
from lightning_trainer.rl.credit.assigners import CreditAssigner, unclaimed_rewards
from lightning_trainer.rl.credit.played import AcrossAttempts
from lightning_trainer.rl.credit.values import Level, levels_of, lost_in
from lightning_trainer.rl.rollouts import Failed, Outcome
from lightning_trainer.rl.scores import reward_of_failures
from lightning_trainer.rl.sources import Shares, take_apart


def calls_of(
    outcomes: Sequence[Outcome],
    traces: Traces,
    *,
    credit: CreditAssigner | AcrossAttempts,
    failed: Failed,
    agents: tuple[str, ...] | None,
    weights: Mapping[str, float],
    apart: bool,
    known_agents: Iterable[str] = (),
    alone: Alone = "skip",
) -> Calls:
    """Assign the rewards of each attempt to its calls, and choose the calls that are compared.

    Args:
        outcomes: all rollouts of whole groups.
        traces: reads the traces of attempts.
        credit: assigns the rewards of an attempt. Only an assigner that compares all attempts gets forks too, because
            their outcome is not a sample of the policy's behaviour.
        failed: the reward of a rollout that failed because of the policy; ``exclude`` leaves it out.
        agents: names or globs of the agents to train; None: all that have a name.
        weights: of automatic rules, by their sources.
        apart: whether each rule is compared separately and weighted afterwards, as when advantages are divided by a
            deviation. Other rewards are added up unchanged.
        known_agents: names seen earlier in the run: an agent need not speak in every batch.
        alone: with `batch`, the calls of a rollout without others in its group are compared, too.

    Raises:
        UnknownAgentError: an agent was selected by a name that was never seen, and is close to one that was.
    """
    read = list(traces([a.attempt_id for o in outcomes for a in o.attempts]))
    by_attempt = transitions_by_attempt(read, agents)
    seen_agents = Counter(t.agent for ts, _ in by_attempt.values() for t in ts)
    patterns = ("*",) if agents is None else agents
    missed: Counter[str] = Counter(
        half.reason for trace in read for half in trace.unjoined if not _went_elsewhere(half, patterns)
    )
    account = Account(joined=count_joins(read).joined, unjoined=dict(missed))
    if agents is not None and seen_agents:
        check_spelling(patterns, {*known_agents, *(name for name in seen_agents if name is not None)})

    across = isinstance(credit, AcrossAttempts)
    counted, account = _that_count(outcomes, by_attempt, account, failed=failed, forks=across)
    values = credit([its.played for its in counted]) if isinstance(credit, AcrossAttempts) else None
    episodes = [
        _episode(its, credit, None if values is None else values[n], weights=weights, apart=apart)
        for n, its in enumerate(counted)
    ]
    for episode in episodes:
        account = account.plus_unclaimed(episode.unclaimed)
    chosen, left_out = _choose_calls(episodes, patterns, across=across, alone=alone)
    for reason, count in Counter(call.left_out for call in left_out if call.left_out is not None).items():
        account = account.plus_dropped(reason, count)
    automatic = tuple(reward for its in counted for reward in its.automatic)
    judged = any(episode.judged for episode in episodes)
    given = tuple(reward for its in counted for reward in its.rewards)
    return Calls(tuple(chosen), tuple(left_out), account, seen_agents, automatic, judged, given)


def _went_elsewhere(half: HalfCall, patterns: Sequence[str]) -> bool:
    """Whether an untrained agent's own endpoint answered, as intended, so that nothing of the call is missing."""
    if half.node is None or half.node.path is None or selects(patterns, half.node.path):
        return False
    return half.node.span.status != "error"


def _that_count(
    outcomes: Sequence[Outcome],
    by_attempt: Mapping[str, tuple[list[Transition], list[Reward]]],
    account: Account,
    *,
    failed: Failed,
    forks: bool,
) -> tuple[list[CountedAttempt], Account]:
    """Return the attempts that count, including forks if requested, and the account with the calls of the others."""
    counted: list[CountedAttempt] = []
    crashed, teams = reward_of_failures(outcomes, failed), teams_of(outcomes)
    for outcome in outcomes:
        attempt = outcome.counts(failed)
        seen = {a.attempt_id: len(by_attempt[a.attempt_id][0]) for a in outcome.attempts if a.attempt_id in by_attempt}
        if outcome.rollout.replay is not None and (not forks or has_fork_ended(outcome, by_attempt)):
            account = account.plus_dropped(
                UntrainedReason.FORK_ENDED if forks else UntrainedReason.FORK, sum(seen.values())
            )
            continue
        its = None if attempt is None else counted_attempt(outcome, attempt, by_attempt, crashed, teams)
        for attempt_id, calls in seen.items():
            if its is None or attempt_id != its.attempt_id:
                account = account.plus_dropped(outcome.why_left_out(attempt_id), calls)
        counted += [its] if its else []
    return counted, account


def _choose_calls(
    episodes: Sequence[Episode], patterns: Sequence[str], *, across: bool, alone: Alone
) -> tuple[list[CreditedCall], list[CountedCall]]:
    """Return the calls that are compared, and the others, each with its reason."""
    members = Counter(episode.group_id for episode in episodes)
    chosen: list[CreditedCall] = []
    left_out: list[CountedCall] = []
    for episode in episodes:
        is_alone = alone == "skip" and not across and members[episode.group_id] < 2
        for call in episode.calls():
            reason = _why_left_out(call.transition, call.credit, patterns, is_alone=is_alone)
            reason = UntrainedReason.NO_ALTERNATIVE if across and reason == UntrainedReason.NO_REWARD else reason
            if reason is None:
                chosen.append(call)
            else:
                left_out.append(CountedCall(call.transition, call.group_id, call.credit, left_out=reason))
    return chosen, left_out


@dataclass(frozen=True, slots=True)
class Episode:
    """An attempt that counts: all its transitions, and their credit.

    Attributes:
        group_id: its group.
        transitions: of every agent, selected or not.
        levels: the values to compare: one for each transition, NaN if no reward concerns the call.
        unclaimed: rewards that reach nobody, such as those for agents that made no call.
        shares: the values of each level by source; None if automatic rules are not compared separately.
        judged: whether anything except automatic rules gave a reward.
    """

    group_id: str
    transitions: tuple[Transition, ...]
    levels: tuple[Level, ...]
    unclaimed: tuple[Reward, ...]
    shares: Shares | None
    judged: bool

    def calls(self) -> Iterator[CreditedCall]:
        """Return each transition with its values."""
        for m, transition in enumerate(self.transitions):
            values = tuple(_at(level, m) for level in self.levels)
            yield CreditedCall(transition, self.group_id, values, self._parts(m))

    def _parts(self, m: int) -> dict[str, tuple[float, ...]]:
        if self.shares is None:
            return {FINAL: tuple(level.values[m] for level in self.levels)}
        parts = {FINAL: self.shares.rest, **self.shares.by_source}
        return {source: tuple(level[m] for level in levels) for source, levels in parts.items()}


def _at(level: Level, m: int) -> CreditedValue:
    place = "" if level.places is None else level.places[m]
    weight = level.weight if isinstance(level.weight, (int, float)) else level.weight[m]
    return CreditedValue(level.values[m], place, weight, level.by_step)


def _episode(
    its: CountedAttempt,
    credit: CreditAssigner | AcrossAttempts,
    values: Sequence[float] | None,
    *,
    weights: Mapping[str, float],
    apart: bool,
) -> Episode:
    """Assign the rewards of an attempt. If credit compared all attempts, `values` is its result for this one."""
    shares, unheard = None, tuple(unclaimed_rewards(its.transitions, its.rewards))
    if not isinstance(credit, AcrossAttempts):
        values = credit(its.transitions, its.rewards)
        shares = take_apart(credit, its.transitions, its.rewards, weights) if apart and weights else None
        unheard = (*unheard, *lost_in(values))
    judged = any(reward.source not in weights for reward in its.rewards)
    return Episode(
        its.outcome.rollout.group_id, tuple(its.transitions), levels_of(values or []), unheard, shares, judged
    )


def _why_left_out(transition: Transition, value: float, patterns: Sequence[str], *, is_alone: bool) -> str | None:
    """Return why a transition is not compared within its group; None if it is.

    Nothing else is left out before advantages are computed: a call without tokens is part of its group's baseline.
    """
    if not selects(patterns, transition.path):
        return UntrainedReason.NOT_SELECTED
    if REPLAYED in transition.sampling:
        return UntrainedReason.REPLAYED
    if is_alone:
        return UntrainedReason.GROUP_INCOMPLETE
    return UntrainedReason.NO_REWARD if math.isnan(value) else None
