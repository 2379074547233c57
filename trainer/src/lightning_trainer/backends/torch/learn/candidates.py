"""Candidates at trained tokens: the most likely ones under the policy, and their log-probabilities under a model.

Axes: P trained tokens of a micro-batch, Q taught ones among them, C candidates at each, U distinct places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_trainer.backends.torch.learn.tree import PackedMicroBatch, micro_batches
from lightning_trainer.backends.torch.learn.tree_plan import TreePlan
from lightning_trainer.backends.torch.model.load import LoadedModel
from lightning_trainer.choices import Divergence
from lightning_trainer.rl.losses import candidate_divergence
from lightning_trainer.rl.rows import Row

_PLACES = 256  # number of places whose logits are held at once


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """A teacher's targets for a micro-batch.

    Attributes:
        place_Q: (Q,) index into `PackedMicroBatch.predicts_U` of each taught token.
        tokens_QC: (Q, C) candidates.
        teacher_QC: (Q, C) the teacher's log-probabilities.
        weights_Q: (Q,) weight of each divergence in the batch's loss.
    """

    place_Q: NDArray[np.int64]
    tokens_QC: NDArray[np.int64]
    teacher_QC: Tensor
    weights_Q: Tensor

    @property
    def asked(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(Q * C,) the place and the token of each candidate."""
        return np.repeat(self.place_Q, self.tokens_QC.shape[1]), self.tokens_QC.reshape(-1)

    def loss(self, logprobs: Tensor, kind: Divergence) -> tuple[Tensor, Tensor]:
        """Return the contribution to the batch's loss, and (Q,) the divergences in nats.

        Args:
            logprobs: (Q * C,) the policy's log-probabilities of `asked`, with gradient.
            kind: of divergence.
        """
        divergence_Q = candidate_divergence(logprobs.reshape(self.teacher_QC.shape), self.teacher_QC, kind)
        return (self.weights_Q * divergence_Q).sum(), divergence_Q.detach()


def lesson(packed: PackedMicroBatch, rows: Sequence[Row], weights_P: Tensor) -> Lesson | None:
    """Gather the targets of a micro-batch's rows; None if no row has any.

    Args:
        packed: the micro-batch.
        rows: its rows, in its order.
        weights_P: (P,) weight of each trained token in the batch's loss.
    """
    if all(row.target is None for row in rows):
        return None
    device = weights_P.device
    taught, tokens, logprobs, weights, start = [], [], [], [], 0
    for row in rows:
        if row.target is not None:
            own = np.flatnonzero(row.target.weights_K)
            taught.append(start + own)
            tokens.append(row.target.tokens_KC[own])
            logprobs.append(row.target.logprobs_KC[own])
            weights.append(row.target.weights_K[own])
        start += int(row.mask.sum())
    at_Q = np.concatenate(taught)
    own_Q = torch.from_numpy(np.concatenate(weights)).to(device)
    return Lesson(
        place_Q=packed.place_P[at_Q],
        tokens_QC=np.concatenate(tokens),
        teacher_QC=torch.from_numpy(np.concatenate(logprobs)).to(device),
        weights_Q=weights_P[torch.from_numpy(at_Q).to(device)] * own_Q,
    )


@torch.no_grad()
def likeliest(model: LoadedModel, rows: Sequence[Row], count: int, max_tokens: int) -> list[NDArray[np.int64]]:
    """Return for each row (K, C) the most likely tokens under the model at each of its trained tokens.

    Args:
        model: gives the next-token distribution.
        rows: any.
        count: C; all tokens of the vocabulary if that is fewer.
        max_tokens: most tokens in one forward pass.
    """
    found: dict[int, NDArray[np.int64]] = {}
    for packed in micro_batches(rows, max_tokens):
        device = model.shape.device
        plan = TreePlan(packed, model.shape.dtype, device)
        hidden = model.hidden(
            torch.from_numpy(packed.tokens_N).to(device), torch.from_numpy(packed.positions_N).to(device), plan
        )
        hidden_UH = hidden[torch.from_numpy(packed.predicts_U).to(device)]
        best_UC = torch.cat([_best(model.head(part), count) for part in torch.split(hidden_UH, _PLACES)]).cpu().numpy()
        found |= zip(packed.rows.tolist(), _by_row(best_UC[packed.place_P], packed, rows), strict=True)
    return [found[r] for r in range(len(rows))]


def _best(logits_UV: Tensor, count: int) -> Tensor:
    return logits_UV.float().topk(min(count, logits_UV.shape[-1])).indices


def _by_row(of_P: NDArray[np.int64], packed: PackedMicroBatch, rows: Sequence[Row]) -> list[NDArray[np.int64]]:
    ends = np.cumsum([int(rows[r].mask.sum()) for r in packed.rows])
    return np.split(of_P, ends[:-1])
