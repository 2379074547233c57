"""Reinforcement learning over groups of rollouts: from a batch of attempts to training rows.

Read from top to bottom: every attempt becomes transitions with credit, credit becomes advantages by comparison, and
only then is anything left out. Pure functions; the training loop does the rest. What differs between algorithms stands
in `lightning_trainer.recipes`.

Axes: `_M` transitions, `_R` rows.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_spans import plugins
from lightning_spans.agents import check_spelling, selects
from lightning_spans.credit import CreditAssigner, credit_by_name, unclaimed
from lightning_spans.credit_levels import Level, levels_of, lost_in
from lightning_spans.rewards import Reward
from lightning_spans.trace import count_joins
from lightning_spans.transitions import Transition
from lightning_trainer import account as reasons
from lightning_trainer.account import Account
from lightning_trainer.advantages import FloatArray, leave_one_out, transition_advantages, uncompared, whitened
from lightning_trainer.recipes import recipe_of
from lightning_trainer.rollouts import Outcome
from lightning_trainer.rows import Row, make_rows

if TYPE_CHECKING:
    from lightning_spans.trace import Trace
    from lightning_trainer.config import TrainConfig

COMPARISONS: Final[Mapping[str, Callable[..., FloatArray]]] = {
    "group": transition_advantages,
    "leave-one-out": leave_one_out,
    "none": uncompared,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides how a batch becomes rows.

    Attributes:
        agents: names or globs of the agents to train; None: all that have a name.
        credit: shares the rewards of an attempt out over its transitions.
        normalise: divide advantages by the deviation of their group.
        eps: added to that deviation.
        failed: the reward of a rollout that never succeeded; ``exclude`` leaves it out.
        compare: turns values into advantages, with the arguments of `advantages.transition_advantages`.
        whiten: compare with the whole batch after that, every attempt counting once.
        grouped: whether a rollout that is alone in its group is left out.
        penalised: whether penalties are taken off the values before they are compared.
        merge: whether calls that continue an earlier one share its row.
    """

    agents: tuple[str, ...] | None = None
    credit: CreditAssigner
    normalise: bool = True
    eps: float = 1e-4
    failed: Literal["exclude"] | float = "exclude"
    compare: Callable[..., FloatArray] = transition_advantages
    whiten: bool = False
    grouped: bool = True
    penalised: bool = False
    merge: bool = True


@dataclass(frozen=True, slots=True)
class Episode:
    """An attempt that counts: all its transitions, and their credit.

    Attributes:
        group_id: its group.
        transitions: (M,) of every agent, selected or not.
        levels: what is compared of them: (M,) values each, NaN where no reward concerns the call.
        unclaimed: rewards that reach nobody, as those for agents that made no call.
    """

    group_id: str
    transitions: tuple[Transition, ...]
    levels: tuple[Level, ...]
    unclaimed: tuple[Reward, ...]


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
    """

    rows: list[Row]
    account: Account
    agents: Mapping[str | None, int]
    automatic: tuple[Reward, ...] = ()
    calls: tuple[Judged, ...] = ()
    flat_groups: frozenset[str] = frozenset()


Traces: TypeAlias = "Callable[[Sequence[str]], Iterable[Trace]]"  # attempt ids -> their traces, in any order
# rows -> for each of them (K,), what is taken off the reward at each of its trained tokens
Penalty: TypeAlias = "Callable[[Sequence[Row]], Sequence[NDArray[Any]]]"


class Algorithm(Protocol):
    """Turns rollouts of whole groups into rows and their account."""

    def __call__(
        self,
        outcomes: Sequence[Outcome],
        traces: Traces,
        known_agents: Iterable[str] = (),
        penalty: Penalty | None = None,
    ) -> Batch:
        """Do it; see `make_batch`."""
        ...


def from_recipe(config: TrainConfig) -> Algorithm:
    """Make the algorithm that a run's configuration names.

    Raises:
        ConfigError: no credit is registered under the name, or it does not have the option.
    """
    return functools.partial(make_batch, settings_of(config))


def settings_of(config: TrainConfig) -> Settings:
    """Say how groups become rows.

    Raises:
        ConfigError: no credit is registered under the name, or it does not have the option.
    """
    recipe = recipe_of(config.algorithm)
    discount = {} if config.gamma is None else {"gamma": config.gamma}
    return Settings(
        agents=config.agents,
        credit=credit_by_name(config.credit, **config.credit_options, **discount),
        normalise=config.normalise_std,
        eps=config.advantage_eps,
        failed=config.failed,
        compare=COMPARISONS[recipe.compare],
        whiten=recipe.whiten,
        grouped=recipe.grouped,
        # With a value head, each token has a reward of its own, so its penalty is taken off there.
        penalised=config.kl_in == "reward" and config.kl_coef > 0 and not recipe.critic,
    )


def make_batch(
    settings: Settings,
    outcomes: Sequence[Outcome],
    traces: Traces,
    known_agents: Iterable[str] = (),
    penalty: Penalty | None = None,
) -> Batch:
    """Turn rollouts into rows.

    Args:
        settings: how.
        outcomes: all rollouts of whole groups.
        traces: reads the traces of attempts.
        known_agents: names seen earlier in the run: an agent need not speak in every batch.
        penalty: gives what is taken off the rewards, where the settings ask for it: the divergence.

    Raises:
        UnknownAgentError: an agent was selected by a name that was never seen, and is nearly one that was.
    """
    read = list(traces([a.attempt_id for o in outcomes for a in o.attempts]))
    by_attempt, joins = transitions_by_attempt(read), count_joins(read)
    account = Account(told_twice=joins.joined, unjoined=joins.unjoined)
    agents = Counter(t.agent for ts, _ in by_attempt.values() for t in ts)
    patterns = ("*",) if settings.agents is None else settings.agents
    if settings.agents is not None and agents:
        check_spelling(patterns, {*known_agents, *(name for name in agents if name is not None)})

    episodes, automatic = [], []
    for outcome in outcomes:
        episode, its_automatic = _episode(outcome, by_attempt, settings)
        seen = sum(len(by_attempt[a.attempt_id][0]) for a in outcome.attempts if a.attempt_id in by_attempt)
        used = len(episode.transitions) if episode is not None else 0
        account = account.plus_dropped(reasons.ATTEMPT_FAILED, seen - used)
        if episode is not None:
            account = account.plus_unclaimed(episode.unclaimed)
            episodes.append(episode)
            automatic += its_automatic

    members = Counter(episode.group_id for episode in episodes)
    chosen, left_out = [], []
    for episode in episodes:
        alone = settings.grouped and members[episode.group_id] < 2
        for m, transition in enumerate(episode.transitions):
            call = _Call(transition, episode.group_id, tuple(_at(level, m) for level in episode.levels))
            reason = _why_left_out(transition, call.credit, patterns, alone=alone)
            if reason is None:
                chosen.append(call)
            else:
                account = account.plus_dropped(reason, 1)
                left_out.append(Judged(transition, episode.group_id, call.credit, left_out=reason))

    advantages_M, rows, trained, flat = _rows(chosen, settings, penalty)
    judged = [
        Judged(call.transition, call.group_id, call.credit, float(advantage))
        for call, advantage in zip(chosen, advantages_M, strict=True)
    ]
    return Batch(rows, account + trained, agents, tuple(automatic), (*judged, *left_out), flat)


def transitions_by_attempt(traces: Iterable[Trace]) -> dict[str, tuple[list[Transition], list[Reward]]]:
    """Adapt every trace; gives, by attempt id, its transitions and the rewards that automatic rules gave."""
    found: dict[str, tuple[list[Transition], list[Reward]]] = {}
    for trace in traces:
        transitions: list[Transition] = plugins.manager().hook.lightning_adapt(trace=trace) or []
        automatic = plugins.notify("lightning_rewards", trace=trace, transitions=transitions)
        for transition in transitions:
            found.setdefault(transition.attempt_id, ([], []))[0].append(transition)
        for reward in (reward for answer in automatic for reward in answer):
            found.setdefault(reward.attempt_id, ([], []))[1].append(reward)
    return found


@dataclass(frozen=True, slots=True)
class _Value:
    """What one comparison looks at of a call."""

    value: float
    place: str
    weight: float
    by_step: bool


@dataclass(frozen=True, slots=True)
class _Call:
    """A call, with one value for each comparison."""

    transition: Transition
    group_id: str
    values: tuple[_Value, ...]

    @property
    def credit(self) -> float:
        return self.values[0].value


def _at(level: Level, m: int) -> _Value:
    return _Value(level.values[m], "" if level.places is None else level.places[m], level.weight, level.by_step)


def _episode(
    outcome: Outcome, by_attempt: Mapping[str, tuple[list[Transition], list[Reward]]], settings: Settings
) -> tuple[Episode | None, list[Reward]]:
    """Take the attempt that counts: the last successful one, or, where failures are scored, the last one."""
    attempt, rewards = outcome.attempt, list(outcome.rewards)
    if attempt is None:
        if settings.failed == "exclude" or not outcome.attempts:
            return None, []
        attempt = outcome.attempts[-1]
        ids = {"rollout_id": outcome.rollout.rollout_id, "attempt_id": attempt.attempt_id}
        rewards = [Reward(value=settings.failed, source="failed", **ids)]
    transitions, automatic = by_attempt.get(attempt.attempt_id, ([], []))
    known = {reward.reward_id for reward in rewards}
    rewards += [reward for reward in automatic if reward.reward_id not in known]  # kept from an earlier reading
    values = settings.credit(transitions, rewards)
    lost = (*unclaimed(transitions, rewards), *lost_in(values))
    return Episode(outcome.rollout.group_id, tuple(transitions), levels_of(values), lost), automatic


def _why_left_out(transition: Transition, value: float, patterns: Sequence[str], *, alone: bool) -> str | None:
    """Say why a transition takes no part in the comparison of its group; None when it does.

    Nothing else is left out before advantages are made: a call without tokens is part of its group's baseline.
    """
    if not selects(patterns, transition.agent):
        return reasons.NOT_SELECTED
    if alone:
        return reasons.GROUP_INCOMPLETE
    return reasons.NO_REWARD if math.isnan(value) else None


def _rows(
    chosen: Sequence[_Call], settings: Settings, penalty: Penalty | None
) -> tuple[FloatArray, list[Row], Account, frozenset[str]]:
    transitions = [call.transition for call in chosen]
    groups = {call.transition.rollout_id: call.group_id for call in chosen}
    penalties_M = np.zeros(len(chosen))
    if settings.penalised and penalty is not None:
        penalties_M = _by_call(transitions, groups, penalty)
    advantages_M = _compared(chosen, settings, penalties_M)
    alive = {call.group_id for call, advantage in zip(chosen, advantages_M, strict=True) if advantage}
    flat = frozenset(call.group_id for call in chosen) - alive
    if settings.whiten:
        calls = Counter((call.transition.attempt_id, call.transition.agent) for call in chosen)
        weights_M = [1.0 / calls[call.transition.attempt_id, call.transition.agent] for call in chosen]
        advantages_M = whitened(advantages_M, weights_M, agent_M=[t.agent or "" for t in transitions])
    rows, account = make_rows(transitions, advantages_M, groups, merge=settings.merge)
    return advantages_M, rows, account, flat


def _compared(chosen: Sequence[_Call], settings: Settings, penalties_M: FloatArray) -> FloatArray:
    """(M,) the weighted sum of the comparisons that the credit asks for."""
    total_M = np.zeros(len(chosen))
    for values in zip(*(call.values for call in chosen), strict=True):
        total_M += values[0].weight * settings.compare(
            np.array([value.value for value in values], dtype=np.float64) - penalties_M,
            range(len(chosen)) if values[0].by_step else [call.transition.attempt_id for call in chosen],
            [call.group_id for call in chosen],
            # Each agent is compared with itself, over the attempts in which it spoke: what an answerer could reach
            # depends on whether it was asked at all.
            agent_M=[f"{c.transition.agent or ''}\0{v.place}" for c, v in zip(chosen, values, strict=True)],
            normalise=settings.normalise,
            eps=settings.eps,
        )
    return total_M


def _by_call(transitions: Sequence[Transition], groups: Mapping[str, str], penalty: Penalty) -> FloatArray:
    """(M,) the penalties of each call's tokens, added up; 0 for one that has no row."""
    # Rows whose advantages are the calls' numbers say which token belongs to which call.
    rows, _ = make_rows(transitions, np.arange(1.0, len(transitions) + 1.0), groups)
    found_M = np.zeros(len(transitions))
    for row, penalties in zip(rows, penalty(rows), strict=True):
        np.add.at(found_M, row.advantages[row.mask].astype(np.int64) - 1, penalties)
    return found_M
