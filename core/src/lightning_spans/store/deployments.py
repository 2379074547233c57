"""Deployments: which policy answers an agent in production, and which policy each conversation got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from lightning_spans.schema.spans import SHADOW, Json

Stage: TypeAlias = Literal["candidate", "shadow", "canary", "stable", "rolled_back"]


def copy_id(call_id: str) -> str:
    """Return the id of the record of a candidate's answer to a copy of a live call: both are deleted together."""
    return f"{SHADOW}-{call_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One transition of an agent's policy. The newest of an agent says which policies answer it.

    Attributes:
        agent: its name.
        number: of the transition, 1 for the agent's first. Numbers are unique, so that of two simultaneous transitions
            one is rejected.
        stage: the candidate's stage. ``stable``: it was promoted, and there is none. ``rolled_back``: it was rejected.
        stable: the policy that answers all calls, or in a canary all others: a model's name on the server, or of an
            adapter ``NAME@HASH``.
        candidate: the policy that is tested or was rolled back; None if there is none.
        previous: the stable policy before the last promotion, to which a rollback returns; None: there was none.
        share: of the conversations that the candidate answers in a canary, or gets copies of in a shadow; 0 to 1, 0
            outside both.
        checkpoint: folder of the candidate's adapter; None: the server has the candidate under its name.
        base: the model on whose servers that adapter is loaded; None likewise.
        reason: why it was made.
        actor: who made it.
        at_ns: Unix time in nanoseconds.
        details: its basis, such as the result of a test or a person's approval.
    """

    agent: str
    number: int
    stage: Stage
    stable: str
    candidate: str | None = None
    previous: str | None = None
    share: float = 0.0
    checkpoint: str | None = None
    base: str | None = None
    reason: str = ""
    actor: str = ""
    at_ns: int = 0
    details: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The policy that answers an agent in one conversation. Written once, so that no conversation changes its policy.

    Attributes:
        agent: its name.
        attempt_id: the attempt, or outside attempts the conversation.
        policy: the policy that answers.
        number: of the deployment by which it was chosen.
        at_ns: Unix time in nanoseconds.
    """

    agent: str
    attempt_id: str
    policy: str
    number: int
    at_ns: int = 0
