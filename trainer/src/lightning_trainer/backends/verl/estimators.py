"""Advantage estimators under our names, because verl's are wrong if a rollout has several rows.

verl compares rows: a rollout of five rows counts five times in its group, and agents that do different things are
compared with each other. Here each rollout counts once and each agent is compared with itself.
`lightning_trainer.rl.advantages`, which the torch backend uses too, decides this where groups are collected; here the
advantages are only laid out.

Axes: `_R` rows, `_T` tokens of the longest response.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_trainer.backends.verl.encoding import decode
from lightning_trainer.backends.verl.options.algorithms import AGGREGATIONS
from lightning_trainer.choices import Aggregation

_EPSILON = 1e-8  # as in verl's own whitening


def laid_out(uids: Sequence[str], mask_RT: Tensor) -> Tensor:
    """(R, T) float32: at each token that counts, the advantage of its call; 0 elsewhere."""
    out_RT = torch.zeros(mask_RT.shape, dtype=torch.float32)
    for out_T, uid in zip(out_RT, uids, strict=True):
        for start, length, advantage in decode(uid):
            out_T[start : start + length] = advantage
    return out_RT.to(mask_RT.device) * mask_RT


def whiten_tokens(values_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """Subtract the mean over all tokens of the batch, and divide by the standard deviation.

    REINFORCE++ (arXiv 2501.03262) with the return of a call at each of its tokens.
    """
    mask_RT = mask_RT.to(values_RT.dtype)
    tokens = mask_RT.sum().clamp(min=1)
    centred_RT = (values_RT - (values_RT * mask_RT).sum() / tokens) * mask_RT
    deviation = (centred_RT.square().sum() / tokens).sqrt()
    return centred_RT / (deviation + _EPSILON)


def weight_tokens(advantages_RT: Tensor, uids: Sequence[str], aggregation: Aggregation) -> Tensor:
    """Weight advantages so that verl's mean over tokens becomes another aggregation: see `rows.token_weights`.

    verl divides by the number of tokens, so each token's advantage is multiplied by that number and by the intended
    weight. The weight is positive, so clipping decides the same.
    """
    if aggregation == "token-mean":
        return advantages_RT
    spans_R = [decode(uid) for uid in uids]
    lengths = [span.length for spans in spans_R for span in spans]
    out_RT = torch.zeros_like(advantages_RT)
    for out_T, advantages_T, spans in zip(out_RT, advantages_RT, spans_R, strict=True):
        for start, length, _ in spans:
            place = slice(start, start + length)
            share = length if aggregation == "sequence-mean" else 1
            out_T[place] = advantages_T[place] * (sum(lengths) / (len(lengths) * share))
    return out_RT


def estimate(
    *, response_mask: Tensor, index: Sequence[str], whiten: bool, aggregation: Aggregation, **_: Any
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns in the form that verl's trainer expects; `index` contains the rows' field `uid`."""
    advantages_RT = laid_out(index, response_mask)
    if whiten:
        advantages_RT = whiten_tokens(advantages_RT, response_mask)
    advantages_RT = weight_tokens(advantages_RT, index, aggregation)
    return advantages_RT, advantages_RT


def register() -> None:
    """Register all estimators with verl, once per process."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    for name, whiten in (("lightning", False), ("lightning_whitened", True)):
        for aggregation, ending in AGGREGATIONS.items():
            if name + ending not in ADV_ESTIMATOR_REGISTRY:
                register_adv_est(name + ending)(functools.partial(estimate, whiten=whiten, aggregation=aggregation))
