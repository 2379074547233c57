"""Direct preference optimisation (DPO, arXiv 2305.18290): prefer the better of two answers to one prompt.

The loss of a pair is - log sigmoid(beta (margin)). The margin is how much more the better answer has gained over the
starting model than the worse one, in log-probability. The gradient is that of the two answers' log-probabilities, each
times beta sigmoid(- beta margin), so it uses the learner's own update, through `likelihood`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from lightning_spans.errors import DataError
from lightning_trainer.backend_protocol import Learner
from lightning_trainer.kits.sft.batches import RowsToLearn
from lightning_trainer.kits.sft.reasons import UnlearnedReason
from lightning_trainer.rl.rows import Row

BETA: Final = 0.1


@dataclass(frozen=True, slots=True)
class Pair:
    """Two rows, and their log-probabilities under the starting model."""

    chosen: Row
    rejected: Row
    before: tuple[float, float]


class Dpo:
    """Learns from pairs.

    Args:
        learner: takes the steps. Its current weights are the starting model.
        rows: pairs, as two rows each.
        beta: how strongly the policy is held to the starting model.
    """

    def __init__(self, learner: Learner, rows: Sequence[tuple[Row, Row]], beta: float) -> None:
        self._learner, self._beta = learner, beta
        flat = [row for pair in rows for row in pair]
        likely = [float(each.sum(dtype="f8")) for each in learner.logprobs(flat)]
        self._pairs: Mapping[str, Pair] = {
            chosen.attempt_id: Pair(chosen, rejected, (likely[2 * n], likely[2 * n + 1]))
            for n, (chosen, rejected) in enumerate(rows)
        }

    def update(self, batch: Sequence[Row]) -> dict[str, float]:
        """Take a step on the pairs of these better answers, and return its metrics."""
        pairs = [self._pairs[row.attempt_id] for row in batch]
        margins = self._margins(pairs)
        rows = []
        for pair, margin in zip(pairs, margins, strict=True):
            pull = 2 * self._beta * _sigmoid(-self._beta * margin)  # a row has half the weight of a pair
            rows += [_weigh_row(pair.chosen, pull), _weigh_row(pair.rejected, -pull)]
        metrics = self._learner.update(rows)
        return {**metrics, **self._loss_metrics(margins)}

    def loss(self, batch: Sequence[Row]) -> float:
        """Return the mean loss of the pairs of these better answers."""
        return self._loss_metrics(self._margins([self._pairs[row.attempt_id] for row in batch]))["loss"]

    def _margins(self, pairs: Sequence[Pair]) -> list[float]:
        likely = self._learner.logprobs([row for pair in pairs for row in (pair.chosen, pair.rejected)])
        now = [float(each.sum(dtype="f8")) for each in likely]
        return [(now[2 * n] - pair.before[0]) - (now[2 * n + 1] - pair.before[1]) for n, pair in enumerate(pairs)]

    def _loss_metrics(self, margins: Sequence[float]) -> dict[str, float]:
        losses = [math.log1p(math.exp(-abs(x))) + max(0.0, -x) for x in (self._beta * m for m in margins)]
        return {
            "loss": sum(losses) / len(losses),
            "margin": sum(margins) / len(margins),
            "accuracy": sum(margin > 0 for margin in margins) / len(margins),
        }


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _weigh_row(row: Row, advantage: float) -> Row:
    return replace(row, advantages=np.where(row.mask, advantage, 0.0))


def match_pairs(chosen: RowsToLearn, rejected: RowsToLearn) -> tuple[list[tuple[Row, Row]], Counter[str]]:
    """Join the rows of each pair; if one answer of a pair is left out, the pair is left out.

    Raises:
        DataError: no pair is left.
    """
    sides = [_single(rows) for rows in (chosen, rejected)]
    both = sides[0].keys() & sides[1].keys()
    left_out = chosen.left_out + rejected.left_out
    alone = sum(len(side.keys() - both) for side in sides)
    left_out += Counter({UnlearnedReason.ONE_LEFT_OUT: alone} if alone else {})
    if not both:
        raise DataError(f"no pair is left to learn from: {dict(left_out)}.")
    return [(sides[0][name], sides[1][name]) for name in sorted(both, key=int)], left_out


def _single(rows: RowsToLearn) -> dict[str, Row]:
    """Return the rows of conversations that consist of one row."""
    count = Counter(row.attempt_id for row in rows.rows)
    return {row.attempt_id: row for row in rows.rows if count[row.attempt_id] == 1}
