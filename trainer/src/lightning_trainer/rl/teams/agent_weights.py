"""Weights of agents in the loss, so that an agent with more tokens does not change the policy more."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_trainer.choices import AgentWeight
from lightning_trainer.policies import most_specific
from lightning_trainer.rl.rows import Row

Floats = NDArray[np.float32]


def weigh_agents(rows: Sequence[Row], weights: Sequence[Floats], agent_weight: AgentWeight) -> list[Floats]:
    """Return the weights of the tokens of each row, multiplied by those of its agent.

    Args:
        rows: of one optimiser step of one policy.
        weights: for each row (K,) weights of its trained tokens: `rows.token_weights`.
        agent_weight: a factor by name, path or glob of agents, 1 for agents that are not named; or ``equal``: the
            tokens of each agent have the same total weight, and the total of all tokens is unchanged.
    """
    if not agent_weight:
        return list(weights)
    factors = _equal(rows, weights) if agent_weight == "equal" else agent_weight
    names = {agent: most_specific(factors, agent) for agent in {row.agent for row in rows}}
    own_factors = {agent: 1.0 if name is None else factors[name] for agent, name in names.items()}
    return [(own * own_factors[row.agent]).astype(np.float32) for row, own in zip(rows, weights, strict=True)]


def _equal(rows: Sequence[Row], weights: Sequence[Floats]) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for row, own in zip(rows, weights, strict=True):
        sums[row.agent] += float(own.sum(dtype=np.float64))
    mean = sum(sums.values()) / max(1, len(sums))
    return {agent: mean / total for agent, total in sums.items() if total}
