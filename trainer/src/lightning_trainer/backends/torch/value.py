"""The value head of PPO: a linear function of the policy's last hidden state that says what is still to come.

Its gradient stops at the hidden state, so an error of the head never moves the policy.

Axes: P trained tokens of a micro-batch, S responses, T tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_trainer.advantages import FloatArray, generalised_advantages, whitened
from lightning_trainer.backends.torch.model import LoadedModel
from lightning_trainer.backends.torch.options import TorchOptions


class ValueHead:
    """Weights and optimiser of a policy's value head. It starts at 0: nothing is expected."""

    def __init__(self, model: LoadedModel, options: TorchOptions) -> None:
        width = next(model.head.parameters()).shape[-1]
        self._line = nn.Linear(width, 1, device=model.shape.device)
        nn.init.zeros_(self._line.weight)
        nn.init.zeros_(self._line.bias)
        self._optimiser = torch.optim.AdamW(self._line.parameters(), lr=options.value_learning_rate, weight_decay=0.0)

    def values(self, hidden_UH: Tensor, place_P: Tensor) -> Tensor:
        """(P,) value of the state in which each trained token was sampled, with gradient to the head alone."""
        value_U: Tensor = self._line(hidden_UH.detach().float()).squeeze(-1)
        return value_U[place_P]

    def step(self, *, taken: bool) -> None:
        """Move the head, unless the policy's own step was refused; its gradient goes either way."""
        if taken:
            self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Give weights and moments by name."""
        tensors = {f"value.{name}": weight.detach() for name, weight in self._line.named_parameters()}
        for name, weight in self._line.named_parameters():
            tensors |= {f"value.{name}.{key}": value for key, value in self._optimiser.state.get(weight, {}).items()}
        return tensors

    @torch.no_grad()
    def set_state(self, tensors: dict[str, Tensor]) -> None:
        """Take weights and moments.

        Raises:
            KeyError: they are missing: the checkpoint was made without a value head.
        """
        for name, weight in self._line.named_parameters():
            weight.copy_(tensors[f"value.{name}"])
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"value.{name}.{key}" in tensors]
            self._optimiser.state.pop(weight, None)
            if keys:
                moments = {key: tensors[f"value.{name}.{key}"] for key in keys}
                self._optimiser.state[weight] = {k: v.to(weight.device, copy=True) for k, v in moments.items()}


def estimate(
    credit_P: FloatArray, values_P: FloatArray, penalties_P: FloatArray, lengths: Sequence[int], lam: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Turn the credit of calls into advantages of tokens and targets of their values.

    Each response is an episode of its own, however rows were merged: its credit comes with its last token, a penalty
    with every token, and nothing is discounted within it (`advantages.generalised_advantages`). Advantages are
    then compared over all tokens of the batch (`advantages.whitened`), as in verl.

    Args:
        credit_P: the credit of each token's call.
        values_P: value of the state in which it was sampled.
        penalties_P: taken off its reward.
        lengths: (S,) number of tokens of each response, in order.
        lam: decay of the estimate.

    Returns:
        (P,) advantages and (P,) targets.
    """
    mask_ST = np.arange(max(lengths, default=0)) < np.asarray(lengths)[:, None]
    rewards_ST, values_ST = np.zeros(mask_ST.shape), np.zeros(mask_ST.shape)
    ends = np.cumsum(lengths) - 1
    rewards_P = -penalties_P.astype(np.float64)
    rewards_P[ends] += credit_P[ends]
    rewards_ST[mask_ST], values_ST[mask_ST] = rewards_P, values_P
    advantages_ST, targets_ST = generalised_advantages(rewards_ST, values_ST, mask_ST, lam=lam)
    return whitened(advantages_ST[mask_ST]).astype(np.float32), targets_ST[mask_ST].astype(np.float32)
