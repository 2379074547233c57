"""Reinforcement learning over groups of rollouts (GRPO): from a batch of attempts to training rows.

Read from top to bottom: every attempt becomes transitions with a value each, values become advantages within their
group, and only then is anything left out. Pure functions; the training loop does the rest.

Axes: `_M` transitions.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from lightning_spans import plugins
from lightning_spans.agents import check_known, selects
from lightning_spans.credit import CreditAssigner, credit_by_name, unclaimed
from lightning_spans.rewards import Reward
from lightning_spans.transitions import Transition
from lightning_trainer import account as reasons
from lightning_trainer.account import Account
from lightning_trainer.advantages import FloatArray, transition_advantages
from lightning_trainer.rollouts import Outcome
from lightning_trainer.rows import Row, make_rows

if TYPE_CHECKING:
    from lightning_spans.trace import Trace
    from lightning_trainer.config import TrainConfig


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
    """

    agents: tuple[str, ...] | None = None
    credit: CreditAssigner
    normalise: bool = True
    eps: float = 1e-4
    failed: Literal["exclude"] | float = "exclude"
    compare: Callable[..., FloatArray] = transition_advantages


@dataclass(frozen=True, slots=True)
class Episode:
    """An attempt that counts: all its transitions, and their values.

    Attributes:
        group_id: its group.
        transitions: (M,) of every agent, selected or not.
        values: (M,) credit; NaN where no reward concerns the call.
        unclaimed: rewards for agents that made no call.
    """

    group_id: str
    transitions: tuple[Transition, ...]
    values: tuple[float, ...]
    unclaimed: tuple[Reward, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a batch of rollouts comes to.

    Attributes:
        rows: training rows, those without gradient among them.
        account: what became of every model call.
        agents: number of calls by agent; None stands for calls that nothing names.
    """

    rows: list[Row]
    account: Account
    agents: Mapping[str | None, int]


Traces: TypeAlias = "Callable[[Sequence[str]], Iterable[Trace]]"  # attempt ids -> their traces, in any order
# (rollouts of whole groups, how to read traces, names of agents seen earlier in the run) -> rows and their account
Algorithm: TypeAlias = Callable[[Sequence[Outcome], Traces, Iterable[str]], Batch]


def grpo(config: TrainConfig) -> Algorithm:
    """Make the algorithm from a run's configuration.

    Raises:
        ConfigError: no credit is registered under the name, or it does not have the option.
    """
    options = {} if config.gamma is None else {"gamma": config.gamma}
    settings = Settings(
        agents=config.agents,
        credit=credit_by_name(config.credit, **options),
        normalise=config.normalise_std,
        eps=config.advantage_eps,
        failed=config.failed,
    )
    return functools.partial(make_batch, settings)


def make_batch(
    settings: Settings, outcomes: Sequence[Outcome], traces: Traces, known_agents: Iterable[str] = ()
) -> Batch:
    """Turn rollouts into rows.

    Args:
        settings: how.
        outcomes: all rollouts of whole groups.
        traces: reads the traces of attempts.
        known_agents: names seen earlier in the run: an agent need not speak in every batch.

    Raises:
        UnknownAgentError: an agent was selected by a name that was never seen.
    """
    by_attempt = transitions_by_attempt(traces([a.attempt_id for o in outcomes for a in o.attempts]))
    account, agents = Account(), Counter(t.agent for ts, _ in by_attempt.values() for t in ts)
    patterns = ("*",) if settings.agents is None else settings.agents
    if settings.agents is not None and agents:
        check_known(patterns, {*known_agents, *(name for name in agents if name is not None)})

    episodes = []
    for outcome in outcomes:
        episode = _episode(outcome, by_attempt, settings)
        seen = sum(len(by_attempt[a.attempt_id][0]) for a in outcome.attempts if a.attempt_id in by_attempt)
        used = len(episode.transitions) if episode is not None else 0
        account = account.plus_dropped(reasons.ATTEMPT_FAILED, seen - used)
        if episode is not None:
            account = account.plus_unclaimed(episode.unclaimed)
            episodes.append(episode)

    chosen: list[tuple[Transition, str, float]] = []
    members = Counter(episode.group_id for episode in episodes)
    for episode in episodes:
        for transition, value in zip(episode.transitions, episode.values, strict=True):
            reason = _why_left_out(transition, value, patterns, members[episode.group_id])
            if reason is None:
                chosen.append((transition, episode.group_id, value))
            else:
                account = account.plus_dropped(reason, 1)

    rows, trained = _rows(chosen, settings)
    return Batch(rows, account + trained, agents)


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


def _episode(
    outcome: Outcome, by_attempt: Mapping[str, tuple[list[Transition], list[Reward]]], settings: Settings
) -> Episode | None:
    """Take the attempt that counts: the last successful one, or, where failures are scored, the last one."""
    attempt, rewards = outcome.attempt, list(outcome.rewards)
    if attempt is None:
        if settings.failed == "exclude" or not outcome.attempts:
            return None
        attempt = outcome.attempts[-1]
        ids = {"rollout_id": outcome.rollout.rollout_id, "attempt_id": attempt.attempt_id}
        rewards = [Reward(value=settings.failed, source="failed", **ids)]
    transitions, automatic = by_attempt.get(attempt.attempt_id, ([], []))
    rewards += automatic
    values = settings.credit(transitions, rewards)
    lost = unclaimed(transitions, rewards)
    return Episode(outcome.rollout.group_id, tuple(transitions), tuple(values), tuple(lost))


def _why_left_out(transition: Transition, value: float, patterns: Sequence[str], members: int) -> str | None:
    """Say why a transition takes no part in the comparison of its group; None when it does.

    Nothing else is left out before advantages are made: a call without tokens is part of its group's baseline.
    """
    if not selects(patterns, transition.agent):
        return reasons.NOT_SELECTED
    if members < 2:
        return reasons.GROUP_INCOMPLETE
    return reasons.NO_REWARD if math.isnan(value) else None


def _rows(chosen: Sequence[tuple[Transition, str, float]], settings: Settings) -> tuple[list[Row], Account]:
    transitions = [transition for transition, _, _ in chosen]
    groups = {transition.rollout_id: group_id for transition, group_id, _ in chosen}
    advantages_M = settings.compare(
        np.array([value for _, _, value in chosen], dtype=np.float64),
        [transition.attempt_id for transition in transitions],
        [group_id for _, group_id, _ in chosen],
        # Each agent is compared with itself, over the attempts in which it spoke: what an answerer could reach depends
        # on whether it was asked at all.
        agent_M=[transition.agent or "" for transition in transitions],
        normalise=settings.normalise,
        eps=settings.eps,
    )
    return make_rows(transitions, advantages_M, groups)
