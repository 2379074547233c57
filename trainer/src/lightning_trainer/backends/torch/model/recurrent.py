"""Layers that remember what they read: convolutions over the last tokens, and states of a fixed size.

Qwen3.5, LFM2, Granite 4 and others have such layers beside attention. transformers writes each so that it asks a cache
for what it remembers of its sequences, and gives back what it remembers now. Here they get a `Memory` as that cache,
and the plan of the forward pass says which tokens follow which memory: `step.StepPlan` in generation, `tree.TreePlan`
in training.

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
    """What a recurrent layer of transformers asks of a cache, for one layer and one call.

    Args:
        before: what it remembers of each sequence; None: they begin.

    Attributes:
        after: what it remembers then.
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
        """Whether the sequences have begun before."""
        return ("conv", state_idx) in self._before

    def is_recording_past(self, _layer: int) -> bool:
        """Keep the layer from a way for one token that changes what it got in place: others may hold it."""
        return True

    def update_conv_state(
        self, conv_states: Tensor, _layer: int, state_idx: int = 0, *, conv_kernel_size: int, **_options: Any
    ) -> Tensor:
        """Return inputs of a convolution with those before them, and remember the last."""
        before = self._before.get(("conv", state_idx))
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:-1], conv_kernel_size)
        whole = torch.cat([before, conv_states], -1)
        self.after["conv", state_idx] = whole[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:  # noqa: ARG002  its name is given
        """Remember a state."""
        self.after["recurrent", state_idx] = recurrent_states
        return recurrent_states


Layer: TypeAlias = Callable[[Tensor, Memory], Tensor]
"""(B, T, width) inputs and what comes before them, to (B, T, width) outputs."""


class RecurrentPlan(Protocol):
    """Who follows whom in one forward pass over packed tokens."""

    def recur(self, number: int, layer: Layer, hidden_NW: Tensor, /) -> Tensor:
        """Run one recurrent layer, whose number is given: (N, width) to (N, width)."""
        ...


_PLAN: ContextVar[RecurrentPlan | None] = ContextVar("plan", default=None)
_IN_HAND: ContextVar[slice | None] = ContextVar("tokens in hand", default=None)


@contextmanager
def planned(plan: RecurrentPlan) -> Iterator[None]:
    """Let the recurrent layers of a model that is called in the block follow a plan."""
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)


@contextmanager
def in_hand(tokens: slice) -> Iterator[None]:
    """Say which of the packed tokens the layers in the block get, where it is not all."""
    token = _IN_HAND.set(tokens)
    try:
        yield
    finally:
        _IN_HAND.reset(token)


def tokens_in_hand() -> slice | None:
    """Return which packed tokens a linear layer gets now; None: all."""
    return _IN_HAND.get()


def layers_of(causal: nn.Module) -> list[nn.Module]:
    """Return the recurrent layers of a model."""
    return [m for m in causal.modules() if hasattr(m, "conv_kernel_size") and hasattr(m, "layer_idx")]


def follow_plans(causal: nn.Module) -> None:
    """Let recurrent layers follow the plan that is `planned`; without one they do what transformers does."""
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
