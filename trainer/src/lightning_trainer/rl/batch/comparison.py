"""Compares calls within their groups: advantages, separately for each source."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_trainer.choices import Alone
from lightning_trainer.rl.advantages import FloatArray
from lightning_trainer.rl.batch.calls import FINAL, Calls
from lightning_trainer.rl.rows import Row, make_rows

Parts: TypeAlias = "dict[str, FloatArray]"  # by source: (M,) its part of the advantages
# rows -> for each of them (K,), what is subtracted from the reward at each of its trained tokens
Penalty: TypeAlias = "Callable[[Sequence[Row]], Sequence[NDArray[Any]]]"


def compare_calls(
    calls: Calls,
    compare: Callable[..., FloatArray],
    *,
    penalties_M: FloatArray | float = 0.0,
    normalise: bool,
    eps: float,
    alone: Alone = "skip",
) -> Parts:
    """Compare calls within their groups, separately for each source.

    Each agent is compared with itself, over the attempts in which it spoke: what an answerer could reach depends on
    whether it was asked at all.

    Args:
        calls: of whole groups.
        compare: turns values into advantages, with the arguments of `advantages.transition_advantages`.
        penalties_M: (M,) subtracted from the values first, except those of automatic rules.
        normalise: divide by the deviation of the group.
        eps: added to that deviation.
        alone: with `batch`, calls of an agent that spoke in only one attempt of its group are compared with the
            agent's calls in the whole batch; with `skip` they have an advantage of 0.

    Returns:
        By source, (M,) the weighted sum of the comparisons that the credit requests; `FINAL` is always there.
    """
    rules = sorted({source for call in calls.compared for source in call.parts} - {FINAL})
    compare = functools.partial(compare, normalise=normalise, eps=eps)
    parts = {FINAL: _compare_source(calls, FINAL, compare, penalties_M, alone=alone)}
    return parts | {rule: _compare_source(calls, rule, compare, 0.0, alone=alone) for rule in rules}


def _compare_source(
    calls: Calls,
    source: str,
    compare: Callable[..., FloatArray],
    penalties_M: FloatArray | float,
    *,
    alone: Alone,
) -> FloatArray:
    total_M = np.zeros(len(calls.compared))
    for level, values in enumerate(zip(*(call.values for call in calls.compared), strict=True)):
        given = [call.parts[source][level] if source in call.parts else 0.0 for call in calls.compared]
        given_M = np.array(given, dtype=np.float64) - penalties_M
        attempts = [t.attempt_id for t in calls.transitions]
        groups = [call.group_id for call in calls.compared]
        agents = [f"{t.agent or ''}\0{v.place}" for t, v in zip(calls.transitions, values, strict=True)]
        by_step = values[0].by_step
        advantages_M = compare(given_M, range(len(values)) if by_step else attempts, groups, agent_M=agents)
        if alone == "batch" and not by_step:
            with_all_M = compare(given_M, attempts, [""] * len(groups), agent_M=agents)
            advantages_M = np.where(_is_alone(attempts, groups, agents), with_all_M, advantages_M)
        total_M += np.array([value.weight for value in values]) * advantages_M
    return total_M


def _is_alone(attempts: Sequence[str], groups: Sequence[str], agents: Sequence[str]) -> NDArray[np.bool_]:
    """(M,) whether the agent called in no other attempt of the group."""
    calling: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for attempt, *cell in zip(attempts, groups, agents, strict=True):
        calling[cell[0], cell[1]].add(attempt)
    return np.array([len(calling[cell]) == 1 for cell in zip(groups, agents, strict=True)], dtype=np.bool_)


def penalties_of(calls: Calls, penalty: Penalty | None) -> FloatArray:
    """(M,) the summed penalties of each call's tokens; 0 for one without a row, and if there is no penalty."""
    found_M = np.zeros(len(calls.compared))
    if penalty is None:
        return found_M
    # Rows whose advantages are the calls' numbers show which token belongs to which call.
    rows, _ = make_rows(calls.transitions, np.arange(1.0, len(found_M) + 1.0), calls.groups)
    for row, penalties in zip(rows, penalty(rows), strict=True):
        np.add.at(found_M, row.advantages[row.mask].astype(np.int64) - 1, penalties)
    return found_M


def weigh_parts(parts: Parts, weights: Mapping[str, float]) -> FloatArray:
    """(M,) the sum of the advantages' parts, those of automatic rules scaled by their weights."""
    total_M = parts[FINAL]
    for rule in parts.keys() - {FINAL}:
        total_M = total_M + abs(weights[rule]) * parts[rule]
    return total_M


@dataclass(frozen=True, slots=True)
class NoContrast:
    """Groups in which nothing is learned; see `Batch`."""

    flat: frozenset[str]
    tied: frozenset[str]


def no_contrast(calls: Calls, parts: Parts, earned: Parts | None = None) -> NoContrast:
    """Return the groups in which no call has an advantage: none at all, and none from rewards alone.

    Args:
        calls: of whole groups.
        parts: of all advantages.
        earned: the same without penalties; None: there were none.
    """
    flat = _still(calls, list(parts.values()))
    if earned is None and not calls.judged:
        return NoContrast(flat, flat)
    return NoContrast(flat, flat | _still(calls, [(earned or parts)[FINAL]]))


def _still(calls: Calls, parts: Sequence[FloatArray]) -> frozenset[str]:
    alive = {c.group_id for part_M in parts for c, advantage in zip(calls.compared, part_M, strict=True) if advantage}
    return frozenset(call.group_id for call in calls.compared) - alive
