"""Log-probabilities of chosen tokens from hidden states, holding the logits of a few places at a time.

Axes: U places, V vocabulary, P chosen tokens (several may share a place).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_PLACES = 256  # number of places whose logits are computed at once: 50 MB of float32 for a vocabulary of 50,000
_KEPT = 2**28  # bytes of logits that the backward pass may keep; if it needs more, it recomputes them


def chosen_logprobs(
    head: nn.Module,
    hidden_UH: Tensor,
    temperature_U: Tensor,
    place_P: NDArray[np.int64],
    target_P: NDArray[np.int64],
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities under softmax(head(hidden) / temperature), with gradient.

    Args:
        head: maps hidden states to logits.
        hidden_UH: (U, width) hidden states of the places.
        temperature_U: (U,) divisor of each place's logits.
        place_P: (P,) each chosen token's place.
        target_P: (P,) each chosen token.

    Returns:
        (P,) log-probabilities and (U,) entropies in nats, float32, both with gradient.
    """
    device = hidden_UH.device
    order_P = np.argsort(place_P, kind="stable")
    sorted_P = place_P[order_P]
    logprobs, entropies = [], []
    again = False
    for start in range(0, len(hidden_UH), _PLACES):
        end = min(start + _PLACES, len(hidden_UH))
        low, high = np.searchsorted(sorted_P, (start, end))
        place = torch.from_numpy(sorted_P[low:high] - start).to(device)
        target = torch.from_numpy(target_P[order_P[low:high]]).to(device)
        inputs = (head, hidden_UH[start:end], temperature_U[start:end], place, target)
        chosen, entropy = checkpoint(_choose, *inputs, use_reentrant=False) if again else _choose(*inputs)
        again = torch.is_grad_enabled() and _logit_bytes(head, hidden_UH) > _KEPT
        logprobs.append(chosen)
        entropies.append(entropy)
    back_P = torch.from_numpy(np.argsort(order_P)).to(device)
    return torch.cat(logprobs)[back_P], torch.cat(entropies)


def _logit_bytes(head: nn.Module, hidden_UH: Tensor) -> int:
    vocabulary = max((len(parameter) for parameter in head.parameters()), default=0)
    return len(hidden_UH) * vocabulary * hidden_UH.element_size()


def _choose(
    head: nn.Module, hidden_UH: Tensor, temperature_U: Tensor, place_P: Tensor, target_P: Tensor
) -> tuple[Tensor, Tensor]:
    return _TokenLogprobs.apply(head(hidden_UH), temperature_U, place_P, target_P)  # type: ignore[no-untyped-call,no-any-return]


class _TokenLogprobs(torch.autograd.Function):
    """Computes `losses.token_logprobs` and `losses.entropy`, keeping the logits only in their own format."""

    @staticmethod
    def forward(
        ctx: Any, logits_UV: Tensor, temperature_U: Tensor, place_P: Tensor, target_P: Tensor
    ) -> tuple[Tensor, Tensor]:
        scaled_UV = logits_UV.float() / temperature_U[:, None]
        highest_U = scaled_UV.amax(-1)
        scaled_UV -= highest_U[:, None]
        weights_UV = scaled_UV.exp()
        total_U = weights_UV.sum(-1)
        entropy_U = total_U.log() - torch.linalg.vecdot(weights_UV, scaled_UV) / total_U
        ctx.save_for_backward(logits_UV, temperature_U, highest_U + total_U.log(), entropy_U, place_P, target_P)
        ctx.set_materialize_grads(False)  # most losses have no entropy term, and pay nothing for it
        return scaled_UV[place_P, target_P] - total_U.log()[place_P], entropy_U

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits_UV, temperature_U, normaliser_U, entropy_U, place_P, target_P = ctx.saved_tensors
        chosen_P, entropies_U = gradients
        logprobs_UV = (logits_UV.float() / temperature_U[:, None]).sub_(normaliser_U[:, None])
        factor_UV: Tensor | float = 0.0
        if entropies_U is not None:  # dH / dlogit = -p (log p + H)
            factor_UV = (logprobs_UV + entropy_U[:, None]).mul_(-entropies_U[:, None])
        if chosen_P is not None:
            summed_U = torch.zeros_like(normaliser_U).index_add_(0, place_P, chosen_P)
            factor_UV = factor_UV - summed_U[:, None]
        change_UV = logprobs_UV.exp_().mul_(factor_UV)
        if chosen_P is not None:
            change_UV.index_put_((place_P, target_P), chosen_P, accumulate=True)
        change_UV /= temperature_U[:, None]
        return change_UV.to(logits_UV.dtype), None, None, None
