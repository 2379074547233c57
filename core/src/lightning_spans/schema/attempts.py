"""Rollouts and their attempts: what was requested, each try, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from lightning_spans.schema.agents import selects
from lightning_spans.schema.json import dumps, to_json
from lightning_spans.schema.replays import Replay
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import TRAINING, Json

RolloutStatus: TypeAlias = Literal["queued", "running", "succeeded", "failed", "cancelled"]
# ``released``: given back, without a fault; ``disturbed``: its process ended while other attempts ran in it too.
AttemptStatus: TypeAlias = Literal[
    "running", "succeeded", "failed", "timeout", "lost", "cancelled", "released", "disturbed"
]
FAILED: Final[tuple[AttemptStatus, ...]] = ("failed", "timeout")  # the policy's answer may have caused it
UNCOUNTED: Final[tuple[AttemptStatus, ...]] = ("released", "disturbed")
"""Ends that are no fault of the agent's: they use up none of the rollout's tries."""
UNCOUNTED_MOST: Final = 20  # of a rollout; further ones count, so that nothing is tried for ever


@dataclass(frozen=True, slots=True)
class Attempt:
    """What an agent's process knows about its attempt.

    Attributes:
        rollout_id: the rollout that it tries.
        attempt_id: this try.
        endpoint: base URL of the training side, without ``/v1``; None if there is none.
        key: the attempt's own key, which can only sample and send spans.
        agents: names or globs of the agents whose calls go to the gateway; empty: none are rerouted.
        model: the model name of rerouted calls.
        prompts: replacement system prompts by agent, as ``before`` and ``after``; see `record.prompts`.
        replay: the earlier attempt whose answers it gets; None: it is not a replay.
    """

    rollout_id: str
    attempt_id: str
    endpoint: str | None = None
    key: str | None = None
    agents: tuple[str, ...] = ()
    model: str = "policy"
    prompts: Mapping[str, Json] = field(default_factory=dict, hash=False)
    replay: Replay | None = None

    def reroutes(self, agent: str | None) -> bool:
        """Whether a call of the agent with this path goes to the gateway. A call of an unknown agent never does."""
        return self.endpoint is not None and selects(self.agents, agent)

    def environment(self) -> dict[str, str]:
        """Return the environment variables from which `from_environment` restores this attempt."""
        values = {
            "LIGHTNING_ROLLOUT_ID": self.rollout_id,
            "LIGHTNING_ATTEMPT_ID": self.attempt_id,
            "LIGHTNING_ENDPOINT": self.endpoint or "",
            "LIGHTNING_KEY": self.key or "",
            "LIGHTNING_AGENTS": ",".join(name.replace("%", "%25").replace(",", "%2C") for name in self.agents),
            "LIGHTNING_MODEL": self.model,
            "LIGHTNING_PROMPTS": dumps(self.prompts).decode() if self.prompts else "",
            "LIGHTNING_REPLAY": dumps(to_json(self.replay)).decode() if self.replay else "",
        }
        return {name: value for name, value in values.items() if value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One execution of the agent on a task, as requested.

    Attributes:
        rollout_id: its id.
        group_id: the group whose returns are compared: rollouts of one task in one step.
        task: the row of the user's data.
        mode: ``train`` or ``val``.
        origin: its purpose: ``training``, ``live``, or a label of the user's own; its attempts have it too.
        max_attempts: tries before the rollout counts as failed.
        timeout_s: time limit of one attempt in seconds; None: none.
        status: its current status.
        replay: the earlier attempt whose answers its attempts get; None: it is not a replay.
    """

    rollout_id: str
    group_id: str
    task: Mapping[str, Json]
    mode: str = "train"
    origin: str = TRAINING
    max_attempts: int = 2
    timeout_s: float | None = 300.0
    status: RolloutStatus = "queued"
    replay: Replay | None = None

    def problem(self) -> str | None:
        """Return why no attempt at it could ever run or end; None if nothing is wrong."""
        if not self.rollout_id:
            return "its rollout_id is empty. Give it one."
        if self.max_attempts < 1:
            return f"max_attempts is {self.max_attempts}. Allow at least 1."
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            return f"timeout_s is {self.timeout_s}. Give seconds above 0, or None for no limit."
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """One try at a rollout, as the store keeps it.

    Attributes:
        attempt_id: its id.
        rollout: the rollout, with its task.
        number: 1 for the first try.
        fence: the fencing number; a result with an older one is rejected.
        worker: the worker that claimed it.
        status: its current status.
        lease_until_ns: when the lease ends unless renewed, in nanoseconds by the store's own clock. That clock starts
            at Unix time, counts only while the store is used, and is never set: compare it only within one store.
        started_ns: Unix time in nanoseconds.
        ended_ns: Unix time in nanoseconds; None while it runs.
        error: why it failed; None otherwise.
        context: what the agent's process gets, including its key; created by the server that a runner claims from.
        disturbed: earlier attempts of the rollout that ended ``disturbed``: this rollout may be what ends processes, so
            it runs alone in one. Set by `claim`, 0 elsewhere.
        failures: earlier attempts of the rollout that ended ``failed`` or ``timeout``: their samples may be the cause,
            so it samples anew. Set by `claim`, 0 elsewhere.
    """

    attempt_id: str
    rollout: Rollout
    number: int
    fence: int
    worker: str
    status: AttemptStatus = "running"
    lease_until_ns: int = 0
    started_ns: int = 0
    ended_ns: int | None = None
    error: str | None = None
    context: Attempt | None = None
    disturbed: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended, as its runner reports it.

    Attributes:
        attempt_id: the attempt.
        fence: the fencing number that came with the claim.
        status: any except ``running``.
        rewards: of this attempt.
        error: why it failed; None otherwise.
        final: whether the rollout is not tried again, even if it has tries left, because this end is its result.
    """

    attempt_id: str
    fence: int
    status: AttemptStatus
    rewards: Sequence[Reward] = ()
    error: str | None = None
    final: bool = False
