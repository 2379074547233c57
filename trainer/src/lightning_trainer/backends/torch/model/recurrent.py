"""Recurrent layers: convolutions over the last tokens, and states of a fixed size.

Qwen3.5, LFM2, Granite 4 and others have such layers next to attention. In transformers, each reads the memory of its
sequences from a cache, and writes the new memory back. Here they get a `Memory` as that cache, and the plan of the
forward pass decides which tokens follow which memory: `step.StepPlan` in generation, `tree_plan.TreePlan` in training.

Axes: N packed tokens, B sequences, T tokens of each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

Remembered: TypeAlias = dict[tuple[str, int], Tensor]
"""What one layer remembers of B sequences, (B, ...) each: by ``conv`` or ``recurrent``, and a number of the layer's."""


class Memory:
    """The cache interface of a recurrent layer of transformers, for one layer and one call.

    Args:
        before: memory of each sequence; None: they begin.

    Attributes:
        after: memory after the call.
    """

    def __init__(self, before: Mapping[tuple[str, int], Tensor] | None = None) -> None:
        self._before = before or {}
        self.after: Remembered = {}

    def get_conv_state(self, _layer: int, state_idx: int = 0) -> Tensor | None:
        """Return (B, channels, width) the last inputs of a convolution."""
        return self._before.get(("conv", state_idx))

    def get_recurrent_state(self, _layer: int, state_idx: int = 0) -> Tensor | None:
        """Return (B, ...) a state."""
        return self._before.get(("recurrent", state_idx))

    def has_previous_state(self, _layer: int | None = None, state_idx: int = 0) -> bool:
        """Whether the sequences have earlier tokens."""
        return ("conv", state_idx) in self._before

    def is_recording_past(self, _layer: int) -> bool:
        """Whether to avoid the single-token path, which changes its state in place: True, because others may use it."""
        return True

    def update_conv_state(
        self, conv_states: Tensor, _layer: int, state_idx: int = 0, *, conv_kernel_size: int, **_options: Any
    ) -> Tensor:
        """Return inputs of a convolution with those before them, and store the last."""
        before = self._before.get(("conv", state_idx))
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:-1], conv_kernel_size)
        whole = torch.cat([before, conv_states], -1)
        self.after["conv", state_idx] = whole[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:  # noqa: ARG002  its name is given
        """Store a state, and return it."""
        self.after["recurrent", state_idx] = recurrent_states
        return recurrent_states


Layer: TypeAlias = Callable[[Tensor, Memory], Tensor]
"""(B, T, width) inputs and what comes before them, to (B, T, width) outputs."""


class RecurrentPlan(Protocol):
    """Which tokens follow which in one forward pass over packed tokens."""

    def recur(self, number: int, layer: Layer, hidden_NW: Tensor, /) -> Tensor:
        """Run the recurrent layer of this number: (N, width) to (N, width)."""
        ...


_PLAN: ContextVar[RecurrentPlan | None] = ContextVar("plan", default=None)
_IN_HAND: ContextVar[slice | None] = ContextVar("tokens in hand", default=None)


@contextmanager
def use_plan(plan: RecurrentPlan) -> Iterator[None]:
    """Let the recurrent layers of a model that is called in the block follow a plan."""
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)


@contextmanager
def in_hand(tokens: slice) -> Iterator[None]:
    """Set which of the packed tokens the layers in the block get, if not all."""
    token = _IN_HAND.set(tokens)
    try:
        yield
    finally:
        _IN_HAND.reset(token)


def tokens_in_hand() -> slice | None:
    """Return which packed tokens a linear layer currently gets; None: all."""
    return _IN_HAND.get()


def layers_of(causal: nn.Module) -> list[nn.Module]:
    """Return the recurrent layers of a model."""
    return [m for m in causal.modules() if hasattr(m, "conv_kernel_size") and hasattr(m, "layer_idx")]


def follow_plans(causal: nn.Module) -> None:
    """Let recurrent layers follow the plan of `use_plan`; without one they run as in transformers."""
    for module in layers_of(causal):
        _follow(module)


def _follow(module: Any) -> None:
    own, number = module.forward, int(module.layer_idx)
    cache = ({"cache_params", "past_key_values"} & {*inspect.signature(own).parameters}).pop()

    def layer(hidden_BTW: Tensor, memory: Memory) -> Tensor:
        out: Tensor = own(hidden_BTW, **{cache: memory})
        return out

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        plan = _PLAN.get()
        if plan is None:
            return own(hidden_states, *args, **kwargs)
        return plan.recur(number, layer, hidden_states[0])[None]

    module.forward = forward
