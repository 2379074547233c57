"""Advantage estimators under our names, for what verl's own get wrong when a rollout has several rows.

verl compares rows: a rollout of five rows counts five times in its group, and agents that do different things are
compared with each other. Here each rollout counts once and each agent is compared with itself: that is decided where
groups are collected, by the same `lightning_trainer.advantages` that the torch backend uses, and only laid out here.

Axes: `_R` rows, `_T` tokens of the longest response.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_trainer.backends.verl.encoding import decode
from lightning_trainer.backends.verl.overrides import PER_RESPONSE

_EPSILON = 1e-8  # as in verl's own whitening


def laid_out(uids: Sequence[str], mask_RT: Tensor) -> Tensor:
    """(R, T) float32: the advantage of its call at each token that counts, 0 elsewhere."""
    out_RT = torch.zeros(mask_RT.shape, dtype=torch.float32)
    for out_T, uid in zip(out_RT, uids, strict=True):
        for start, length, advantage in decode(uid):
            out_T[start : start + length] = advantage
    return out_RT.to(mask_RT.device) * mask_RT


def whitened(values_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """Centre values on their mean over all tokens of the batch, and divide by their deviation.

    REINFORCE++ (arXiv 2501.03262) with the return of a call at each of its tokens.
    """
    mask_RT = mask_RT.to(values_RT.dtype)
    tokens = mask_RT.sum().clamp(min=1)
    centred_RT = (values_RT - (values_RT * mask_RT).sum() / tokens) * mask_RT
    deviation = (centred_RT.square().sum() / tokens).sqrt()
    return centred_RT / (deviation + _EPSILON)


def per_response(advantages_RT: Tensor, uids: Sequence[str]) -> Tensor:
    """Weigh advantages so that verl's mean over tokens gives every response the same weight.

    A token's weight becomes 1 / (responses * length of its response), once verl has divided by the number of tokens;
    the weight is positive, so clipping decides the same.
    """
    spans_R = [decode(uid) for uid in uids]
    lengths = [span.length for spans in spans_R for span in spans]
    out_RT = torch.zeros_like(advantages_RT)
    for out_T, advantages_T, spans in zip(out_RT, advantages_RT, spans_R, strict=True):
        for start, length, _ in spans:
            place = slice(start, start + length)
            out_T[place] = advantages_T[place] * (sum(lengths) / (len(lengths) * length))
    return out_RT


def estimate(
    *, response_mask: Tensor, index: Sequence[str], whiten: bool, weigh: bool, **_: Any
) -> tuple[Tensor, Tensor]:
    """Give advantages and returns as verl's trainer asks for them; `index` holds the rows' field `uid`."""
    advantages_RT = laid_out(index, response_mask)
    if whiten:
        advantages_RT = whitened(advantages_RT, response_mask)
    if weigh:
        advantages_RT = per_response(advantages_RT, index)
    return advantages_RT, advantages_RT


def register() -> None:
    """Register all of them with verl, once in a process."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    for name, whiten in (("lightning", False), ("lightning_whitened", True)):
        for ending, weigh in (("", False), (PER_RESPONSE, True)):
            if name + ending not in ADV_ESTIMATOR_REGISTRY:
                register_adv_est(name + ending)(functools.partial(estimate, whiten=whiten, weigh=weigh))
