"""The transition: one model call as reinforcement learning sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_spans.schema.agents import check_known, path_of, selects
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Json


@dataclass(frozen=True, slots=True)
class Tokens:
    """The sampled tokens, exactly as the engine recorded them; never made again from text.

    Attributes:
        prompt: (P,) token ids of the observation.
        response: (A,) token ids of the action, including the end-of-turn token if one was sampled.
        logprobs: (A,) natural log-probability of each response token under the distribution it was sampled from.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """Observation, action and reward of one model call (of one choice of it, if n > 1).

    Attributes:
        rollout_id: the rollout.
        attempt_id: the attempt.
        agent: the calling agent; None if nothing named one.
        agent_path: its path, outermost first: ``billing/extract``; None if that is only its name.
        turn: position among the attempt's model calls in the order of their start, from 0.
        choice: index of the choice in the response.
        span_id: the chat span.
        response_id: the model server's id of the response; None if there was none.
        tokens: what was sampled; None if no engine recorded it. Such a transition never enters RL.
        policy: the model or policy that answered.
        policy_version: the number of its weights; None if not recorded.
        request: the body of the request as sent.
        message: the message of this choice, as the agent got it.
        ended_ns: Unix time in nanoseconds at which the agent had its answer; None if not recorded.
        finish_reason: ``stop``, ``length``, ``tool_calls``, ...
        sampling: the sampling parameters in force, if the gateway recorded them.
        error: why the call failed; None if it did not, or if the client rejected a whole answer.
        rewards: the transition's own rewards (AIR, rewards for its span).
    """

    rollout_id: str
    attempt_id: str
    agent: str | None
    turn: int
    span_id: str
    choice: int = 0
    agent_path: str | None = None
    response_id: str | None = None
    tokens: Tokens | None = None
    policy: str | None = None
    policy_version: int | None = None
    request: Mapping[str, Json] = field(default_factory=dict)
    message: Mapping[str, Json] = field(default_factory=dict)
    ended_ns: int | None = None
    finish_reason: str | None = None
    sampling: Mapping[str, Json] = field(default_factory=dict)
    error: str | None = None
    rewards: tuple[Reward, ...] = ()

    @property
    def path(self) -> str | None:
        """Its agent's path, which names and globs are compared with; None if nothing named one."""
        return None if self.agent is None else path_of(self.agent, self.agent_path)


def select(transitions: Sequence[Transition], agents: Sequence[str] | None) -> list[Transition]:
    """Keep the transitions of the selected agents, by name, path or explicit glob.

    Args:
        transitions: of one or more attempts.
        agents: names or globs; None keeps every transition that has an agent.

    Raises:
        UnknownAgentError: a name matches no transition; the message lists the names that were seen.
    """
    patterns = ("*",) if agents is None else tuple(agents)
    if agents is not None:
        check_known(patterns, (t.path for t in transitions if t.path is not None))
    return [t for t in transitions if selects(patterns, t.path)]
