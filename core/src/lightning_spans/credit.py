"""Credit: how the rewards of an attempt are shared out over its transitions.

A credit assigner takes all transitions of one attempt, those of agents that are not trained among them, and its
rewards, and gives one value for each transition. Selection comes after, so that no reward is lost with the agents left
out. How the values of several attempts are compared is said by the answer itself: a plain list is compared over all
calls of an agent, a `credit_levels.Credited` by places.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightning_spans.errors import ConfigError
from lightning_spans.hookspecs import hookimpl
from lightning_spans.rewards import Reward
from lightning_spans.transitions import Transition

# (transitions of one attempt, its rewards, keyword options) -> one value each; NaN where no reward concerns the call
CreditAssigner: TypeAlias = Callable[..., list[float]]


def identical(transitions: Sequence[Transition], rewards: Sequence[Reward]) -> list[float]:
    """Give every call the attempt's rewards, those of its agent, and its own.

    Args:
        transitions: all of one attempt.
        rewards: of that attempt. One that names no agent and no call in `transitions` is everybody's.

    Returns:
        One value for each transition: the sum of the rewards that concern it. NaN, never 0, where there is none for
        the attempt, its agent, or any call of its agent: nobody said how good the call was.
    """
    sources = _Sources.of(transitions, rewards)
    values = [
        sum(sources.shared) + sum(sources.by_agent[transition.agent]) + sum(own.values())
        for transition, own in zip(transitions, sources.own, strict=True)
    ]
    return sources.nan_where_silent(transitions, values)


def discounted(transitions: Sequence[Transition], rewards: Sequence[Reward], *, gamma: float = 0.9) -> list[float]:
    """Give every call what came after it, worth `gamma` times less for each turn in between.

    The return of reinforcement learning, G_t = sum of gamma**(k - t) r_k over k >= t. The attempt's rewards come at its
    last turn, an agent's at the agent's last turn, a call's own at the call; the latter count for the earlier calls of
    the same agent too. With `gamma` 1 and no rewards of single calls this is `identical`.

    Args:
        transitions: all of one attempt.
        rewards: of that attempt, as in `identical`.
        gamma: from 0 to 1; 0 gives each reward to the call at which it came alone.

    Returns:
        One value for each transition; NaN as in `identical`.

    Raises:
        ConfigError: `gamma` is out of range.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"gamma is {gamma}. Discounting needs a number from 0 to 1.")
    sources = _Sources.of(transitions, rewards)
    end, last_of = _last_turns(transitions)
    values = [
        sum(sources.shared) * gamma ** (end - transition.turn)
        + sum(sources.by_agent[transition.agent]) * gamma ** (last_of[transition.agent] - transition.turn)
        + own
        for transition, own in zip(transitions, _own_to_go(transitions, sources.own, gamma), strict=True)
    ]
    return sources.nan_where_silent(transitions, values)


def last(transitions: Sequence[Transition], rewards: Sequence[Reward]) -> list[float]:
    """Give every reward to one call: the attempt's to its last one, an agent's to the agent's last, a call's own to it.

    Credit is conserved: the values of the calls, each call counted once however many choices it has, sum to the rewards
    that reach anybody. Last calls are compared with last calls, earlier ones with each other: a call that gets nothing
    learns nothing, rather than that it was worse than the end.

    Args:
        transitions: all of one attempt.
        rewards: of that attempt, as in `identical`.

    Returns:
        One value for each transition; NaN as in `identical`.
    """
    from lightning_spans.credit_levels import Credited

    end, end_of = _last_turns(transitions)
    final = [transition.turn in (end, end_of[transition.agent]) for transition in transitions]
    return Credited(discounted(transitions, rewards, gamma=0.0), places=["last" if f else "earlier" for f in final])


def per_agent(transitions: Sequence[Transition], rewards: Sequence[Reward]) -> list[float]:
    """Judge every agent by its own rewards, where it has any: the attempt's reward is for those that none names.

    A free rider in a team that did well gets what it was given, not what the team was. Where rewards name all agents,
    one of the attempt reaches nobody, and the account says so. Rewards of single calls (AIR) are the caller's own, and
    no verdict on the agent: they are added to either. Where every reward names an agent, credit is conserved over
    agents: what one call of each got sums to the rewards.

    Args:
        transitions: all of one attempt.
        rewards: of that attempt, as in `identical`.

    Returns:
        One value for each transition; NaN as in `identical`.
    """
    from lightning_spans.credit_levels import Credited

    sources = _Sources.of(transitions, rewards)
    judged = sources.judged
    values = [
        sum(sources.by_agent[t.agent]) + (0.0 if t.agent in judged else sum(sources.shared)) + sum(own.values())
        for t, own in zip(transitions, sources.own, strict=True)
    ]
    spans = {t.span_id for t in transitions}
    shared = [reward for reward in rewards if reward.agent is None and reward.span_id not in spans]
    all_judged = bool(transitions) and not {t.agent for t in transitions} - judged
    return Credited(sources.nan_where_silent(transitions, values), lost=shared if all_judged else ())


def _last_turns(transitions: Sequence[Transition]) -> tuple[int, dict[str | None, int]]:
    """Give the last turn of the attempt, and of each agent in it."""
    last_of: dict[str | None, int] = {}
    for transition in transitions:
        last_of[transition.agent] = max(transition.turn, last_of.get(transition.agent, 0))
    return max(last_of.values(), default=0), last_of


@dataclass(frozen=True, slots=True)
class _Sources:
    """The rewards of one attempt by whom they concern: all, an agent, or a single call."""

    shared: list[float]
    by_agent: defaultdict[str | None, list[float]]
    own: list[dict[str, float]]  # by reward id, for each transition
    silent: frozenset[str | None]  # agents that no reward concerns
    judged: frozenset[str | None]  # agents that a reward of no single span names

    @classmethod
    def of(cls, transitions: Sequence[Transition], rewards: Sequence[Reward]) -> _Sources:
        """Sort rewards out. A reward that a transition already carries is not counted again."""
        calls: defaultdict[str, list[int]] = defaultdict(list)
        for m, transition in enumerate(transitions):
            calls[transition.span_id].append(m)
        carried = {reward.reward_id for transition in transitions for reward in transition.rewards}
        own = [{reward.reward_id: reward.value for reward in transition.rewards} for transition in transitions]
        heard = {transition.agent for transition in transitions if transition.rewards}
        judged = {reward.agent for reward in rewards if reward.span_id is None} - {None}
        shared: list[float] = []
        by_agent: defaultdict[str | None, list[float]] = defaultdict(list)
        for reward in rewards:
            if reward.reward_id in carried:
                continue
            if reward.span_id is not None and reward.span_id in calls:
                for m in calls[reward.span_id]:  # all choices of the call
                    own[m][reward.reward_id] = reward.value
                    heard.add(transitions[m].agent)
            elif reward.agent is None:
                shared.append(reward.value)
            else:
                by_agent[reward.agent].append(reward.value)
                heard.add(reward.agent)
        silent = set() if shared else {transition.agent for transition in transitions} - heard
        return cls(shared, by_agent, own, frozenset(silent), frozenset(judged))

    def nan_where_silent(self, transitions: Sequence[Transition], values: list[float]) -> list[float]:
        """Replace the empty sum of calls that no reward concerns."""
        return [
            math.nan if transition.agent in self.silent else value
            for transition, value in zip(transitions, values, strict=True)
        ]


def _own_to_go(transitions: Sequence[Transition], own: Sequence[Mapping[str, float]], gamma: float) -> list[float]:
    """Add up, for each call, its own rewards and the discounted ones of its agent's later turns."""
    values = [sum(mine.values()) for mine in own]
    ahead: dict[str | None, tuple[int, float]] = {}  # by agent: the next turn, and what it and the later ones earned
    order = sorted(range(len(transitions)), key=lambda m: transitions[m].turn, reverse=True)
    for turn, choices in itertools.groupby(order, key=lambda m: transitions[m].turn):
        here = list(choices)
        agent = transitions[here[0]].agent
        next_turn, worth = ahead.get(agent, (turn, 0.0))
        later = worth * gamma ** (next_turn - turn)
        # A reward of the whole call lies with each of its choices, but came once.
        earned = dict(item for m in here for item in own[m].items())
        for m in here:
            values[m] += later
        ahead[agent] = (turn, later + sum(earned.values()))
    return values


def unclaimed(transitions: Sequence[Transition], rewards: Sequence[Reward]) -> list[Reward]:
    """Give the rewards that reach nobody: they name an agent that made no call in this attempt."""
    agents = {transition.agent for transition in transitions} | {None}
    spans = {transition.span_id for transition in transitions}
    return [reward for reward in rewards if reward.agent not in agents and reward.span_id not in spans]


def credit_by_name(name: str, **options: Any) -> CreditAssigner:
    """Find a registered credit assigner and set its options.

    Raises:
        ConfigError: nothing has the name, or the assigner does not have the option; the message lists what there is.
    """
    from lightning_spans.plugins import registry

    known = registry("lightning_register_credit")
    if name not in known:
        raise ConfigError(f"unknown credit {name!r}. Use one of: {', '.join(sorted(known))}.")
    parameters = inspect.signature(known[name]).parameters.values()
    allowed = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for option in options:
        if option not in allowed:
            raise ConfigError(f"credit {name!r} has no option {option!r}. It has: {', '.join(allowed) or 'none'}.")
    assigner: CreditAssigner = functools.partial(known[name], **options) if options else known[name]
    return assigner


@hookimpl
def lightning_register_credit(register: Callable[[str, Any], None]) -> None:
    """Register the core's own."""
    from lightning_spans.credit_levels import gigpo, turn

    register("identical", identical)
    register("discounted", discounted)
    register("last", last)
    register("per-agent", per_agent)
    register("turn", turn)
    register("gigpo", gigpo)
