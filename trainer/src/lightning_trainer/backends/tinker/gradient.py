"""How far each token's log-probability should move, from rows and the current log-probabilities. Uses no server.

The gradient of a loss L with respect to the weights is the sum over tokens of dL/dlogp times the gradient of logp. The
losses are those of every backend; here they give dL/dlogp, and the server does the rest.

Axes: P trained tokens of several rows, K of one row; N predicted tokens of a row, one fewer than its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch.learn.update import token_factors
from lightning_trainer.backends.torch.options import TorchOptions
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.algorithms.protocol import Clip, TrainedTokens
from lightning_trainer.rl.losses import kl_divergence
from lightning_trainer.rl.rows import Row

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Read:
    """A row with the known values of its trained tokens, all (K,) float32.

    Attributes:
        row: the row.
        weights: of each token in the loss of the step.
        old: log-probabilities that ratios compare with.
        reference: log-probabilities under the starting policy; None if there is no KL term.
    """

    row: Row
    weights: Floats
    old: Floats
    reference: Floats | None = None


def token_gradients(
    parts: Sequence[Read], now: Sequence[Floats], options: TorchOptions
) -> tuple[list[Floats], dict[str, float]]:
    """Return for each row (K,) minus the derivative of the loss by the log-probability, and sums for the metrics.

    Args:
        parts: rows of one optimiser step.
        now: for each (K,) log-probabilities under the current weights.
        options: loss, clip range and divergence.
    """
    logprobs_P = _concatenate(now).requires_grad_()
    old_P, recorded_P = (
        _concatenate([part.old for part in parts]),
        _concatenate([_own(part.row.logprobs, part) for part in parts]),
    )
    weights_P = _concatenate([part.weights for part in parts])
    lengths = torch.tensor([length for part in parts for length in part.row.lengths])
    tokens = TrainedTokens(
        logprobs_P,
        old_P,
        _concatenate([_own(part.row.advantages, part) for part in parts]),
        weights_P,
        torch.arange(len(lengths)).repeat_interleave(lengths),
    )
    clip = Clip(options.clip_low, options.clip_high, options.clip_dual)
    result = algorithm_by_name(options.algorithm).policy_loss(tokens, clip)
    loss = result.loss
    known = [part.reference for part in parts if part.reference is not None]
    in_loss = bool(known) and options.kl_in == "loss"
    base_P = _concatenate(known) if known else recorded_P
    kl_P = kl_divergence(logprobs_P, base_P, options.kl_estimator if in_loss else "k3")
    if in_loss:
        loss = loss + options.kl_coef * (weights_P * kl_P).sum()
    (slope_P,) = torch.autograd.grad(loss, logprobs_P)
    now_P = logprobs_P.detach()
    watched = {
        "loss": float(loss.detach() if not in_loss else result.loss.detach()),
        "clip_fraction": float(result.clipped.sum()),
        "kl": float(kl_P.detach().sum()),
        "logprob_gap": float((now_P - recorded_P).abs().sum()),
        "tokens": float(len(now_P)),
        "ratio_max": float(result.ratios.max()) if len(now_P) else 0.0,
    }
    ends = np.cumsum([len(each) for each in now])[:-1]
    return np.split((-slope_P).numpy(), ends), watched


def weigh_tokens(pieces: Sequence[Sequence[Read]], options: TorchOptions) -> tuple[list[list[Read]], dict[str, float]]:
    """Weight the tokens of a batch that older weights sampled, as on torch; also return the metrics of the weights."""
    parts = [part for piece in pieces for part in piece]
    if options.old_logprobs != "recompute" or not parts:
        return [list(piece) for piece in pieces], {}
    gap_T = _concatenate([part.old - _own(part.row.logprobs, part) for part in parts])
    factor_T, told = token_factors(gap_T, options)
    factors = iter(np.split(factor_T.numpy(), np.cumsum([len(part.old) for part in parts])[:-1]))
    return [[replace(part, weights=part.weights * next(factors)) for part in piece] for piece in pieces], told


def _own(values: NDArray[np.floating], part: Read) -> Floats:
    return values[part.row.mask].astype(np.float32)


def _concatenate(arrays: Sequence[Floats]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.float32))


def select_trained(rows: Sequence[Row], predicted: Sequence[Floats]) -> list[Floats]:
    """Return for each row the (K,) values of its trained tokens, from the (N,) values of its predicted tokens."""
    return [its[row.mask[1:]] for row, its in zip(rows, predicted, strict=True)]


def spread(row: Row, values: Floats) -> Floats:
    """Return (N,) the values at the trained tokens, 0 elsewhere."""
    found = np.zeros(len(row.tokens) - 1, np.float32)
    found[row.mask[1:]] = values
    return found


def replace_trained(row: Row, tokens: NDArray[np.int64]) -> NDArray[Any]:
    """Return (N,) the row's predicted tokens, with others at its trained positions."""
    found = row.tokens[1:].astype(np.int64)
    found[row.mask[1:]] = tokens
    return found


def check_temperature(rows: Sequence[Row]) -> None:
    """Reject rows that were sampled at a temperature other than 1, for which a server has no log-probabilities.

    Raises:
        ConfigError: there is one.
    """
    other = next((row for row in rows if row.temperature != 1.0), None)
    if other is not None:
        raise ConfigError(
            f"calls of {other.agent} were sampled at temperature {other.temperature:g}, and a Tinker server gives"
            " log-probabilities at temperature 1 only. Set temperature = 1."
        )
