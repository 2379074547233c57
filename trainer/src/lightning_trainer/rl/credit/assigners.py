"""Credit: how the rewards of an attempt are assigned to its transitions.

A credit assigner takes all transitions of one attempt, including those of agents that are not trained, and its rewards,
and returns one value for each transition. Selection comes later, so that no reward is lost with the agents left out.
The result also says how values of several attempts are compared: a plain list over all calls of an agent, a
`values.CreditedValues` by places.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightning_spans.errors import ConfigError
from lightning_spans.schema.agents import earns
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.transitions import Transition
from lightning_trainer import registry
from lightning_trainer.config.keywords import check_keywords
from lightning_trainer.rl.credit.played import AcrossAttempts
from lightning_trainer.rl.credit.values import CreditedValues, Discount, lost_in, places_of

# (transitions of one attempt, its rewards, keyword options) -> one value each; NaN if no reward concerns the call
CreditAssigner: TypeAlias = Callable[..., list[float]]


def identical(transitions: Sequence[Transition], rewards: Sequence[Reward]) -> list[float]:
    """Credit every call with the attempt's rewards, those of its agent, and its own.

    A reward that was given during the attempt counts for the calls that had ended by then. Calls are compared with
    calls that had seen as many of these.

    Args:
        transitions: all of one attempt.
        rewards: of that attempt. One that names no agent and no call in `transitions` counts for all.

    Returns:
        One value for each transition: the sum of the rewards that concern it. NaN, never 0, if there is none for the
        attempt, its agent, or any call of its agent: nothing said how good the call was.
    """
    sources = _Sources.of(transitions, rewards)
    values = [
        sum(arrival.value for arrival in sources.of_call(m)) + sum(own.values()) for m, own in enumerate(sources.own)
    ]
    return sources.credited(transitions, values)


def discounted(transitions: Sequence[Transition], rewards: Sequence[Reward], *, gamma: Discount = 0.9) -> list[float]:
    """Credit every call with the later rewards, discounted by `gamma` for each turn in between.

    The return of reinforcement learning, G_t = sum of gamma**(k - t) r_k over k >= t. The attempt's rewards come at its
    last turn, or if they were given during the attempt, at the last turn that had ended; an agent's likewise at the
    agent's turn; a call's own at the call, and they count for the earlier calls of the same agent too. With `gamma` 1
    and no rewards of single calls this equals `identical`.

    Args:
        transitions: all of one attempt.
        rewards: of that attempt, as in `identical`.
        gamma: from 0 to 1; 0 gives each reward only to the call at which it came.

    Returns:
        One value for each transition; NaN as in `identical`.

    Raises:
        ConfigError: `gamma` is out of range.
    """
    if not 0.0 <= gamma <= 1.0:
        raise ConfigError(f"gamma is {gamma}. Discounting needs a number from 0 to 1.")
    sources = _Sources.of(transitions, rewards)
    values = [
        sum(arrival.value * gamma ** (arrival.turn - transition.turn) for arrival in sources.of_call(m)) + own
        for m, (transition, own) in enumerate(
            zip(transitions, _own_to_go(transitions, sources.own, gamma), strict=True)
        )
    ]
    return sources.credited(transitions, values)


def last(transitions: Sequence[Transition], rewards: Sequence[Reward]) -> list[float]:
    """Credit every reward to one call: the attempt's to its last, an agent's to the agent's last, a call's to itself.

    Credit is conserved: the values of the calls, each call counted once however many choices it has, sum to the rewards
    that reach any call. The attempts' last calls are compared with each other, as are the last calls of agents that did
    not end the attempt, and earlier calls: a call that gets no credit learns nothing, instead of learning that it was
    worse than the end.

    Args:
        transitions: all of one attempt.
        rewards: of that attempt, as in `identical`.

    Returns:
        One value for each transition; NaN as in `identical`.
    """
    end, end_of = _last_turns(transitions)
    places = ["end" if t.turn == end else "last" if t.turn == end_of[t.agent] else "earlier" for t in transitions]
    credited = discounted(transitions, rewards, gamma=0.0)
    since = places_of(credited) or [""] * len(places)
    return CreditedValues(
        credited,
        places=[f"{place} {n}".rstrip() for place, n in zip(places, since, strict=True)],
        lost=lost_in(credited),
    )


def per_agent(transitions: Sequence[Transition], rewards: Sequence[Reward]) -> list[float]:
    """Credit every agent with its own rewards, if it has any; the attempt's reward counts for the others.

    A free rider in a successful team gets its own reward, not the team's. If rewards name all agents, the attempt's own
    reaches nobody, and the account says so. Rewards of single calls (AIR) belong to the call and do not judge the
    agent: they are added in both cases. If every reward names an agent, credit is conserved over agents: the credit of
    one call of each sums to the rewards.

    Args:
        transitions: all of one attempt.
        rewards: of that attempt, as in `identical`.

    Returns:
        One value for each transition; NaN as in `identical`.
    """
    sources = _Sources.of(transitions, rewards)
    judged = sources.judged
    values = [
        sum(a.value for a in sources.of_call(m) if a.reward.agent is not None or m not in judged) + sum(own.values())
        for m, own in enumerate(sources.own)
    ]
    all_judged = bool(transitions) and len(judged) == len(transitions)
    unheard = [a.reward for a in sources.arrivals if a.reward.agent is None and a.calls] if all_judged else ()
    return sources.credited(transitions, values, lost=unheard)


def _last_turns(transitions: Sequence[Transition]) -> tuple[int, dict[str | None, int]]:
    """Return the last turn of the attempt, and of each agent in it."""
    last_of: dict[str | None, int] = {}
    for transition in transitions:
        last_of[transition.agent] = max(transition.turn, last_of.get(transition.agent, 0))
    return max(last_of.values(), default=0), last_of


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A reward that is not for a single call, and when it came.

    Attributes:
        reward: the reward.
        calls: positions of the calls that it is for: its agent's or all, that had ended when it was given.
        turn: the last turn of these.
    """

    reward: Reward
    calls: frozenset[int]
    turn: int

    @property
    def value(self) -> float:
        return self.reward.value

    @classmethod
    def of(cls, reward: Reward, transitions: Sequence[Transition]) -> _Arrival:
        calls = [m for m, t in enumerate(transitions) if earns(reward.agent, t.path) and _had_ended(t, reward)]
        return cls(reward, frozenset(calls), max((transitions[m].turn for m in calls), default=0))


def _had_ended(transition: Transition, reward: Reward) -> bool:
    """Whether a call had ended when a reward was given. A reward for the whole attempt comes after all of them."""
    return reward.given_ns is None or transition.ended_ns is None or transition.ended_ns <= reward.given_ns


@dataclass(frozen=True, slots=True)
class _Sources:
    """The rewards of one attempt by target: all, an agent, or a single call."""

    arrivals: list[_Arrival]  # those of the attempt first, then those of agents
    own: list[dict[str, float]]  # by reward id, for each transition
    silent: frozenset[str | None]  # paths of agents that no reward concerns
    judged: frozenset[int]  # positions of the calls whose agent is named by a reward without a span

    @classmethod
    def of(cls, transitions: Sequence[Transition], rewards: Sequence[Reward]) -> _Sources:
        """Sort rewards by target. A reward that a transition already carries is not counted again."""
        calls: defaultdict[str, list[int]] = defaultdict(list)
        for m, transition in enumerate(transitions):
            calls[transition.span_id].append(m)
        carried = {reward.reward_id for transition in transitions for reward in transition.rewards}
        own = [{reward.reward_id: reward.value for reward in transition.rewards} for transition in transitions]
        heard = {transition.path for transition in transitions if transition.rewards}
        named = {reward.agent for reward in rewards if reward.span_id is None} - {None}
        judged = {m for m, t in enumerate(transitions) if any(earns(name, t.path) for name in named)}
        arrivals = []
        for reward in rewards:
            if reward.reward_id in carried:
                continue
            if reward.span_id is not None and reward.span_id in calls:
                for m in (m for m in calls[reward.span_id] if reward.choice in (None, transitions[m].choice)):
                    own[m][reward.reward_id] = reward.value
                    heard.add(transitions[m].path)
            else:
                arrivals.append(_Arrival.of(reward, transitions))
        heard |= {transitions[m].path for arrival in arrivals for m in arrival.calls}
        arrivals.sort(key=lambda arrival: arrival.reward.agent is not None)
        silent = {transition.path for transition in transitions} - heard
        return cls(arrivals, own, frozenset(silent), frozenset(judged))

    def of_call(self, m: int) -> Iterator[_Arrival]:
        """Return the rewards that are for this call among others."""
        return (arrival for arrival in self.arrivals if m in arrival.calls)

    def credited(
        self, transitions: Sequence[Transition], values: Sequence[float], *, lost: Sequence[Reward] = ()
    ) -> CreditedValues:
        """Return values with what they are compared with, and the rewards that came before any call they could be for.

        A call is compared with calls that had seen as many rewards, because the same amount is still to come for all of
        them. For calls that no reward concerns, the empty sum is replaced by NaN.
        """
        known = [
            math.nan if transition.path in self.silent else value
            for transition, value in zip(transitions, values, strict=True)
        ]
        before = [arrival.reward for arrival in self.arrivals if not arrival.calls]
        early = [reward for reward in before if any(earns(reward.agent, t.path) for t in transitions)]
        return CreditedValues(known, places=self._places(transitions), lost=[*early, *lost])

    def _places(self, transitions: Sequence[Transition]) -> list[str] | None:
        """(M,) how many rewards that could be for a call had been given before it ended."""
        timed = [arrival for arrival in self.arrivals if arrival.reward.given_ns is not None]
        before = [
            sum(earns(arrival.reward.agent, transition.path) and m not in arrival.calls for arrival in timed)
            for m, transition in enumerate(transitions)
        ]
        return [str(number) if number else "" for number in before] if any(before) else None


def _own_to_go(transitions: Sequence[Transition], own: Sequence[Mapping[str, float]], gamma: float) -> list[float]:
    """Add up, for each call, its own rewards and the discounted ones of its agent's later turns."""
    values = [sum(mine.values()) for mine in own]
    ahead: dict[str | None, tuple[int, float]] = {}  # by path: the next turn, and the reward of it and the later ones
    order = sorted(range(len(transitions)), key=lambda m: transitions[m].turn, reverse=True)
    for turn, choices in itertools.groupby(order, key=lambda m: transitions[m].turn):
        here = list(choices)
        path = transitions[here[0]].path
        next_turn, worth = ahead.get(path, (turn, 0.0))
        later = worth * gamma ** (next_turn - turn)
        # A reward of the whole call is attached to each of its choices, but was given once.
        earned = dict(item for m in here for item in own[m].items())
        for m in here:
            values[m] += later
        ahead[path] = (turn, later + sum(earned.values()))
    return values


def unclaimed_rewards(transitions: Sequence[Transition], rewards: Sequence[Reward]) -> list[Reward]:
    """Return the rewards that reach nobody: they name an agent that made no call in this attempt."""
    spans = {transition.span_id for transition in transitions}
    paths = {transition.path for transition in transitions}
    return [
        reward
        for reward in rewards
        if reward.agent is not None
        and reward.span_id not in spans
        and not any(earns(reward.agent, path) for path in paths)
    ]


def credit_by_name(name: str, **options: Any) -> CreditAssigner | AcrossAttempts:
    """Find a registered credit assigner and set its options.

    Raises:
        ConfigError: nothing has the name, or an option is unknown, missing or of a wrong type.
    """
    found = registry.by_name("credit", name)
    function = found.assign if isinstance(found, AcrossAttempts) else found
    check_keywords(f"credit {name!r}", function, options)
    assigner: Any = functools.partial(function, **options) if options else function
    return dataclasses.replace(found, assign=assigner) if isinstance(found, AcrossAttempts) else assigner
