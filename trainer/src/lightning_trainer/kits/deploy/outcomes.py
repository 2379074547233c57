"""Outcomes of a canary, from the rewards in the store: one number for each conversation of both policies."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lightning_spans.errors import ConfigError
from lightning_spans.schema.agents import selects
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import Store
from lightning_spans.store.deployments import Deployment
from lightning_spans.store.protocol import Where, each
from lightning_trainer.kits.deploy.gate import FEWEST, Bounds, Evidence, weigh
from lightning_trainer.kits.deploy.guardrails import (
    OUTCOME,
    check_bounds,
    raises_alarm,
    read_assignments,
    weigh_guardrails,
)
from lightning_trainer.kits.deploy.program_changes import describe_changes, describe_program
from lightning_trainer.kits.deploy.transitions import Note, roll_back

GATE = "gate"  # in the details of a canary: the rules of its gate, written before the first outcome
_AT_ONCE = 2000  # conversations whose rewards are read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRules:
    """The rules by which a canary is judged.

    Attributes:
        bounds: the error bounds.
        sources: sources of the rewards that count; empty: all.
        wait_s: age in seconds from which a conversation counts, so that late outcomes count like others.
        guardrails: by name, how much larger the candidate's share of bad calls may be.

    Raises:
        ConfigError: a guardrail is unknown, or its bound is not a share.
    """

    bounds: Bounds
    sources: tuple[str, ...] = ()
    wait_s: float = 0.0
    guardrails: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds(self.guardrails)

    def to_details(self) -> dict[str, Any]:
        """Return the rules as stored in the canary's details."""
        others = {"sources": list(self.sources), "wait_s": self.wait_s, "guardrails": dict(self.guardrails)}
        return {GATE: {**asdict(self.bounds), **others}}


def rules_of(history: Sequence[Deployment]) -> GateRules | None:
    """Return the rules that the candidate's first canary stated; None if it is not in a canary."""
    found = next((one.details[GATE] for one in _canaries(history) if GATE in one.details), None)
    if found is None:
        return None
    names = ("worse", "better", "false_promotion", "power")
    bounds = Bounds(**{name: float(found[name]) for name in names})
    return GateRules(
        bounds=bounds,
        sources=tuple(found["sources"]),
        wait_s=float(found["wait_s"]),
        guardrails=found.get("guardrails", {}),  # canaries of version 0.2.0 stated none
    )


def _canaries(history: Sequence[Deployment]) -> list[Deployment]:
    """Return the canary transitions of the candidate that is in a canary now, oldest first."""
    if not history or history[-1].stage != "canary":
        return []
    since = max(place for place, one in enumerate(history) if one.stage == "candidate")
    return [one for one in history[since:] if one.stage == "canary"]


def read_evidence(store: Store, history: Sequence[Deployment]) -> Evidence | None:
    """Read the outcomes of a canary, and return their evidence; None if the agent is not in a canary.

    A conversation counts for the policy that it was assigned to, even if the other policy answered instead: otherwise
    failures would make a candidate look better.

    Raises:
        ConfigError: a reward is not between 0 and 1.
    """
    rules = rules_of(history)
    if rules is None:
        return None
    return weigh(_strata(store, history, rules.sources, rules.wait_s), rules.bounds)


def _strata(
    store: Store, history: Sequence[Deployment], sources: Sequence[str], wait_s: float
) -> list[tuple[list[float], list[float]]]:
    """Return the outcomes of candidate and stable policy for each share of the canary, from the given sources."""
    current, until_ns = history[-1], time.time_ns() - int(wait_s * 1e9)
    given = [one for one in read_assignments(store, _canaries(history)) if one.at_ns <= until_ns]
    outcomes = read_outcomes(store, current.agent, [one.attempt_id for one in given], sources)
    strata: defaultdict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for one in given:
        if one.attempt_id in outcomes:
            strata[one.number][one.policy == current.stable].append(outcomes[one.attempt_id])
    return list(strata.values())


def read_outcomes(store: Store, agent: str, conversations: Sequence[str], sources: Sequence[str]) -> dict[str, float]:
    """Return the mean reward, for the agent or for the whole conversation, of each conversation that has one.

    Raises:
        ConfigError: a reward is not between 0 and 1.
    """
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for first in range(0, len(conversations), _AT_ONCE):
        for reward in each(store, Reward, Where(attempt_ids=conversations[first : first + _AT_ONCE])):
            if _counts(reward, agent, sources):
                rewards[reward.attempt_id].append(reward.value)
    return {conversation: sum(values) / len(values) for conversation, values in rewards.items()}


def _counts(reward: Reward, agent: str, sources: Sequence[str]) -> bool:
    if reward.agent is not None and not selects((agent,), reward.agent):
        return False
    if sources and reward.source not in sources:
        return False
    if not 0.0 <= reward.value <= 1.0:
        raise ConfigError(
            f"the reward {reward.value:g} of {reward.source} for {reward.attempt_id} is not between 0 and 1, so the"
            " gate can't judge by it. Roll the candidate back, name it again, and start its canary with `deploy canary"
            " --outcome SOURCE`, a source of rewards that are."
        )
    return True


def describe_gate(store: Store, history: Sequence[Deployment]) -> dict[str, Any] | None:
    """Return the gate's evidence as JSON; None if the agent is not in a canary."""
    rules, evidence = rules_of(history), read_evidence(store, history)
    if rules is None or evidence is None:
        return None
    share = history[-1].share
    needed = rules.bounds.needed(share) if share < 1.0 else None  # at 100 % there is nothing to compare with
    return {"n": evidence.candidate + evidence.stable, **asdict(evidence), "needed": needed}


def check_promotion(store: Store, history: Sequence[Deployment], *, override: bool) -> dict[str, Any]:
    """Return the details of a promotion that is permitted by the gate or, if `override` is set, by a person.

    Raises:
        ConfigError: it is not permitted.
    """
    gate = describe_gate(store, history)
    if gate is None:
        raise ConfigError("the candidate's canary has no gate. Start it again: lightning-rl deploy canary.")
    if override:
        return {"evidence": gate, "override": True}
    obstacles = find_obstacles(history, gate, describe_guardrails(store, history), describe_program(store, history))
    if obstacles:
        raise ConfigError(f"not promoted: {obstacles[0]}. To promote nevertheless: --override --reason TEXT.")
    return {"evidence": gate}


def find_obstacles(
    history: Sequence[Deployment],
    gate: Mapping[str, Any],
    guardrails: Mapping[str, Mapping[str, Any]] | None,
    program: Mapping[str, Any] | None,
) -> list[str]:
    """Return why program, guardrails and gate do not permit the promotion of a candidate in a canary; [] if they do.

    Args:
        history: history of the agent, oldest first.
        gate: result of `describe_gate`.
        guardrails: result of `describe_guardrails`.
        program: result of `describe_program`.
    """
    found = (describe_changes(program), _held_back(guardrails), _gate_obstacle(history[-1], gate))
    return [obstacle for obstacle in found if obstacle is not None]


def _gate_obstacle(current: Deployment, gate: Mapping[str, Any]) -> str | None:
    """Return what the gate needs before it permits a promotion; None if it does."""
    if gate["decision"] == "promote":
        return None
    counted = f"{gate['candidate']} outcomes of {current.candidate} and {gate['stable']} of {current.stable}"
    if gate["decision"] == "reject":
        return f"{counted}. The gate says reject: lightning-rl deploy rollback --agent {current.agent}"
    if gate["needed"] is None:
        return f"{counted}. At a share of 100 % there is nothing to compare with: start a canary with a smaller share"
    return f"{counted}. About {gate['needed']} are needed in all at this share"


def reject(store: Store, history: Sequence[Deployment]) -> Deployment | None:
    """Return the rollback of a candidate that a guardrail or the gate rejects; None if neither does.

    Guardrails are checked first: they apply even if outcomes are missing or invalid.
    """
    if rules_of(history) is None:
        return None
    guarded = describe_guardrails(store, history)
    said, actor, evidence = _alarm_of(guarded), "guardrail", {"guardrails": guarded}
    if said is None:
        found = describe_gate(store, history) or {}
        if found.get("decision") != "reject":
            return None
        difference = f"{found['difference']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"
        said = f"the gate rejects it: {difference}, {found['candidate']} and {found['stable']} outcomes"
        actor, evidence = "gate", found
    return replace(roll_back(history, history[-1].agent, Note(said, actor)), details={"evidence": evidence})


def describe_guardrails(store: Store, history: Sequence[Deployment]) -> dict[str, dict[str, Any]] | None:
    """Return the evidence of each guardrail of the canary as JSON.

    None if the agent is not in a canary or has no guardrails.
    """
    rules = rules_of(history)
    if rules is None or not rules.guardrails:
        return None
    found = weigh_guardrails(store, _canaries(history), rules.guardrails)
    for name, bound in rules.guardrails.items():
        if name.startswith(OUTCOME):
            strata = _strata(store, history, (name.removeprefix(OUTCOME),), 0.0)
            lost = [tuple([1.0 - value for value in arm] for arm in arms) for arms in strata]
            found[name] = bound, weigh(lost, Bounds())  # type: ignore[arg-type]  # two arms, as before
    return {
        name: {
            "bound": bound,
            **{part: getattr(seen, part) for part in ("candidate", "stable", "difference", "low", "high")},
            "alarm": raises_alarm(bound, seen),
        }
        for name, (bound, seen) in found.items()
    }


def _held_back(guarded: Mapping[str, Mapping[str, Any]] | None) -> str | None:
    """Return why guardrails do not permit a promotion yet; None if they do.

    An alarm needs certainty. A promotion needs more than its absence: outcomes that arrive late must be there, and the
    best estimate must be within the bound. Otherwise a gate that decides early would be ahead of its guardrails.
    """
    if (alarm := _alarm_of(guarded)) is not None:
        return alarm
    for name, seen in (guarded or {}).items():
        counted = f"{seen['candidate']} and {seen['stable']} conversations"
        if seen["difference"] is None:
            return f"the guardrail {name} has seen {counted}, and at least {FEWEST} of each policy are needed"
        if seen["difference"] > seen["bound"]:
            above = f"{seen['difference']:+.3f} with {counted}, at most {seen['bound']:+g} is allowed"
            return f"the guardrail {name} is above its bound so far: {above}"
    return None


def _alarm_of(guarded: Mapping[str, Mapping[str, Any]] | None) -> str | None:
    """Return a message about the guardrails that raise an alarm; None if none does."""
    told = [
        f"the guardrail {name} is passed: {seen['difference']:+.3f} [{seen['low']:+.3f}, {seen['high']:+.3f}], at most"
        f" {seen['bound']:+g} is allowed, {seen['candidate']} and {seen['stable']} conversations"
        for name, seen in (guarded or {}).items()
        if seen["alarm"]
    ]
    return "; ".join(told) or None
