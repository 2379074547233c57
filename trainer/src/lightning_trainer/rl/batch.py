"""From rollouts to training rows: the steps that every algorithm takes, in their order. Pure functions.

Every attempt becomes calls with credit (`calls_of`), each call is compared with others (`compared`), and only then is
anything left out and laid out in rows (`batch_of`). An algorithm, in `lightning_trainer.rl.algorithms`, says what is
compared with what.

Axes: `_M` calls that are compared, `_R` rows.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_spans import hooks
from lightning_spans.adapter.trace import count_joins
from lightning_spans.schema.agents import check_spelling, label, selects
from lightning_spans.schema.attempts import AttemptRecord
from lightning_spans.schema.replays import ENDED, REPLAYED
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.transitions import Transition
from lightning_trainer.rl import account as reasons
from lightning_trainer.rl.account import Account
from lightning_trainer.rl.advantages import FloatArray
from lightning_trainer.rl.credit.assigners import CreditAssigner, unclaimed
from lightning_trainer.rl.credit.played import AcrossAttempts, Fork, Played
from lightning_trainer.rl.credit.values import Level, levels_of, lost_in
from lightning_trainer.rl.rollouts import Failed, Outcome, ended_early
from lightning_trainer.rl.rows import Row, make_rows
from lightning_trainer.rl.scores import reward_of_failures, total
from lightning_trainer.rl.sources import Shares, take_apart

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace

FINAL: Final = ""  # the source that stands for all that no automatic rule gave

Parts: TypeAlias = "dict[str, FloatArray]"  # by source: (M,) its part of the advantages
Traces: TypeAlias = "Callable[[Sequence[str]], Iterable[Trace]]"  # attempt ids -> their traces, in any order
# rows -> for each of them (K,), what is taken off the reward at each of its trained tokens
Penalty: TypeAlias = "Callable[[Sequence[Row]], Sequence[NDArray[Any]]]"


@dataclass(frozen=True, slots=True)
class CreditedCall:
    """A call that is compared, with one value for each comparison that its credit asks for."""

    transition: Transition
    group_id: str
    values: tuple[CreditedValue, ...]
    parts: Mapping[str, tuple[float, ...]]  # of each value, by source: that of an automatic rule; FINAL: all others'

    @property
    def credit(self) -> float:
        """Its share of the rewards."""
        return self.values[0].value


@dataclass(frozen=True, slots=True)
class CreditedValue:
    """What one comparison looks at of a call.

    Attributes:
        value: what is compared.
        place: compared with calls of the same place alone.
        weight: of this comparison.
        by_step: whether each call counts by itself; else each attempt counts once.
    """

    value: float
    place: str
    weight: float
    by_step: bool


@dataclass(frozen=True, slots=True)
class Judged:
    """A call of an attempt that counts, and what was made of it.

    Attributes:
        transition: the call.
        group_id: the group of its attempt.
        credit: its share of the rewards; NaN where none concerns it.
        advantage: how much better than what it was compared with; NaN where it was not compared.
        left_out: why it was not compared; None where it was.
    """

    transition: Transition
    group_id: str
    credit: float
    advantage: float = math.nan
    left_out: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What a batch of rollouts comes to.

    Attributes:
        rows: training rows, those without gradient among them.
        account: what became of every model call.
        agents: number of calls by agent; None stands for calls that nothing names.
        automatic: what automatic rules gave to the attempts that count.
        calls: every call of the attempts that count.
        flat_groups: groups in which there was nothing to compare.
        tied_groups: these, and groups in which only automatic rules found a difference, where others gave rewards.
    """

    rows: list[Row]
    account: Account
    agents: Mapping[str | None, int]
    automatic: tuple[Reward, ...] = ()
    calls: tuple[Judged, ...] = ()
    flat_groups: frozenset[str] = frozenset()
    tied_groups: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of a batch's attempts that count.

    Attributes:
        compared: (M,) those that are compared.
        left_out: the others, each with the reason.
        account: what became of the calls that are not compared, of other attempts too.
        agents: number of calls by agent.
        automatic: what automatic rules gave to the attempts that count.
        judged: whether anybody but automatic rules gave a reward.
    """

    compared: tuple[CreditedCall, ...]
    left_out: tuple[Judged, ...]
    account: Account
    agents: Mapping[str | None, int]
    automatic: tuple[Reward, ...]
    judged: bool

    @property
    def transitions(self) -> list[Transition]:
        """(M,) the calls themselves."""
        return [call.transition for call in self.compared]

    @property
    def groups(self) -> dict[str, str]:
        """Return the group of each rollout."""
        return {call.transition.rollout_id: call.group_id for call in self.compared}


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
    lone: bool = False,
) -> Calls:
    """Share the rewards of each attempt out over its calls, and choose the calls that are compared.

    Args:
        outcomes: all rollouts of whole groups.
        traces: reads the traces of attempts.
        credit: shares the rewards of an attempt out. One that looks at all attempts is given forks too; any other is
            not, for what they came to is no sample of what the policy does.
        failed: the reward of a rollout that failed by the policy's doing; ``exclude`` leaves it out.
        agents: names or globs of the agents to train; None: all that have a name.
        weights: of automatic rules, by their sources.
        apart: whether each rule is compared by itself and weighed after, as where advantages are divided by a
            deviation. What others give is added up as it is.
        known_agents: names seen earlier in the run: an agent need not speak in every batch.
        lone: whether the calls of a rollout that is alone in its group are compared too.

    Raises:
        UnknownAgentError: an agent was selected by a name that was never seen, and is nearly one that was.
    """
    read = list(traces([a.attempt_id for o in outcomes for a in o.attempts]))
    by_attempt, joins = transitions_by_attempt(read, agents), count_joins(read)
    account = Account(joined=joins.joined, unjoined=joins.unjoined)
    seen_agents = Counter(t.agent for ts, _ in by_attempt.values() for t in ts)
    patterns = ("*",) if agents is None else agents
    if agents is not None and seen_agents:
        check_spelling(patterns, {*known_agents, *(name for name in seen_agents if name is not None)})

    counted: list[_Counted] = []
    crashed, across = reward_of_failures(outcomes, failed), isinstance(credit, AcrossAttempts)
    for outcome in outcomes:
        attempt = outcome.counts(failed)
        seen = sum(len(by_attempt[a.attempt_id][0]) for a in outcome.attempts if a.attempt_id in by_attempt)
        if outcome.rollout.replay is not None and (not across or _ended(outcome, by_attempt)):
            account = account.plus_dropped(reasons.FORK_ENDED if across else reasons.FORK, seen)
            continue
        its = None if attempt is None else _counted(outcome, attempt, by_attempt, crashed)
        account = account.plus_dropped(reasons.ATTEMPT_FAILED, seen - (len(its.transitions) if its else 0))
        counted += [its] if its else []
    values = credit([its.played for its in counted]) if isinstance(credit, AcrossAttempts) else None
    episodes = [
        _episode(its, credit, None if values is None else values[n], weights=weights, apart=apart)
        for n, its in enumerate(counted)
    ]
    automatic = [reward for its in counted for reward in its.automatic]
    for episode in episodes:
        account = account.plus_unclaimed(episode.unclaimed)

    members = Counter(episode.group_id for episode in episodes)
    chosen, left_out = [], []
    for episode in episodes:
        alone = not lone and not across and members[episode.group_id] < 2
        for call in episode.calls():
            reason = _why_left_out(call.transition, call.credit, patterns, alone=alone)
            reason = reasons.NO_ALTERNATIVE if across and reason == reasons.NO_REWARD else reason
            if reason is None:
                chosen.append(call)
            else:
                account = account.plus_dropped(reason, 1)
                left_out.append(Judged(call.transition, call.group_id, call.credit, left_out=reason))
    judged = any(episode.judged for episode in episodes)
    return Calls(tuple(chosen), tuple(left_out), account, seen_agents, tuple(automatic), judged)


def compared(
    calls: Calls,
    compare: Callable[..., FloatArray],
    *,
    penalties_M: FloatArray | float = 0.0,
    normalise: bool,
    eps: float,
    over_batch: bool = False,
) -> Parts:
    """Compare calls within their groups, what each source gave by itself.

    Each agent is compared with itself, over the attempts in which it spoke: what an answerer could reach depends on
    whether it was asked at all.

    Args:
        calls: of whole groups.
        compare: turns values into advantages, with the arguments of `advantages.transition_advantages`.
        penalties_M: (M,) what is taken off the values before, except those of automatic rules.
        normalise: divide by the deviation of the group.
        eps: added to that deviation.
        over_batch: whether calls of an agent that spoke in one attempt of its group alone are compared with the
            agent's calls in the whole batch; else they have an advantage of 0.

    Returns:
        By source, (M,) the weighted sum of the comparisons that the credit asks for; `FINAL` is there always.
    """
    rules = sorted({source for call in calls.compared for source in call.parts} - {FINAL})
    compare = functools.partial(compare, normalise=normalise, eps=eps)
    parts = {FINAL: _compared(calls, FINAL, compare, penalties_M, over_batch=over_batch)}
    return parts | {rule: _compared(calls, rule, compare, 0.0, over_batch=over_batch) for rule in rules}


def _compared(
    calls: Calls,
    source: str,
    compare: Callable[..., FloatArray],
    penalties_M: FloatArray | float,
    *,
    over_batch: bool,
) -> FloatArray:
    total_M = np.zeros(len(calls.compared))
    for level, values in enumerate(zip(*(call.values for call in calls.compared), strict=True)):
        given = [call.parts[source][level] if source in call.parts else 0.0 for call in calls.compared]
        given_M = np.array(given, dtype=np.float64) - penalties_M
        attempts = [t.attempt_id for t in calls.transitions]
        groups = [call.group_id for call in calls.compared]
        agents = [f"{t.agent or ''}\0{v.place}" for t, v in zip(calls.transitions, values, strict=True)]
        by_step = values[0].by_step
        advantages_M = compare(given_M, range(len(values)) if by_step else attempts, groups, agent_M=agents)
        if over_batch and not by_step:
            with_all_M = compare(given_M, attempts, [""] * len(groups), agent_M=agents)
            advantages_M = np.where(_lone(attempts, groups, agents), with_all_M, advantages_M)
        total_M += values[0].weight * advantages_M
    return total_M


def _lone(attempts: Sequence[str], groups: Sequence[str], agents: Sequence[str]) -> NDArray[np.bool_]:
    """(M,) whether the agent called in no other attempt of the group."""
    calling: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for attempt, *cell in zip(attempts, groups, agents, strict=True):
        calling[cell[0], cell[1]].add(attempt)
    return np.array([len(calling[cell]) == 1 for cell in zip(groups, agents, strict=True)], dtype=np.bool_)


def penalties_of(calls: Calls, penalty: Penalty | None) -> FloatArray:
    """(M,) the penalties of each call's tokens, added up; 0 for one that has no row, and where there is no penalty."""
    found_M = np.zeros(len(calls.compared))
    if penalty is None:
        return found_M
    # Rows whose advantages are the calls' numbers say which token belongs to which call.
    rows, _ = make_rows(calls.transitions, np.arange(1.0, len(found_M) + 1.0), calls.groups)
    for row, penalties in zip(rows, penalty(rows), strict=True):
        np.add.at(found_M, row.advantages[row.mask].astype(np.int64) - 1, penalties)
    return found_M


def weighed(parts: Parts, weights: Mapping[str, float]) -> FloatArray:
    """(M,) the parts of the advantages added up, those of automatic rules by their weights' sizes."""
    total_M = parts[FINAL]
    for rule in parts.keys() - {FINAL}:
        total_M = total_M + abs(weights[rule]) * parts[rule]
    return total_M


@dataclass(frozen=True, slots=True)
class NoContrast:
    """Groups in which nothing is learned; see `Batch`."""

    flat: frozenset[str]
    tied: frozenset[str]


def no_contrast(calls: Calls, parts: Parts) -> NoContrast:
    """Return the groups in which no call has an advantage: none at all, and none that is not of automatic rules."""
    flat = _still(calls, list(parts.values()))
    return NoContrast(flat, _still(calls, [parts[FINAL]]) if calls.judged else flat)


def _still(calls: Calls, parts: Sequence[FloatArray]) -> frozenset[str]:
    alive = {c.group_id for part_M in parts for c, advantage in zip(calls.compared, part_M, strict=True) if advantage}
    return frozenset(call.group_id for call in calls.compared) - alive


def batch_of(calls: Calls, advantages_M: FloatArray, still: NoContrast, *, merge: bool = True) -> Batch:
    """Lay calls out in rows, and draw up the account.

    Args:
        calls: of whole groups.
        advantages_M: (M,) of those that were compared.
        still: groups in which nothing is learned.
        merge: whether calls that continue an earlier one share its row.
    """
    rows, trained = make_rows(calls.transitions, advantages_M, calls.groups, merge=merge)
    judged = [
        Judged(call.transition, call.group_id, call.credit, float(advantage))
        for call, advantage in zip(calls.compared, advantages_M, strict=True)
    ]
    every, account = (*judged, *calls.left_out), calls.account + trained
    return Batch(rows, account, calls.agents, calls.automatic, every, still.flat, still.tied)


def transitions_by_attempt(
    traces: Iterable[Trace], agents: Sequence[str] | None = None
) -> dict[str, tuple[list[Transition], list[Reward]]]:
    """Adapt every trace; gives, by attempt id, its transitions and the rewards that automatic rules gave.

    Args:
        traces: of attempts.
        agents: names and globs that are selected: agents selected by their path are called by it from here on.
    """
    found: dict[str, tuple[list[Transition], list[Reward]]] = {}
    for trace in traces:
        transitions: list[Transition] = hooks.manager().hook.lightning_adapt(trace=trace) or []
        automatic = hooks.notify("lightning_rewards", trace=trace, transitions=transitions)
        for transition in transitions:
            found.setdefault(transition.attempt_id, ([], []))[0].append(labelled(transition, agents))
        for reward in (reward for answer in automatic for reward in answer):
            found.setdefault(reward.attempt_id, ([], []))[1].append(reward)
    return found


def labelled(transition: Transition, agents: Sequence[str] | None) -> Transition:
    """Call a transition's agent by its path where it is selected by that, and so told from its namesakes."""
    path = transition.path
    name = None if path is None or agents is None else label(path, agents)
    return transition if name is None or name != path else replace(transition, agent=path, agent_path=path)


@dataclass(frozen=True, slots=True)
class Episode:
    """An attempt that counts: all its transitions, and their credit.

    Attributes:
        group_id: its group.
        transitions: of every agent, selected or not.
        levels: what is compared of them: a value for each, NaN where no reward concerns the call.
        unclaimed: rewards that reach nobody, as those for agents that made no call.
        shares: the values of each level, taken apart; None where automatic rules are not compared by themselves.
        judged: whether anybody but automatic rules gave a reward.
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
    return CreditedValue(level.values[m], place, level.weight, level.by_step)


def played_of(
    outcomes: Sequence[Outcome], traces: Traces, failed: Failed, agents: Sequence[str] | None = None
) -> list[Played]:
    """Return the attempts that count as credit sees them that looks at several, forks among them.

    Args:
        outcomes: of a step.
        traces: reads the traces of attempts.
        failed: the reward of a rollout that failed by the policy's doing.
        agents: names and globs that are selected: `transitions_by_attempt`.
    """
    by_attempt = transitions_by_attempt(traces([a.attempt_id for o in outcomes for a in o.attempts]), agents)
    crashed = reward_of_failures(outcomes, failed)
    return [
        _counted(outcome, attempt, by_attempt, crashed).played
        for outcome in outcomes
        if (attempt := outcome.counts(failed)) is not None and not _ended(outcome, by_attempt)
    ]


@dataclass(frozen=True, slots=True)
class _Counted:
    """An attempt that counts: the successful one, or the policy's failure, and all it earned."""

    outcome: Outcome
    attempt_id: str
    transitions: Sequence[Transition]
    rewards: Sequence[Reward]
    automatic: Sequence[Reward]

    @property
    def played(self) -> Played:
        """Return it with one number for all rewards: what the team earned."""
        of, replay = self.outcome.rollout, self.outcome.rollout.replay
        return Played(
            attempt_id=self.attempt_id,
            transitions=self.transitions,
            earned=total(self.rewards),
            group=of.group_id,
            fork=None if replay is None else Fork(replay.attempt_id, replay.call, frozenset(replay.fresh)),
        )


def _ended(outcome: Outcome, by_attempt: Mapping[str, tuple[list[Transition], list[Reward]]]) -> bool:
    """Whether a fork was not as its record, even where its program went on in spite of it."""
    calls = [call for a in outcome.attempts for call in by_attempt.get(a.attempt_id, ([], []))[0]]
    return any(map(ended_early, outcome.attempts)) or any(ENDED in (call.error or "") for call in calls)


def _counted(
    outcome: Outcome,
    attempt: AttemptRecord,
    by_attempt: Mapping[str, tuple[list[Transition], list[Reward]]],
    crashed: float,
) -> _Counted:
    rewards = list(outcome.rewards)
    if attempt is outcome.crash:
        rollout_id = outcome.rollout.rollout_id
        rewards = [Reward(rollout_id=rollout_id, attempt_id=attempt.attempt_id, value=crashed, source="failed")]
    transitions, automatic = by_attempt.get(attempt.attempt_id, ([], []))
    known = {reward.reward_id for reward in rewards}
    rewards += [reward for reward in automatic if reward.reward_id not in known]  # kept from an earlier reading
    return _Counted(outcome, attempt.attempt_id, transitions, rewards, automatic)


def _episode(
    its: _Counted,
    credit: CreditAssigner | AcrossAttempts,
    values: Sequence[float] | None,
    *,
    weights: Mapping[str, float],
    apart: bool,
) -> Episode:
    """Share out what an attempt earned; where credit looked at all attempts, `values` is what it said of this one."""
    shares, unheard = None, tuple(unclaimed(its.transitions, its.rewards))
    if not isinstance(credit, AcrossAttempts):
        values = credit(its.transitions, its.rewards)
        shares = take_apart(credit, its.transitions, its.rewards, weights) if apart and weights else None
        unheard = (*unheard, *lost_in(values))
    judged = any(reward.source not in weights for reward in its.rewards)
    return Episode(
        its.outcome.rollout.group_id, tuple(its.transitions), levels_of(values or []), unheard, shares, judged
    )


def _why_left_out(transition: Transition, value: float, patterns: Sequence[str], *, alone: bool) -> str | None:
    """Say why a transition takes no part in the comparison of its group; None when it does.

    Nothing else is left out before advantages are made: a call without tokens is part of its group's baseline.
    """
    if not selects(patterns, transition.path):
        return reasons.NOT_SELECTED
    if REPLAYED in transition.sampling:
        return reasons.REPLAYED
    if alone:
        return reasons.GROUP_INCOMPLETE
    return reasons.NO_REWARD if math.isnan(value) else None
