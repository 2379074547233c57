"""Alarms of teams: what a run's numbers say when agents that learn together get into each other's way."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any, Final

from lightning_trainer.report.alarms import WINDOW, Found, History
from lightning_trainer.report.teams.shares import POLICY_OF

CAPTURED: Final = 0.8  # of the squared gradient norm of a policy that several agents share


def agent_captures(history: History) -> Found:
    """Raise where one of the agents that share a policy makes nearly all of its gradient."""
    for policy, agents, shares in _shared(history):
        first = max(agents, key=lambda agent: shares[-1].get(agent, 0.0))
        if min(own.get(first, 0.0) for own in shares) < CAPTURED:
            continue
        tokens = [line[f"token_share/{first}"] for line in _steps(history) if f"token_share/{first}" in line]
        others = ", ".join(sorted(agent for agent in agents if agent != first))
        text = (
            f"{first} makes {statistics.fmean(own[first] for own in shares):.0%} of the gradient of the policy that it"
            f" shares with {others}, with {statistics.fmean(tokens[-WINDOW:]):.0%} of the trained tokens: the others"
            " hardly move the weights. Use --agent-weight equal, or a policy for each agent (--policy AGENT=lora)."
        )
        yield f"/{policy}", text


def _shared(history: History) -> Iterator[tuple[str, list[str], list[dict[str, float]]]]:
    """Return each policy that several agents share, they, and their shares of its gradient in the last steps."""
    steps = _steps(history)[-WINDOW:]
    policy_of: Mapping[str, str] = steps[-1].get(POLICY_OF, {}) if steps else {}
    for policy in dict.fromkeys(policy_of.values()):
        agents = [agent for agent, its in policy_of.items() if its == policy]
        shares = [{a: line[f"gradient_share/{a}"] for a in agents if f"gradient_share/{a}" in line} for line in steps]
        sums = [sum(own.values()) for own in shares]
        if len(agents) > 1 and len(shares) == WINDOW and all(len(own) > 1 for own in shares) and all(sums):
            yield (
                policy,
                agents,
                [{a: share / total for a, share in own.items()} for own, total in zip(shares, sums, strict=True)],
            )


def _steps(history: History) -> list[Mapping[str, Any]]:
    return [line for line in history if line["kind"] == "train"]


CHECKS: Final = (agent_captures,)
