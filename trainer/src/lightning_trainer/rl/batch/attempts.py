"""Attempts that count: read from their traces, with their transitions and rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from lightning_spans import hooks
from lightning_spans.schema.agents import label
from lightning_spans.schema.attempts import AttemptRecord
from lightning_spans.schema.replays import ENDED
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.transitions import Transition
from lightning_trainer.rl.credit.played import Fork, PlayedAttempt
from lightning_trainer.rl.endings import ended_early
from lightning_trainer.rl.rollouts import Failed, Outcome
from lightning_trainer.rl.scores import reward_of_failures, total

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace

Traces: TypeAlias = "Callable[[Sequence[str]], Iterable[Trace]]"  # attempt ids -> their traces, in any order


def transitions_by_attempt(
    traces: Iterable[Trace], agents: Sequence[str] | None = None
) -> dict[str, tuple[list[Transition], list[Reward]]]:
    """Adapt every trace; return, by attempt id, its transitions and the rewards of automatic rules.

    Args:
        traces: of attempts.
        agents: selected names and globs: agents selected by their path are named by it from here on.
    """
    found: dict[str, tuple[list[Transition], list[Reward]]] = {}
    for trace in traces:
        transitions: list[Transition] = hooks.manager().hook.lightning_adapt(trace=trace) or []
        automatic = hooks.notify("lightning_rewards", trace=trace, transitions=transitions)
        for transition in transitions:
            found.setdefault(transition.attempt_id, ([], []))[0].append(label_transition(transition, agents))
        for reward in (reward for answer in automatic for reward in answer):
            found.setdefault(reward.attempt_id, ([], []))[1].append(reward)
    return found


def label_transition(transition: Transition, agents: Sequence[str] | None) -> Transition:
    """Name a transition's agent by its path if it is selected by path, which distinguishes agents of one name."""
    path = transition.path
    name = None if path is None or agents is None else label(path, agents)
    return transition if name is None or name != path else replace(transition, agent=path, agent_path=path)


@dataclass(frozen=True, slots=True)
class CountedAttempt:
    """An attempt that counts, successful or failed because of the policy, with all its rewards."""

    outcome: Outcome
    attempt_id: str
    transitions: Sequence[Transition]
    rewards: Sequence[Reward]
    automatic: Sequence[Reward]
    team: frozenset[str] = frozenset()  # of a fork: see `Fork`

    @property
    def played(self) -> PlayedAttempt:
        """Return it with one number for all rewards, the team's."""
        of, replay = self.outcome.rollout, self.outcome.rollout.replay
        return PlayedAttempt(
            attempt_id=self.attempt_id,
            transitions=self.transitions,
            earned=total(self.rewards),
            group=of.group_id,
            fork=None
            if replay is None
            else Fork(replay.attempt_id, replay.call, frozenset(replay.fresh), self.team, replay.weight),
        )


def counted_attempt(
    outcome: Outcome,
    attempt: AttemptRecord,
    by_attempt: Mapping[str, tuple[list[Transition], list[Reward]]],
    crashed: float,
    teams: Mapping[str, frozenset[str]],
) -> CountedAttempt:
    """Collect what an attempt that counts did and earned.

    Args:
        outcome: of its rollout.
        attempt: the attempt.
        by_attempt: see `transitions_by_attempt`.
        crashed: the reward of a failure caused by the policy.
        teams: see `teams_of`.
    """
    rewards = list(outcome.rewards)
    if attempt is outcome.crash:
        rollout_id = outcome.rollout.rollout_id
        rewards = [Reward(rollout_id=rollout_id, attempt_id=attempt.attempt_id, value=crashed, source="failed")]
    transitions, automatic = by_attempt.get(attempt.attempt_id, ([], []))
    known = {reward.reward_id for reward in rewards}
    rewards += [reward for reward in automatic if reward.reward_id not in known]  # kept from an earlier reading
    replay = outcome.rollout.replay
    team = frozenset() if replay is None else teams.get(replay.attempt_id, frozenset())
    return CountedAttempt(outcome, attempt.attempt_id, transitions, rewards, automatic, team)


def teams_of(outcomes: Sequence[Outcome]) -> dict[str, frozenset[str]]:
    """Return, by record, the agents for which another model was meant to answer in any of its forks."""
    teams: dict[str, frozenset[str]] = {}
    for replay in (outcome.rollout.replay for outcome in outcomes):
        if replay is not None:
            teams[replay.attempt_id] = teams.get(replay.attempt_id, frozenset()) | {*replay.fresh}
    return teams


def has_fork_ended(outcome: Outcome, by_attempt: Mapping[str, tuple[list[Transition], list[Reward]]]) -> bool:
    """Whether a fork differed from its record, even if its program continued in spite of it."""
    calls = [call for a in outcome.attempts for call in by_attempt.get(a.attempt_id, ([], []))[0]]
    return any(map(ended_early, outcome.attempts)) or any(ENDED in (call.error or "") for call in calls)


def played_of(
    outcomes: Sequence[Outcome], traces: Traces, failed: Failed, agents: Sequence[str] | None = None
) -> list[PlayedAttempt]:
    """Return the attempts that count, including forks, for credit assigners that compare several.

    Args:
        outcomes: of a step.
        traces: reads the traces of attempts.
        failed: the reward of a rollout that failed because of the policy.
        agents: selected names and globs: `transitions_by_attempt`.
    """
    by_attempt = transitions_by_attempt(traces([a.attempt_id for o in outcomes for a in o.attempts]), agents)
    crashed, teams = reward_of_failures(outcomes, failed), teams_of(outcomes)
    return [
        counted_attempt(outcome, attempt, by_attempt, crashed, teams).played
        for outcome in outcomes
        if (attempt := outcome.counts(failed)) is not None and not has_fork_ended(outcome, by_attempt)
    ]
