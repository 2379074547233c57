"""Draw one token for each row of logits. Axes: B rows, V vocabulary.

One uniform number decides each draw (inverse of the cumulative distribution), so a request with its own generator draws
the same whatever it is batched with. Sums go by blocks of the vocabulary: no cumulative sum runs over all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 256


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn; `uniform` lies in [0, 1), `adjust` changes the logits that it is drawn from."""

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


def draw(logits_BV: Tensor, draws_B: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """Draw a token for each row.

    Args:
        logits_BV: (B, V) in any floating format; computed in float32.
        draws_B: (B,) how.

    Returns:
        (B,) tokens, and (B,) their natural log-probabilities under softmax(logits / temperature) over the whole
        vocabulary, before adjustments, top-p, top-k and min-p; under temperature 1 where the temperature is 0.
    """
    device = logits_BV.device
    scaled_BV = logits_BV.float()
    temperatures = [draw.temperature or 1.0 for draw in draws_B]
    if any(temperature != 1.0 for temperature in temperatures):
        scaled_BV = scaled_BV / torch.tensor(temperatures, device=device)[:, None]
    highest_B1, greedy_B1 = scaled_BV.max(-1, keepdim=True)
    weights_BV = _exp_in_blocks(scaled_BV, highest_B1)
    uniform_B = torch.tensor([draw.uniform for draw in draws_B], dtype=torch.float64, device=device)
    drawn_B, totals_B = _invert(weights_BV, uniform_B)
    for row, how in enumerate(draws_B):
        if how.adjust is not None:
            drawn_B[row] = _draw_adjusted(how.adjust(logits_BV[row]), how)
        elif how.temperature == 0:
            drawn_B[row] = greedy_B1[row, 0]
        elif how.truncates:
            drawn_B[row] = _draw_truncated(weights_BV[row], how)
    chosen_B = scaled_BV.gather(1, drawn_B[:, None])[:, 0]
    logprobs_B = (chosen_B - highest_B1[:, 0]).double() - totals_B.log()
    return drawn_B.tolist(), logprobs_B.clamp(max=0.0).tolist()


def _exp_in_blocks(scaled_BV: Tensor, highest_B1: Tensor) -> Tensor:
    """Give exp(scaled - highest), filled up with zeros to whole blocks."""
    rows, vocabulary = scaled_BV.shape
    width = -(-vocabulary // _BLOCK) * _BLOCK
    weights = torch.zeros if width > vocabulary else torch.empty
    weights_BW = weights((rows, width), dtype=torch.float32, device=scaled_BV.device)
    torch.sub(scaled_BV, highest_B1, out=weights_BW[:, :vocabulary])
    weights_BW[:, :vocabulary].exp_()
    return weights_BW


def _invert(weights_BW: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """Find where the cumulative weight passes uniform * total: first the block, then the place in it.

    Returns:
        (B,) places, always of a weight above 0, and (B,) totals in float64.
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


def _draw_adjusted(logits_V: Tensor, how: Draw) -> int:
    """Draw from logits of a request's own."""
    if how.temperature == 0:
        return int(logits_V.argmax())
    scaled_V = logits_V / how.temperature
    return _draw_truncated((scaled_V - scaled_V.max()).exp(), how)


def _draw_truncated(weights_W: Tensor, how: Draw) -> int:
    """Draw among the `top_k` heaviest, and of these among the smallest set that has `top_p` of their weight.

    The heaviest weight is 1, so weights below `min_p` are those that fall out before.
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
    return int(places_W[min(place, kept - 1)])
