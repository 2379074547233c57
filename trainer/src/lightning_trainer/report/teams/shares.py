"""Each agent's share of the training data, its entropy and its policy."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_trainer.report.learned_tokens import SeenTokens
from lightning_trainer.report.log.lines import POLICY_OF
from lightning_trainer.rl.rows import Row


def token_shares(rows: Iterable[Row]) -> dict[str, float]:
    """Return `token_share/AGENT`, the agent's share of the trained tokens; empty for a single agent."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.agent] += sum(row.lengths)
    named = {agent: count for agent, count in counts.items() if agent}
    total = sum(named.values())
    return {f"token_share/{a}": count / total for a, count in named.items()} if len(named) > 1 and total else {}


def agent_entropies(seen: Mapping[Row, SeenTokens]) -> dict[str, float]:
    """Return `entropy/AGENT`, the mean over each agent's trained tokens; empty for a single agent."""
    found: defaultdict[str, list[NDArray[np.floating]]] = defaultdict(list)
    for row, tokens in seen.items():
        found[row.agent].append(tokens.entropy.astype(np.float64))
    means = {agent: float(np.concatenate(own).mean()) for agent, own in found.items() if agent}
    known = {f"entropy/{agent}": mean for agent, mean in means.items() if not np.isnan(mean)}
    return known if len(known) > 1 else {}


def policies_of(rows: Iterable[Row]) -> dict[str, Any]:
    """Return the fact `POLICY_OF`; empty if no agent has a name."""
    found = {row.agent: row.policy for row in rows if row.agent}
    return {POLICY_OF: found} if found else {}
