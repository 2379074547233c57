"""What values are compared with, for the algorithms that the torch backend does not have. Pure functions on arrays.

Axes: `_M` transitions. Arguments as those of `lightning_trainer.advantages.transition_advantages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from lightning_trainer.advantages import FloatArray, Ids, transition_advantages


def leave_one_out(values_M: FloatArray, attempt_M: Ids, group_M: Ids, *, agent_M: Ids, **_: Any) -> FloatArray:
    """Compare each call with the mean of the other attempts of its group: RLOO, arXiv 2402.14740, equation 5.

    Attempts count once, with the mean of their calls' values; each agent is compared with itself. 0 where there is no
    other attempt.
    """
    # With m the attempt's own mean, b the mean of all n: the others' mean is b - (m - b) / (n - 1), and v - b is what
    # the comparison with all gives without division by the deviation.
    centred_M = transition_advantages(values_M, attempt_M, group_M, agent_M=agent_M, normalise=False)
    kinds = list(zip(group_M, agent_M, strict=True))
    members: dict[tuple[Any, Any], set[Any]] = {}
    own: dict[tuple[Any, Any, Any], list[float]] = {}
    for centred, kind, attempt in zip(centred_M, kinds, attempt_M, strict=True):
        members.setdefault(kind, set()).add(attempt)
        own.setdefault((*kind, attempt), []).append(float(centred))
    out = np.zeros(len(centred_M))
    for m, (kind, attempt) in enumerate(zip(kinds, attempt_M, strict=True)):
        others = len(members[kind]) - 1
        if others:
            out[m] = centred_M[m] + float(np.mean(own[(*kind, attempt)])) / others
    return out


def uncompared(values_M: Sequence[float] | FloatArray, attempt_M: Ids, group_M: Ids, **_: Any) -> FloatArray:  # noqa: ARG001 - as the others
    """Give the values themselves: for algorithms whose baseline is the batch, or a critic."""
    return np.asarray(values_M, dtype=np.float64)


COMPARISONS: Final[Mapping[str, Callable[..., FloatArray]]] = {
    "grpo": transition_advantages,
    "rloo": leave_one_out,
    "reinforce++": uncompared,
    "ppo": uncompared,
}
