"""Linear layers of a model with several LoRA adapters, for generation: each token of a batch uses its own adapter.

The base product is computed once for all tokens. The low-rank parts of all adapters are concatenated, so that they too
are two products for the whole batch, and a mask selects those of each token's adapter.

Axes: N packed tokens, R ranks of all adapters together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_trainer.backends.torch.generate.packing import Base, linears
from lightning_trainer.backends.torch.model.recurrent import tokens_in_hand

NO_ADAPTER = -1  # the number of the base model among the adapters


class MixedLinears:
    """A model's linear layers under `torch.inference_mode`; otherwise they are peft's own."""

    def __init__(self, model: nn.Module, adapters: Sequence[str], *, pack: bool) -> None:
        """Replace the forward methods of the layers.

        Args:
            model: with these adapters.
            adapters: their names; a token refers to one by number.
            pack: lay the base weights out for bfloat16 matrix instructions, as `packing.PackedLinears` does.
        """
        self._ranks = _ranks(model, adapters)
        self._mask_NR: Tensor | None = None
        self._layers = [_MixedLinear(module, adapters, self, pack=pack) for module in linears(model)]
        parameter = next(model.parameters())
        owner_R = np.repeat(np.arange(len(adapters)), self._ranks)
        table = owner_R == np.arange(-1, len(adapters))[:, None]  # the first row is that of the base model
        self._table = torch.from_numpy(table).to(parameter.device, parameter.dtype)
        self.refresh()

    @property
    def mask(self) -> Tensor | None:
        """(N, R) 1 if a rank belongs to the token's adapter, otherwise 0; None if no token has an adapter.

        For the tokens that layers currently get: a recurrent layer gets those of some slots at a time.
        """
        mine = tokens_in_hand()
        return self._mask_NR if self._mask_NR is None or mine is None else self._mask_NR[mine]

    def choose(self, adapters_N: NDArray[np.int64]) -> None:
        """Set the adapter of each token of the next forward pass; `NO_ADAPTER` for none."""
        none = bool((adapters_N == NO_ADAPTER).all())
        self._mask_NR = None if none else self._table[torch.from_numpy(adapters_N + 1).to(self._table.device)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Reload the adapters' weights after a change. The base weights never change."""
        for layer in self._layers:
            layer.refresh()

    def undo(self) -> None:
        """Restore the layers' own forward methods."""
        for layer in self._layers:
            layer.undo()


class _MixedLinear:
    """One linear layer, or LoRA's wrapper of one."""

    def __init__(self, module: nn.Module, adapters: Sequence[str], mixed: MixedLinears, *, pack: bool) -> None:
        self._module, self._adapters = module, adapters
        self._base = Base(module, pack=pack)
        self._base.refresh()
        self._adapted = hasattr(module, "lora_A")
        self._down_RI = self._up_RO = torch.empty(0)
        own = module.forward

        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_inference_mode_enabled():
                return own(x, *args, **kwargs)
            out: Tensor = self._base(x)
            if self._adapted and mixed.mask is not None:
                low_NR = torch.mm(x.reshape(-1, x.shape[-1]), self._down_RI.t()).mul_(mixed.mask)
                out = torch.addmm(out.view(-1, out.shape[-1]), low_NR, self._up_RO).view(out.shape)
            return out

        module.forward = forward

    def refresh(self) -> None:
        if self._adapted:
            module: Any = self._module
            dtype = module.base_layer.weight.dtype
            self._down_RI = torch.cat([module.lora_A[name].weight for name in self._adapters]).to(dtype)
            ups = [module.lora_B[name].weight.float().t() * module.scaling[name] for name in self._adapters]
            self._up_RO = torch.cat(ups).to(dtype)

    def undo(self) -> None:
        del self._module.forward


def _ranks(model: nn.Module, adapters: Sequence[str]) -> list[int]:
    """Return the rank of each adapter. It is the same in all its layers, as `adapters.add_adapters` makes them."""
    layer: Any = next(module for module in linears(model) if hasattr(module, "lora_A"))
    return [int(layer.r[name]) for name in adapters]
