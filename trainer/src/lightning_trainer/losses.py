"""Losses: pure functions on float32 tensors, one entry for each trained token.

Axis `_T`: the trained tokens of a micro-batch, row after row; tokens that the policy did not sample are not in it, so
they get no gradient. `_V`: the vocabulary. Sums are weighted by `rows.token_weights`, made for the whole batch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

Estimator: TypeAlias = Literal["k1", "k2", "k3"]

_MAX_LOG_RATIO = 20.0  # exp(20) is far outside any clip range and finite in float32; verl clamps at the same value


class PolicyLoss(NamedTuple):
    """The loss of a micro-batch, and what is worth watching.

    Attributes:
        loss: () its part of the batch's loss: add them up.
        ratios: (T,) probability now over probability when sampled, without gradient.
        clipped: (T,) True where the clip decided, so that the token has no gradient.
    """

    loss: Tensor
    ratios: Tensor
    clipped: Tensor


def policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    clip_dual: float | None = None,
) -> PolicyLoss:
    """Clipped policy gradient: - sum of w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(new - old).

    PPO, arXiv 1707.06347, equation 7; clip_high above clip_low is clip-higher of DAPO, arXiv 2503.14476, equation 10.

    Args:
        logprobs_T: (T,) log-probabilities under the weights being trained, with gradient.
        old_logprobs_T: (T,) log-probabilities recorded when sampled.
        advantages_T: (T,) advantages.
        weights_T: (T,) from `rows.token_weights`.
        clip_low: how far below 1 the ratio may push a token's probability.
        clip_high: how far above 1.
        clip_dual: where the advantage is negative, the most a ratio may weigh (dual clip, arXiv 1912.09729); above 1.
            None: no such bound.
    """
    log_ratio_T = (logprobs_T.float() - old_logprobs_T.float()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio_T, advantages_T = log_ratio_T.exp(), advantages_T.float()
    free_T = -ratio_T * advantages_T
    held_T = -ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    terms_T, clipped_T = torch.maximum(free_T, held_T), held_T > free_T
    if clip_dual is not None:
        bound_T = -clip_dual * advantages_T
        beyond_T = (advantages_T < 0) & (terms_T > bound_T)
        terms_T, clipped_T = torch.where(beyond_T, bound_T, terms_T), clipped_T | beyond_T
    return PolicyLoss((weights_T.float() * terms_T).sum(), ratio_T.detach(), clipped_T)


def kl_divergence(logprobs_T: Tensor, reference_T: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Estimate KL(policy || reference) at each sampled token (Schulman, "Approximating KL divergence", 2020).

    With d = log policy - log reference: k1 = d, unbiased and noisy, and without expected gradient, so for watching
    only; k2 = d**2 / 2, whose gradient is that of the divergence; k3 = exp(-d) - 1 + d, unbiased, never negative, the
    one in GRPO's paper (arXiv 2402.03300, equation 4).

    Returns:
        (T,) estimates in nats.

    Raises:
        ValueError: the estimator's name is unknown.
    """
    difference_T = (logprobs_T.float() - reference_T.float()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return difference_T
        case "k2":
            return 0.5 * difference_T.square()
        case "k3":
            return torch.exp(-difference_T) - 1.0 + difference_T
    raise ValueError(f"unknown estimator {estimator!r}. Use k1, k2 or k3.")


def token_logprobs(logits_TV: Tensor, tokens_T: Tensor, temperature_T: Tensor | float = 1.0) -> Tensor:
    """(T,) natural log-probability of each token under softmax(logits / temperature), in float32."""
    scaled_TV = _scaled(logits_TV, temperature_T)
    return torch.log_softmax(scaled_TV, dim=-1).gather(-1, tokens_T.long()[:, None]).squeeze(-1)


def entropy(logits_TV: Tensor, temperature_T: Tensor | float = 1.0) -> Tensor:
    """(T,) entropy in nats of softmax(logits / temperature), in float32."""
    logprobs_TV = torch.log_softmax(_scaled(logits_TV, temperature_T), dim=-1)
    return -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def _scaled(logits_TV: Tensor, temperature_T: Tensor | float) -> Tensor:
    logits_TV = logits_TV.float()
    if isinstance(temperature_T, Tensor):
        return logits_TV / temperature_T.float()[:, None]
    return logits_TV if temperature_T == 1.0 else logits_TV / temperature_T
