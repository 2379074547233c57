"""Forward rows without a gradient: log-probabilities of their tokens, and penalties for leaving the starting policy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_trainer.backends.torch.learn.tree import micro_batches
from lightning_trainer.backends.torch.learn.update import forward, token_logprobs
from lightning_trainer.backends.torch.model.load import LoadedModel
from lightning_trainer.backends.torch.options import TorchOptions
from lightning_trainer.rl.losses import kl_divergence
from lightning_trainer.rl.rows import Row


def penalties(
    rows: Sequence[Row], options: TorchOptions, reference: AbstractContextManager[LoadedModel]
) -> list[NDArray[np.float64]]:
    """Return the reward penalty for divergence from the starting policy: for each row, one for each trained token.

    `kl_coef` times the estimate at the log-probabilities with which the tokens were sampled.
    """
    found: dict[int, NDArray[np.float64]] = {}
    with reference as frozen:
        for packed in micro_batches(rows, options.micro_batch_tokens):
            recorded = np.concatenate([rows[r].logprobs[rows[r].mask] for r in packed.rows])
            reference_P = token_logprobs(frozen, packed)[0].cpu()
            kl_P = options.kl_coef * kl_divergence(torch.from_numpy(recorded), reference_P, options.kl_estimator)
            ends = np.cumsum([int(rows[r].mask.sum()) for r in packed.rows])
            found |= zip(packed.rows.tolist(), np.split(kl_P.double().numpy(), ends[:-1]), strict=True)
    return [found[r] for r in range(len(rows))]


@torch.no_grad()
def row_logprobs(
    model: LoadedModel,
    rows: Sequence[Row],
    max_tokens: int,
    candidates: Sequence[NDArray[np.int64]] | None = None,
) -> list[NDArray[np.float32]]:
    """Return for each row (K,) log-probabilities of its trained tokens, without gradient.

    Args:
        model: forwards the rows.
        rows: any.
        max_tokens: most tokens in one forward pass.
        candidates: for each row (K, C) tokens; then (K, C) log-probabilities of these are returned instead.
    """
    found: dict[int, NDArray[np.float32]] = {}
    for packed in micro_batches(rows, max_tokens):
        if candidates is None:
            logprobs_P = token_logprobs(model, packed)[0].float().cpu().numpy()
        else:
            tokens_PC = np.concatenate([candidates[r] for r in packed.rows])
            asked = np.repeat(packed.place_P, tokens_PC.shape[1]), tokens_PC.reshape(-1)
            logprobs_P = forward(model, packed, asked).asked.float().cpu().numpy().reshape(tokens_PC.shape)
        ends = np.cumsum([int(rows[r].mask.sum()) for r in packed.rows])
        found |= zip(packed.rows.tolist(), np.split(logprobs_P, ends[:-1]), strict=True)
    return [found[r] for r in range(len(rows))]
