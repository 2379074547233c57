"""The stages of an agent's policy, and their transitions: deployments in, the next deployment out.

candidate ──▶ shadow ──▶ canary ──▶ stable
    └────────────┴───────────┴─────────┴──▶ rolled_back

The shadow may be left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_spans.store.deployments import Deployment, Stage

_TRIED: Final[tuple[Stage, ...]] = ("candidate", "shadow", "canary")


@dataclass(frozen=True, slots=True)
class Note:
    """Reason, actor and time of a transition.

    Attributes:
        reason: why it is made.
        actor: who makes it.
        at_ns: Unix time in nanoseconds.
    """

    reason: str
    actor: str
    at_ns: int = field(default_factory=time.time_ns)


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy that can be a candidate.

    Attributes:
        name: name of a model on the server, or of an adapter ``NAME@HASH``.
        checkpoint: the adapter's folder; None: the server has the policy under its name.
        base: the model on whose servers the adapter is loaded; None likewise.
    """

    name: str
    checkpoint: str | None = None
    base: str | None = None


def is_tried(deployment: Deployment | None) -> bool:
    """Whether there is a candidate that is neither promoted nor rolled back."""
    return deployment is not None and deployment.stage in _TRIED


def is_dropped(history: Sequence[Deployment]) -> bool:
    """Whether the newest transition rolled back a candidate that was not promoted."""
    return len(history) > 1 and history[-1].stage == "rolled_back" and is_tried(history[-2])


def named_in(history: Sequence[Deployment]) -> Deployment | None:
    """Return the row that named the newest candidate; None if there has been none."""
    return next((one for one in reversed(history) if one.stage == "candidate"), None)


def name_candidate(
    current: Deployment | None, agent: str, policy: Policy, note: Note, *, stable: str | None = None
) -> Deployment:
    """Return the transition that names a candidate, which does not answer users yet.

    Args:
        current: the agent's newest deployment; None: it has none.
        agent: its name.
        policy: the candidate.
        note: reason and actor.
        stable: the policy that answers the agent today; needed for its first candidate.

    Raises:
        ConfigError: there already is a candidate, or the stable policy is unknown.
    """
    if current is not None and is_tried(current):
        raise ConfigError(
            f"{agent} has the candidate {current.candidate} in the stage {current.stage}. Promote it or roll it back"
            " first."
        )
    if current is None and stable is None:
        raise ConfigError(f"{agent} has no deployment yet. Name the model that answers it today: --stable MODEL.")
    if current is not None and stable not in (None, current.stable):
        raise ConfigError(
            f"the stable policy of {agent} is {current.stable}, not {stable}. Only promote and rollback change it."
        )
    answering = current.stable if current is not None else str(stable)
    if policy.name == answering:
        raise ConfigError(f"{policy.name} is the stable policy of {agent} already. Name another candidate.")
    return Deployment(
        agent=agent,
        number=1 if current is None else current.number + 1,
        stage="candidate",
        stable=answering,
        candidate=policy.name,
        previous=None if current is None else current.previous,
        checkpoint=policy.checkpoint,
        base=policy.base,
        reason=note.reason,
        actor=note.actor,
        at_ns=note.at_ns,
    )


def begin_shadow(current: Deployment | None, agent: str, share: float, note: Note) -> Deployment:
    """Return the transition after which the candidate gets copies of a share of the conversations.

    Raises:
        ConfigError: there is no candidate, it already answers users, or the share is not above 0 and at most 1.
    """
    tried = _require_candidate(current, agent)
    if tried.stage == "canary":
        raise ConfigError(f"the candidate {tried.candidate} of {agent} is in a canary already: it answers users.")
    return _next(tried, note, stage="shadow", share=_check_share(share))


def begin_canary(current: Deployment | None, agent: str, share: float, note: Note) -> Deployment:
    """Return the transition after which the candidate answers a share of the conversations.

    Raises:
        ConfigError: there is no candidate, or the share is not above 0 and at most 1.
    """
    tried = _require_candidate(current, agent)
    return _next(tried, note, stage="canary", share=_check_share(share))


def approve(current: Deployment | None, agent: str, note: Note) -> Deployment:
    """Return the transition by which a person approves the candidate; nothing else changes.

    Raises:
        ConfigError: the candidate is not in a canary, so nothing is known about it yet.
    """
    return _next(_in_canary(current, agent), note)


def promote(current: Deployment | None, agent: str, note: Note) -> Deployment:
    """Return the transition after which the candidate is the stable policy.

    Raises:
        ConfigError: the candidate has not answered users: it is not in a canary.
    """
    tried = _in_canary(current, agent)
    stable = str(tried.candidate)
    return _next(tried, note, stage="stable", stable=stable, previous=tried.stable, candidate=None, share=0.0)


def roll_back(history: Sequence[Deployment], agent: str, note: Note, *, last_promotion: bool = False) -> Deployment:
    """Return the transition that ends a candidate, or returns from the last promotion to the policy before it.

    Args:
        history: history of the agent, oldest first.
        agent: its name.
        note: reason and actor.
        last_promotion: return from the last promotion although a candidate was rolled back after it.

    Raises:
        ConfigError: there is nothing to roll back, or a candidate that was never promoted has just been rolled back.
    """
    current = history[-1] if history else None
    if current is not None and is_tried(current):
        if last_promotion:
            raise ConfigError(
                f"{agent} has the candidate {current.candidate} in the stage {current.stage}. Roll it back first,"
                " without --last-promotion."
            )
        return _next(current, note, stage="rolled_back", share=0.0)
    if current is None or current.previous is None:
        raise ConfigError(f"{agent} has no candidate and no earlier policy, so there is nothing to roll back.")
    if not last_promotion and is_dropped(history):
        raise ConfigError(
            f"{current.candidate} was rolled back already, by {current.actor or 'somebody'}: {current.stable} answers"
            f" {agent}. To replace it by {current.previous}, the policy before it: lightning-rl deploy rollback --agent"
            f" {agent} --last-promotion."
        )
    return _next(
        current,
        note,
        stage="rolled_back",
        stable=current.previous,
        candidate=current.stable,
        previous=_before(history, current.previous),
        checkpoint=None,
        base=None,
    )


def _before(history: Sequence[Deployment], policy: str) -> str | None:
    """Return the policy that was stable before this one was promoted."""
    promoted = (one.previous for one in reversed(history) if one.stage == "stable" and one.stable == policy)
    return next(promoted, None)


def _check_share(share: float) -> float:
    if not 0.0 < share <= 1.0:
        raise ConfigError(f"share {share:g}: give a share above 0 % and at most 100 %, such as --share 5%.")
    return share


def _require_candidate(current: Deployment | None, agent: str) -> Deployment:
    if current is None or not is_tried(current):
        raise ConfigError(f"{agent} has no candidate. Name one: lightning-rl deploy candidate --agent {agent} ...")
    return current


def _in_canary(current: Deployment | None, agent: str) -> Deployment:
    tried = _require_candidate(current, agent)
    if tried.stage != "canary":
        raise ConfigError(
            f"the candidate {tried.candidate} of {agent} is in the stage {tried.stage}. Start a canary first:"
            f" lightning-rl deploy canary --agent {agent} --share 5%."
        )
    return tried


def _next(current: Deployment, note: Note, **changes: Any) -> Deployment:
    following = replace(current, number=current.number + 1, reason=note.reason, actor=note.actor, at_ns=note.at_ns)
    return replace(following, details={}, **changes)
