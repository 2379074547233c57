"""Losses: pure functions on float32 tensors, one entry for each trained token.

Axis `_T`: the trained tokens of a micro-batch, row after row; tokens that the policy did not sample are not in it, so
they get no gradient. `_V`: the vocabulary. Sums are weighted by `rows.token_weights`, computed for the whole batch.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_trainer.choices import Divergence

# kl, mse, low_var_kl and low_var are verl's and others' names of k1, k2 and k3; + uses the gradient of k2 instead.
Estimator: TypeAlias = Literal[
    "k1",
    "k2",
    "k3",
    "abs",
    "kl",
    "mse",
    "low_var_kl",
    "low_var",
    "k1+",
    "k3+",
    "abs+",
    "kl+",
    "low_var_kl+",
    "low_var+",
]

_MAX_LOG_RATIO = 20.0  # exp(20) is far outside any clip range and finite in float32; verl clamps at the same value
_MAX_SEQUENCE_LOG_RATIO = 10.0  # of GSPO's mean log-ratio; verl's value
_LEAST_LOGPROB = -50.0
_LEAST_TAIL = 1e-7  # a float32 sum of 1 is not more precise than this
_MAX_LOW_VARIANCE = 10.0  # nats of one token's k3, which grows exponentially; verl's value


class PolicyLoss(NamedTuple):
    """The loss of a micro-batch, and what to monitor.

    Attributes:
        loss: () its part of the batch's loss: add them up.
        ratios: (T,) probability now over probability when sampled, without gradient.
        clipped: (T,) True if the clip decided, so that the token has no gradient.
    """

    loss: Tensor
    ratios: Tensor
    clipped: Tensor


def likelihood_loss(logprobs_T: Tensor, advantages_T: Tensor, weights_T: Tensor) -> PolicyLoss:
    """Return - sum of w A log p; with A = 1 the cross-entropy. It has no ratio to older weights, so nothing is clipped.

    Args:
        logprobs_T: (T,) under the weights being trained, with gradient.
        advantages_T: (T,) weight of each token.
        weights_T: (T,) from `rows.token_weights`.
    """
    import torch

    loss = -(weights_T * advantages_T * logprobs_T).sum()
    return PolicyLoss(loss, torch.ones_like(weights_T), torch.zeros_like(weights_T, dtype=torch.bool))


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


def gspo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    sequence_T: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> PolicyLoss:
    """Clip the ratio of whole responses instead of tokens: GSPO, arXiv 2507.18071, equations 5 and 7.

    s_i = exp(mean over the response's tokens of new - old), and the loss is - w min(s A, clip(s) A). Written for tokens
    as in section 4.3 of the paper, s_it = sg(s_i) exp(new - sg(new)), so that advantages may differ within a response.

    Args:
        logprobs_T: as in `policy_loss`.
        old_logprobs_T: likewise.
        advantages_T: likewise.
        weights_T: likewise; the paper's are those of ``sequence-mean``.
        sequence_T: (T,) number of the response of each token, from 0. All tokens of a response are in the micro-batch.
        clip_low: how far below 1 the ratio may go; responses differ far less than tokens (section 5.1).
        clip_high: how far above 1.
    """
    now_T, advantages_T, sequence_T = logprobs_T.float(), advantages_T.float(), sequence_T.long()
    log_ratio_T = (now_T - old_logprobs_T.float()).detach()
    count = int(sequence_T.max()) + 1 if len(sequence_T) else 0
    sums_S = torch.zeros(count, device=now_T.device).index_add_(0, sequence_T, log_ratio_T)
    tokens_S = torch.zeros(count, device=now_T.device).index_add_(0, sequence_T, torch.ones_like(log_ratio_T))
    mean_T = (sums_S / tokens_S.clamp(min=1.0))[sequence_T]
    ratio_T = (now_T - now_T.detach() + mean_T).clamp(max=_MAX_SEQUENCE_LOG_RATIO).exp()
    free_T = -ratio_T * advantages_T
    held_T = -ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_T
    loss = (weights_T.float() * torch.maximum(free_T, held_T)).sum()
    return PolicyLoss(loss, ratio_T.detach(), held_T > free_T)


def cispo_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    weights_T: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 0.28,
) -> PolicyLoss:
    """Clip the weight of a token and keep its gradient: CISPO of MiniMax-M1, arXiv 2506.13585, equations 4 and 5.

    - sum of w * sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * log p. A token outside the clip range still learns, with
    the weight of the range's edge; `PolicyLoss.clipped` says where. The paper sets no lower bound: clip_low >= 1.

    Args:
        logprobs_T: as in `policy_loss`.
        old_logprobs_T: likewise.
        advantages_T: likewise.
        weights_T: likewise; the paper's are those of ``token-mean``.
        clip_low: how far below 1 a weight may go.
        clip_high: how far above 1.
    """
    now_T = logprobs_T.float()
    log_ratio_T = (now_T - old_logprobs_T.float()).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp().detach()
    clipped_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -(weights_T.float() * clipped_T * advantages_T.float() * now_T).sum()
    return PolicyLoss(loss, ratio_T, clipped_T != ratio_T)


def importance_weights(
    log_ratio_T: Tensor, *, cap: float | None = None, mask: float | None = None, moment: float | None = None
) -> Tensor:
    """Weight tokens that were sampled by older weights, or by an engine that computes slightly differently.

    Args:
        log_ratio_T: (T,) of a whole batch: log-probability under the learning weights, before the update, minus the one
            recorded when the token was sampled.
        cap: weight each token by the ratio, at most by this: truncated importance sampling, Yao et al., "Your efficient
            RL framework secretly brings you off-policy RL training", 2025.
        mask: leave out tokens whose ratio is above this or below its inverse.
        moment: leave out tokens as `second_moment_mask` does, and without a cap weight the others by their ratio.

    Returns:
        (T,) factors of the tokens' weights in the loss.
    """
    weights_T = torch.ones_like(log_ratio_T)
    if cap is not None or moment is not None:
        weights_T = log_ratio_T.clamp(max=_MAX_LOG_RATIO if cap is None else math.log(cap)).exp()
    if mask is not None:
        weights_T = weights_T * (log_ratio_T.abs() <= math.log(mask))
    return weights_T if moment is None else weights_T * second_moment_mask(log_ratio_T, moment)


def second_moment_mask(log_ratio_T: Tensor, bound: float) -> Tensor:
    """Mark the tokens that stay so that the mean of squared log-ratios is at most `bound` (M2PO, arXiv 2510.01161).

    The tokens with the largest squares are removed first, and no more than necessary. The mean is over those that stay.

    Args:
        log_ratio_T: as in `importance_weights`.
        bound: most that the mean may be, such as 0.04.

    Returns:
        (T,) True if a token stays.
    """
    squares_T, order_T = log_ratio_T.double().square().sort(stable=True)
    means_T = squares_T.cumsum(0) / torch.arange(1, len(squares_T) + 1, device=squares_T.device)
    kept_T = torch.zeros_like(order_T, dtype=torch.bool)
    kept_T[order_T[means_T <= bound]] = True  # means of increasing numbers increase, so these are the smallest
    return kept_T


def value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, weights_T: Tensor, *, clip: float | None = None
) -> Tensor:
    """Squared error of the value head: 0.5 * sum of w * max((V - R)**2, (V_clipped - R)**2).

    V_clipped is V held within `clip` of what it was before the update, as PPO's first implementation has it
    (arXiv 2005.12729, section 3). Never less than the plain error, so that clipping can't hide one.

    Args:
        values_T: (T,) values now, with gradient.
        old_values_T: (T,) values before the update.
        returns_T: (T,) their targets, from `advantages.generalised_advantages`.
        weights_T: (T,) from `rows.token_weights`.
        clip: how far a value may move in an update; None: as far as it likes.
    """
    values_T, returns_T = values_T.float(), returns_T.float()
    errors_T = (values_T - returns_T).square()
    if clip is not None:
        held_T = torch.clamp(values_T, old_values_T.float() - clip, old_values_T.float() + clip)
        errors_T = torch.maximum(errors_T, (held_T - returns_T).square())
    return 0.5 * (weights_T.float() * errors_T).sum()


def kl_divergence(logprobs_T: Tensor, reference_T: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Estimate KL(policy || reference) at each sampled token (Schulman, "Approximating KL divergence", 2020).

    With d = log policy - log reference: k1 = d (verl: kl), unbiased and noisy, and without expected gradient: for the
    reward, or for watching; k2 = d**2 / 2 (mse), whose gradient is that of the divergence; k3 = exp(-d) - 1 + d
    (low_var_kl, low_var), unbiased and never negative, the one in GRPO's paper (arXiv 2402.03300, equation 4), held
    below 10 nats as in verl; abs = |d|. A name with + has the value of that estimator and the gradient of k2.

    Returns:
        (T,) estimates in nats.

    Raises:
        ValueError: the estimator's name is unknown.
    """
    difference_T = logprobs_T.float() - reference_T.float()
    square_T = 0.5 * difference_T.square()
    match estimator.removesuffix("+"):
        case "k1" | "kl":
            value_T = difference_T
        case "k2" | "mse":
            return square_T
        case "k3" | "low_var_kl" | "low_var":
            held_T = difference_T.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            value_T = (torch.exp(-held_T) - 1.0 + held_T).clamp(max=_MAX_LOW_VARIANCE)
        case "abs":
            value_T = difference_T.abs()
        case _:
            raise ValueError(f"unknown estimator {estimator!r}. Use k1, k2, k3 or abs, or one of these with a +.")
    return square_T - square_T.detach() + value_T.detach() if estimator.endswith("+") else value_T


def candidate_divergence(logprobs_TC: Tensor, teacher_TC: Tensor, kind: Divergence = "reverse") -> Tensor:
    """Divergence of the policy's next-token distribution from a teacher's, over candidates and all else as one more.

    The logit-level loss of SDPO (arXiv 2601.20802): over the K tokens that the policy finds likeliest, and a tail for
    the probability that is left. With p of the policy and q of the teacher, reverse is sum of p log(p / q), forward sum
    of q log(q / p), and jensen-shannon the mean of the divergences of both from their mean. With all tokens of the
    vocabulary as candidates it is the divergence itself; with fewer a lower bound of it.

    Args:
        logprobs_TC: (T, C) log-probabilities under the weights being trained, with gradient.
        teacher_TC: (T, C) the teacher's of the same tokens; it gets no gradient.
        kind: which divergence.

    Returns:
        (T,) divergences in nats.

    Raises:
        ValueError: the kind is unknown.
    """
    log_p_TC, log_q_TC = _with_tail(logprobs_TC), _with_tail(teacher_TC.detach())
    match kind:
        case "reverse":
            return _divergence(log_p_TC, log_q_TC)
        case "forward":
            return _divergence(log_q_TC, log_p_TC)
        case "jensen-shannon":
            log_m_TC = torch.logaddexp(log_p_TC, log_q_TC) - math.log(2.0)
            return 0.5 * (_divergence(log_p_TC, log_m_TC) + _divergence(log_q_TC, log_m_TC))
    raise ValueError(f"unknown divergence {kind!r}. Use reverse, forward or jensen-shannon.")


def _divergence(log_p_TC: Tensor, log_q_TC: Tensor) -> Tensor:
    return (log_p_TC.exp() * (log_p_TC - log_q_TC)).sum(-1)


def _with_tail(logprobs_TC: Tensor) -> Tensor:
    """(T, C + 1) log-probabilities, the last one of all other tokens together."""
    held_TC = logprobs_TC.float().clamp(min=_LEAST_LOGPROB)  # 0 * inf for an impossible token is not a number
    rest_T = (1.0 - held_TC.exp().sum(-1, keepdim=True)).clamp(min=_LEAST_TAIL)
    return torch.cat([held_TC, rest_T.log()], dim=-1)


def token_logprobs(logits_TV: Tensor, tokens_T: Tensor, temperature_T: Tensor | float = 1.0) -> Tensor:
    """(T,) natural log-probability of each token under softmax(logits / temperature), in float32."""
    scaled_TV = _scale_logits(logits_TV, temperature_T)
    return torch.log_softmax(scaled_TV, dim=-1).gather(-1, tokens_T.long()[:, None]).squeeze(-1)


def entropy(logits_TV: Tensor, temperature_T: Tensor | float = 1.0) -> Tensor:
    """(T,) entropy in nats of softmax(logits / temperature), in float32.

    The bonus of PPO (arXiv 1707.06347, equation 9) subtracts its weighted sum from the loss.
    """
    logprobs_TV = torch.log_softmax(_scale_logits(logits_TV, temperature_T), dim=-1)
    return -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def _scale_logits(logits_TV: Tensor, temperature_T: Tensor | float) -> Tensor:
    logits_TV = logits_TV.float()
    if isinstance(temperature_T, Tensor):
        return logits_TV / temperature_T.float()[:, None]
    return logits_TV if temperature_T == 1.0 else logits_TV / temperature_T
