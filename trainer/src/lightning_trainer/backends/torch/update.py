"""One policy-gradient update: forward micro-batches of packed rows, backward, one optimiser step.

Axes: P trained tokens of a micro-batch.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_trainer.backends.torch.head import chosen_logprobs
from lightning_trainer.backends.torch.model import LoadedModel
from lightning_trainer.backends.torch.options import TorchOptions
from lightning_trainer.backends.torch.policy import Policy
from lightning_trainer.backends.torch.tree import Packed, micro_batches
from lightning_trainer.backends.torch.tree_plan import TreePlan
from lightning_trainer.losses import kl_divergence, policy_loss
from lightning_trainer.rows import Row, token_weights


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A micro-batch with what the loss needs of each trained token, all (P,) float32."""

    packed: Packed
    recorded_P: Tensor
    advantages_P: Tensor
    weights_P: Tensor


def update(
    model: LoadedModel,
    policy: Policy,
    rows: Sequence[Row],
    options: TorchOptions,
    reference: AbstractContextManager[LoadedModel] | None = None,
    *,
    share: bool = True,
) -> dict[str, float]:
    """Take one optimiser step on a batch of rows: `Backend.update`.

    Args:
        model: forwards the rows.
        policy: takes the step.
        rows: the whole batch; the loss is one sum over all its trained tokens, however they are packed.
        options: clip range, aggregation and the rest.
        reference: gives the frozen starting policy; needed when `kl_coef` is above 0.
        share: False forwards every row on its own, for comparison.

    Returns:
        The metrics of `Backend.update`: means over the tokens that were forwarded (rows without gradient are not), with
        `kl` from the reference, or from the policy that sampled when there is none. Besides them `ratio_max`,
        `packed_tokens` (tokens forwarded) and `skipped` (1 when a gradient was not finite, so nothing was changed).
    """
    started = time.perf_counter()
    parts = _parts(model, rows, options, share=share)
    references: list[Tensor] | None = None
    if reference is not None:
        with reference as frozen:
            references = [token_logprobs(frozen, part.packed)[0] for part in parts]
    old = [part.recorded_P for part in parts]
    if options.old_logprobs == "recompute":
        old = [token_logprobs(model, part.packed)[0] for part in parts]
    sums: Counter[str] = Counter()
    ratio_max = 0.0
    for number, part in enumerate(parts):
        seen = _backward(model, part, old[number], references[number] if references else None, options)
        ratio_max = max(ratio_max, seen.pop("ratio_max"))
        sums.update(seen)
    norm, taken = policy.step() if parts else (0.0, True)
    count = sums["tokens"] or 1.0
    means = {name: sums[name] / count for name in ("clip_fraction", "kl", "entropy", "logprob_gap")}
    return {
        "loss": float(sums["loss"]),
        "grad_norm": norm,
        **means,
        "ratio_max": ratio_max,
        "tokens": float(sums["tokens"]),
        "packed_tokens": float(sum(len(part.packed.tokens_N) for part in parts)),
        "skipped": float(not taken),
        "seconds": time.perf_counter() - started,
    }


def token_logprobs(model: LoadedModel, packed: Packed, *, grad: bool = False) -> tuple[Tensor, Tensor]:
    """Forward a micro-batch.

    Returns:
        (P,) log-probabilities of the trained tokens, and (P,) entropies where they were drawn.
    """
    device = model.shape.device
    plan = TreePlan(packed, model.shape.dtype, device)
    with torch.set_grad_enabled(grad):
        hidden = model.hidden(
            torch.from_numpy(packed.tokens_N).to(device), torch.from_numpy(packed.positions_N).to(device), plan
        )
        logprobs_P, entropy_U = chosen_logprobs(
            model.head,
            hidden[torch.from_numpy(packed.predicts_U).to(device)],
            torch.from_numpy(packed.temperature_U).to(device),
            packed.place_P,
            packed.target_P,
        )
    return logprobs_P, entropy_U[torch.from_numpy(packed.place_P).to(device)]


def _parts(model: LoadedModel, rows: Sequence[Row], options: TorchOptions, *, share: bool) -> list[_Part]:
    """Pack the rows that have a gradient. Weights are made before, from all rows."""
    weights = token_weights(rows, options.loss_aggregation)
    kept = [r for r, row in enumerate(rows) if row.has_gradient or options.kl_coef > 0]
    parts = []
    for packed in micro_batches([rows[r] for r in kept], options.micro_batch_tokens, share=share):
        own = [kept[r] for r in packed.rows]

        def gather(arrays: list[NDArray[np.floating]]) -> Tensor:
            return torch.from_numpy(np.concatenate(arrays).astype(np.float32)).to(model.shape.device)

        parts.append(
            _Part(
                packed=packed,
                recorded_P=gather([rows[r].logprobs[rows[r].mask] for r in own]),
                advantages_P=gather([rows[r].advantages[rows[r].mask] for r in own]),
                weights_P=gather([weights[r] for r in own]),
            )
        )
    return parts


def _backward(
    model: LoadedModel, part: _Part, old_P: Tensor, reference_P: Tensor | None, options: TorchOptions
) -> dict[str, float]:
    """Forward and backward one micro-batch; give sums of what is watched."""
    logprobs_P, entropy_P = token_logprobs(model, part.packed, grad=True)
    result = policy_loss(
        logprobs_P,
        old_P,
        part.advantages_P,
        part.weights_P,
        clip_low=options.clip_low,
        clip_high=options.clip_high,
        clip_dual=options.clip_dual,
    )
    loss = result.loss
    kl_P = kl_divergence(logprobs_P, part.recorded_P if reference_P is None else reference_P)
    if reference_P is not None:
        loss = loss + options.kl_coef * (part.weights_P * kl_P).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    now_P = logprobs_P.detach()
    return {
        "loss": float(loss.detach()),
        "clip_fraction": float(result.clipped.sum()),
        "kl": float(kl_P.detach().sum()),
        "entropy": float(entropy_P.sum()),
        "logprob_gap": float((now_P - part.recorded_P).abs().sum()),
        "tokens": float(len(now_P)),
        "ratio_max": float(result.ratios.max()),
    }
