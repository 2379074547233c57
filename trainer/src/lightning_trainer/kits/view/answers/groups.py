"""Groups of rollouts: of a step, side by side, and of one task at several times."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_trainer.kits.view.answers.rollouts import Event, RewardRow


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRow:
    """A rollout in its group.

    Attributes:
        rollout_id: its id.
        attempt_id: the attempt that counts, otherwise its last; None before one began.
        status: ``succeeded``, ``crashed`` (caused by the policy), ``failed``, ``running``, ``queued``, ``cancelled``.
        attempts: number of attempts.
        reward: the reward that it counts with; None if it does not count.
        by_agent: rewards of agents, if given by agent.
        lowest: the lowest reward of any agent; without rewards by agent, `reward`.
        error: the end of the error, if there was one.
        kind: the error's type in one word.
        seconds: duration of its attempt; None while it runs.
    """

    rollout_id: str
    attempt_id: str | None
    status: str
    attempts: int
    reward: float | None
    by_agent: dict[str, float]
    lowest: float | None
    error: str | None
    kind: str | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """A group: rollouts of one task. Their rewards are compared.

    Attributes:
        group_id: its id.
        task: the task, shortened.
        mean: mean of the rewards that count; None without one.
        deviation: their standard deviation.
        signal: whether two rollouts that count differ in the reward of any trained agent.
        rollouts: in the order of their ids.
    """

    group_id: str
    task: str
    mean: float | None
    deviation: float | None
    signal: bool
    rollouts: list[RolloutRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPage:
    """Some groups of a step; `next` is where the next page starts, None at the end."""

    mode: str
    step: int
    groups: list[GroupRow]
    total: int
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Counts of a rollout's trace, equal to the numbers of lines of `lightning-rl traces --json`."""

    rollout_id: str
    attempt_id: str
    spans: int
    calls: int
    tools: dict[str, int]
    tool_errors: int
    call_errors: int
    agents: dict[str, int]
    prompt_tokens: int
    response_tokens: int
    found: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A rollout next to the others of its group, with the mean advantage of each agent's calls."""

    row: RolloutRow
    rewards: list[RewardRow]
    advantages: dict[str, float]
    events: list[Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPage:
    """Some members of a group side by side; all of them share the first `alike` calls."""

    group_id: str
    mode: str
    step: int | None
    task: str
    alike: int
    mean: float | None
    deviation: float | None
    members: list[Member]
    total: int
    next: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedGroup:
    """A task at one time: `name` is that of the batch, `mean` is over the successful rollouts with a reward."""

    group_id: str
    mode: str
    step: int
    name: str
    rollouts: int
    mean: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedTask:
    """A task and its groups, the oldest first."""

    task: str
    groups: list[TriedGroup]


@dataclass(frozen=True, slots=True, kw_only=True)
class TriesPage:
    """Tasks that were run at several times. `commands` run the requested one again, with tuned and base model."""

    tasks: list[TriedTask]
    total: int
    next: int | None
    commands: list[str]
