"""Who moves the weights: each agent's share of what is learned from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

from lightning_trainer.rl.rows import Row

POLICY_OF: Final = "policy_of"  # in the line of a step: the policy that answered each agent, where there are several


def token_shares(rows: Iterable[Row]) -> dict[str, float]:
    """Return `token_share/AGENT`, the agent's share of the trained tokens; nothing of a single agent."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.agent] += sum(row.lengths)
    named = {agent: count for agent, count in counts.items() if agent}
    total = sum(named.values())
    return {f"token_share/{a}": count / total for a, count in named.items()} if len(named) > 1 and total else {}


def policies_of(rows: Iterable[Row]) -> dict[str, Any]:
    """Return the fact `POLICY_OF`; nothing of a single agent."""
    found = {row.agent: row.policy for row in rows if row.agent}
    return {POLICY_OF: found} if len(found) > 1 else {}
