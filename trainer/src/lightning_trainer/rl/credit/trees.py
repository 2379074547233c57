"""Trees of attempts that share their beginnings: what each branch came to, beside its siblings and beside all leaves.

A tree is a record and the forks that left it; each of them is a leaf, with one reward. The advantage of a leaf is its
comparison with the leaves of its own tree, and besides it that with all leaves of the task (Tree-GRPO, arXiv
2509.21240, section 3.3). A call that several leaves share is trained once, with the sum of their advantages, which is
what training each leaf by itself would come to. So a call before the first fork has nothing from its own tree: there
its leaves' advantages cancel; what was said after a fork is told from what its siblings said.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightning_spans.schema.replays import REPLAYED
from lightning_spans.schema.transitions import Transition
from lightning_trainer.rl.advantages import EPSILON, FloatArray, transition_advantages
from lightning_trainer.rl.credit.played import Played
from lightning_trainer.rl.credit.values import Credited


def tree_advantages(attempts: Sequence[Played], *, normalise: bool = True, eps: float = EPSILON) -> list[Credited]:
    """Compare leaves within their trees and within their groups, and share that out over the calls.

    Args:
        attempts: leaves: records and their forks. A fork whose record is not among them has no tree.
        normalise: divide each comparison by its deviation.
        eps: added to the deviation.

    Returns:
        For each attempt (M,) advantages; NaN for a call that was answered from a record, and for a fork without a tree.
    """
    known = {attempt.attempt_id for attempt in attempts}
    leaves = [n for n, a in enumerate(attempts) if a.fork is None or a.fork.record in known]
    advantage = dict(zip(leaves, _of_leaves([attempts[n] for n in leaves], normalise, eps), strict=True))
    below: dict[str, list[tuple[Played, float]]] = {}  # by record: its forks, and what these came to
    for n in leaves:
        fork = attempts[n].fork
        if fork is not None and fork.call is not None:
            below.setdefault(fork.record, []).append((attempts[n], float(advantage[n])))
    found = []
    for n, attempt in enumerate(attempts):
        own = float(advantage.get(n, math.nan))
        others = below.get(attempt.attempt_id, ()) if attempt.fork is None else ()
        found.append(
            Credited(
                [
                    math.nan if REPLAYED in t.sampling else own + sum(its for leaf, its in others if _is_given(t, leaf))
                    for t in attempt.transitions
                ]
            )
        )
    return found


def _is_given(call: Transition, leaf: Played) -> bool:
    """Whether a leaf has a call of its record: one before the forked call, or one that ran beside it."""
    if leaf.fork is not None and leaf.fork.call is not None and call.turn < leaf.fork.call:
        return True
    given = {t.response_id for t in leaf.transitions if REPLAYED in t.sampling}
    return call.response_id is not None and call.response_id in given


def _of_leaves(leaves: Sequence[Played], normalise: bool, eps: float) -> FloatArray:
    earned = [leaf.earned for leaf in leaves]
    names = [leaf.attempt_id for leaf in leaves]
    groups = [leaf.group for leaf in leaves]
    trees = [leaf.attempt_id if leaf.fork is None else leaf.fork.record for leaf in leaves]
    among = [transition_advantages(earned, names, whose, normalise=normalise, eps=eps) for whose in (trees, groups)]
    return np.asarray(among[0] + among[1])
