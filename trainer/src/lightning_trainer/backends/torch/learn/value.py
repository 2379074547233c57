"""The value head of PPO: a linear function of the policy's last hidden state that predicts the return still to come.

Its gradient stops at the hidden state, so an error of the head never changes the policy.

Axes: P trained tokens of a micro-batch, U places.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_trainer.backends.torch.model.load import LoadedModel
from lightning_trainer.backends.torch.options import TorchOptions


class ValueHead:
    """Weights and optimiser of a policy's value head. It starts at 0, so it predicts nothing."""

    def __init__(self, model: LoadedModel, options: TorchOptions) -> None:
        width = next(model.head.parameters()).shape[-1]
        self._line = nn.Linear(width, 1, device=model.shape.device)
        nn.init.zeros_(self._line.weight)
        nn.init.zeros_(self._line.bias)
        self._optimiser = torch.optim.AdamW(self._line.parameters(), lr=options.value_learning_rate, weight_decay=0.0)

    def values(self, hidden_UH: Tensor, place_P: Tensor) -> Tensor:
        """Return (P,) values of the states in which trained tokens were sampled, with gradient only to the head."""
        value_U: Tensor = self._line(hidden_UH.detach().float()).squeeze(-1)
        return value_U[place_P]

    def step(self, *, taken: bool) -> None:
        """Update the head, unless the policy's own step was skipped. Its gradient is cleared in both cases."""
        if taken:
            self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Return weights and moments by name."""
        tensors = {f"value.{name}": weight.detach() for name, weight in self._line.named_parameters()}
        for name, weight in self._line.named_parameters():
            tensors |= {f"value.{name}.{key}": value for key, value in self._optimiser.state.get(weight, {}).items()}
        return tensors

    @torch.no_grad()
    def set_state(self, tensors: dict[str, Tensor]) -> None:
        """Load weights and moments.

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
