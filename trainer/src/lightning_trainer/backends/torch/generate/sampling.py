"""Sample one token for each row of logits. Axes: B rows, V vocabulary.

One uniform number decides each sample (inverse of the cumulative distribution), so a request with its own generator
samples the same in any batch. Sums are computed in blocks of the vocabulary, without a cumulative sum over all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

_BLOCK = 256
_PIECE = 2**19  # weights that a CPU computes at once: they fit into its cache and need no new memory pages
_LEAST_TEMPERATURE = 1e-30  # below it logits / temperature overflow float32; there the likeliest token has all weight


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled; `uniform` is in [0, 1), `adjust` changes the logits before sampling."""

    temperature: float
    top_p: float
    top_k: int
    uniform: float
    min_p: float = 0.0
    adjust: Callable[[Tensor], Tensor] | None = None

    @property
    def truncates(self) -> bool:
        """Whether part of the vocabulary is cut off."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


# if the distribution differs from the policy's by more probability than this, the token is not a sample of the policy
STEERED = 0.01


class SampledTokens(NamedTuple):
    """The sampled tokens of all rows.

    Attributes:
        tokens: (B,) the tokens.
        logprobs: (B,) their natural log-probabilities under softmax(logits / temperature) over the whole vocabulary,
            before adjustments, top-p, top-k and min-p; at temperature 1 if the temperature is 0.
        steered: (B,) whether these changed the distribution by more than `STEERED` in total variation: the token is
            then not a sample of the policy, like one that a grammar forces.
    """

    tokens: list[int]
    logprobs: list[float]
    steered: list[bool]


def draw(logits_BV: Tensor, draws_B: Sequence[Draw]) -> SampledTokens:
    """Sample a token for each row.

    Args:
        logits_BV: (B, V) in any floating format; computed in float32.
        draws_B: (B,) how to sample.

    Raises:
        FloatingPointError: logits are not finite.
    """
    piece = len(draws_B) if logits_BV.is_cuda else max(1, _PIECE // logits_BV.shape[1])
    drawn = [
        _draw(logits_BV[first : first + piece], draws_B[first : first + piece])
        for first in range(0, len(draws_B), piece)
    ]
    return SampledTokens(*(list(chain.from_iterable(parts)) for parts in zip(*drawn, strict=True)))


def _draw(logits_BV: Tensor, draws_B: Sequence[Draw]) -> SampledTokens:
    device = logits_BV.device
    scaled_BV = logits_BV.float()
    temperatures = [max(draw.temperature, _LEAST_TEMPERATURE) if draw.temperature else 1.0 for draw in draws_B]
    if any(temperature != 1.0 for temperature in temperatures):
        scaled_BV = scaled_BV / torch.tensor(temperatures, device=device)[:, None]
    highest_B1 = scaled_BV.amax(-1, keepdim=True)
    weights_BV = _exp_in_blocks(scaled_BV, highest_B1)
    uniform_B = torch.tensor([draw.uniform for draw in draws_B], dtype=torch.float64, device=device)
    drawn_B, totals_B = _invert(weights_BV, uniform_B)
    if not bool(totals_B.isfinite().all()):
        raise FloatingPointError(
            "the model's logits are not finite: its weights have diverged (a smaller --learning-rate), or its numbers"
            " leave their format (--dtype float32)"
        )
    steered_B = [False] * len(draws_B)
    for row, how in enumerate(draws_B):
        if how.temperature == 0:
            drawn_B[row] = (logits_BV[row] if how.adjust is None else how.adjust(logits_BV[row])).argmax()
        elif how.adjust is not None or how.truncates:
            weights_V = weights_BV[row] if how.adjust is None else _weights(how.adjust(logits_BV[row]), how)
            drawn_B[row], share_W = _draw_truncated(weights_V, how)
            own_W = weights_BV[row, : len(share_W)].double() / totals_B[row]
            steered_B[row] = float((share_W[: len(own_W)] - own_W).abs().sum()) > 2 * STEERED
    chosen_B = scaled_BV.gather(1, drawn_B[:, None])[:, 0]
    logprobs_B = (chosen_B - highest_B1[:, 0]).double() - totals_B.log()
    return SampledTokens(drawn_B.tolist(), logprobs_B.clamp(max=0.0).tolist(), steered_B)


def _exp_in_blocks(scaled_BV: Tensor, highest_B1: Tensor) -> Tensor:
    """Return exp(scaled - highest), padded with zeros to whole blocks."""
    rows, vocabulary = scaled_BV.shape
    width = -(-vocabulary // _BLOCK) * _BLOCK
    weights = torch.zeros if width > vocabulary else torch.empty
    weights_BW = weights((rows, width), dtype=torch.float32, device=scaled_BV.device)
    torch.sub(scaled_BV, highest_B1, out=weights_BW[:, :vocabulary])
    weights_BW[:, :vocabulary].exp_()
    return weights_BW


def _invert(weights_BW: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the cumulative weight exceeds uniform * total: find the block, then the position in it.

    Returns:
        (B,) positions, always with a weight above 0, and (B,) totals in float64.
    """
    blocks_BCK = weights_BW.view(len(weights_BW), -1, _BLOCK)
    upto_BC = blocks_BCK.sum(-1).double().cumsum(-1)
    totals_B = upto_BC[:, -1]
    target_B1 = (uniform_B * totals_B)[:, None]
    block_B1 = torch.searchsorted(upto_BC, target_B1, right=True).clamp_(max=upto_BC.shape[1] - 1)
    before_B1 = torch.where(block_B1 > 0, upto_BC.gather(1, (block_B1 - 1).clamp(min=0)), 0.0)
    block_BK = blocks_BCK[torch.arange(len(weights_BW), device=weights_BW.device), block_B1[:, 0]]
    within_BK = block_BK.double().cumsum(-1)
    # A block's sum in float32 may differ from the float64 sum of its weights: never go past the last weight above 0.
    last_B1 = torch.searchsorted(within_BK, within_BK[:, -1:].contiguous())
    place_B1 = torch.searchsorted(within_BK, target_B1 - before_B1, right=True).minimum(last_B1)
    return (block_B1 * _BLOCK + place_B1)[:, 0], totals_B


def _weights(logits_V: Tensor, how: Draw) -> Tensor:
    """Return the weights of a request's adjusted logits, scaled so that the heaviest is 1."""
    scaled_V = logits_V.float() / max(how.temperature, _LEAST_TEMPERATURE)
    return (scaled_V - scaled_V.max()).exp()


def _draw_truncated(weights_W: Tensor, how: Draw) -> tuple[int, Tensor]:
    """Sample from the `top_k` heaviest tokens, and of these from the smallest set that has `top_p` of their weight.

    The heaviest weight is 1, so weights below `min_p` are those that are removed first.

    Returns:
        The sampled position, and (W,) the probability of each.
    """
    if how.min_p:
        weights_W = torch.where(weights_W >= how.min_p, weights_W, 0.0)
    if how.top_k:
        sorted_W, places_W = weights_W.topk(min(how.top_k, len(weights_W)))
    else:
        sorted_W, places_W = weights_W.sort(descending=True, stable=True)
    upto_W = sorted_W.double().cumsum(-1)
    kept = int(torch.searchsorted(upto_W, how.top_p * upto_W[-1:])) + 1
    kept = min(kept, int((sorted_W > 0).sum()))
    upto_W = upto_W[:kept]
    place = int(torch.searchsorted(upto_W, how.uniform * upto_W[-1:], right=True))
    share_W = torch.zeros(len(weights_W), dtype=torch.float64, device=weights_W.device)
    share_W[places_W[:kept]] = sorted_W[:kept].double() / upto_W[-1]
    return int(places_W[min(place, kept - 1)]), share_W
