"""Attention over packed rows with torch's own kernels, used if flash-attn is not installed.

verl packs the rows of a micro-batch into one sequence without padding, with positions that restart at each row. Only
the attention must know this: here each row attends only to itself, by `torch.nn.attention.varlen` on GPUs and row by
row otherwise. transformers' own `sdpa` would compute the scores of all pairs of tokens in the pack and mask most of
them.

Axes: T tokens of all rows, H heads, D width of a head.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, cast

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from lightning_trainer.backends.verl.options.packing import PACKED_ROWS

logger = logging.getLogger(__name__)
_Parts: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys and values


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The bounds of the rows in a pack.

    Attributes:
        positions: from which they were read.
        ends: (rows + 1,) int32: 0, then the end of each row.
        lengths: of the rows.
    """

    positions: torch.Tensor
    ends: torch.Tensor
    lengths: list[int]


_last: list[_Rows] = []  # of the current micro-batch: all layers have the same


def _rows_of(positions: torch.Tensor) -> _Rows:
    """Read the rows from (1, T) positions, once for all layers."""
    if not _last or _last[0].positions is not positions:
        starts = (positions[0] == 0).nonzero()[:, 0]
        ends = torch.cat([starts, starts.new_tensor([positions.shape[1]])]).to(torch.int32)
        _last[:] = [_Rows(positions, ends, ends.diff().tolist())]
    return _last[0]


def attend_packed(
    module: torch.nn.Module,  # noqa: ARG001 - transformers' signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return (1, T, H, D) the attention output of each token over its own row, as transformers' functions do.

    Args:
        module: the layer; unused.
        query: (1, H, T, D).
        key: likewise, with as many heads or fewer.
        value: as `key`.
        attention_mask: must be None; padded rows, which have a mask, are not supported.
        position_ids: (1, T) positions of the tokens in their rows.
        scaling: of the scores; None: one over the root of D.
        sliding_window: tokens that a token sees, including itself; None: all before it.

    Raises:
        ValueError: the rows are padded.
    """
    if position_ids is None or query.shape[0] != 1 or attention_mask is not None:
        raise ValueError(
            f"attn_implementation = {PACKED_ROWS} is for packed rows. Leave use_remove_padding and attn_implementation"
            " out of the table verl, or set use_remove_padding = false and attn_implementation = sdpa."
        )
    rows = _rows_of(position_ids)
    fast = query.is_cuda and kernel_works(query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3])
    attend = _attend_at_once if fast else _attend_by_row
    return attend((query, key, value), rows, scaling, sliding_window)[None], None


@cache
def kernel_works(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int) -> bool:
    """Whether torch's kernel gives the results and gradients of separate rows, tested once on two short rows."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    random = torch.Generator(device).manual_seed(0)
    shapes = [(1, count, 12, width) for count in (heads, key_heads, key_heads)]
    parts = [torch.randn(*s, generator=random, device=device, dtype=dtype, requires_grad=True) for s in shapes]
    ends = torch.tensor([0, 5, 12], device=device, dtype=torch.int32)
    rows = _Rows(ends, ends, [5, 7])
    found = []
    try:
        with torch.enable_grad():
            for attend in (_attend_at_once, _attend_by_row):
                attended = attend((parts[0], parts[1], parts[2]), rows, None, None)
                found.append([attended, *torch.autograd.grad(attended.float().square().sum(), parts)])
        wrong = next((torch.dist(*pair).detach() for pair in zip(*found, strict=True) if not _are_close(*pair)), None)
        reason = "" if wrong is None else f"its results differ by {float(wrong):.3g}"
    except (RuntimeError, TypeError, ImportError) as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        logger.warning("torch's packed attention does not work on %s (%s): computing row by row", device, reason)
    return not reason


def _are_close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left.float(), right.float(), atol=0.05, rtol=0.05)


def _attend_at_once(parts: _Parts, rows: _Rows, scale: float | None, window: int | None) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Later versions of torch require this if keys have fewer heads; earlier ones lack the parameter but allow it.
    grouped: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    query, key, value = (each[0].transpose(0, 1).contiguous() for each in parts)
    ends, longest = rows.ends, max(rows.lengths)
    sides = (-1 if window is None or window > longest else window - 1, 0)
    attended: Any = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scale, window_size=sides, **grouped
    )
    return cast(torch.Tensor, attended)


def _attend_by_row(parts: _Parts, rows: _Rows, scale: float | None, window: int | None) -> torch.Tensor:
    by_row = zip(*(torch.split(each, rows.lengths, dim=2) for each in parts), strict=True)
    attended = [
        scaled_dot_product_attention(
            own_query, own_key, own_value, attn_mask=_window_mask(own_query, window), scale=scale,
            is_causal=window is None or window >= own_query.shape[2], enable_gqa=True,
        )
        for own_query, own_key, own_value in by_row
    ]  # fmt: skip
    return torch.cat(attended, dim=2)[0].transpose(0, 1).contiguous()


def _window_mask(query: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Return which tokens each token of a row sees; None if it sees all before it."""
    length = query.shape[2]
    if window is None or window >= length:
        return None
    behind = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
    return (behind >= 0) & (behind < window)


def register() -> None:
    """Register packed attention with transformers as an ``attn_implementation``."""
    AttentionInterface.register(PACKED_ROWS, attend_packed)
