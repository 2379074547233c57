"""Memory of the learner on its GPU. Pure: numbers in, numbers out.

For n weights of W bytes, t of them trained (all, or those of adapters), and T tokens of a forward pass:

    weights        W n; with `base_bits` less for the linear layers (`models.shape.quantised_bytes`)
    training       16 t bytes: a float32 master, its gradient and AdamW's two moments; 12 t if the weights are
                   float32 themselves; adapters have W t more of working weights
    activations    what a forward pass keeps for its backward pass: T layers W (8 hidden + 2 queries + 2 keys and values
                   + 4 inner) bytes; or T layers W hidden, if each layer is recomputed, and one layer's
    logits         of 256 positions at a time in float32 with their gradient, and up to 256 MiB that are kept
    cache          the embedded engine's keys and values: 2 layers kv_width W bytes for each token

The 1 GiB of CUDA context, kernels and gaps between tensors is an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_trainer.models.shape import Shape, activation_bytes, quantised_bytes

OVERHEAD: Final = 2**30
_KEPT_LOGITS: Final = 2**28
_POSITIONS: Final = 256
_SHARE: Final = 0.8  # share of the free memory that kept activations may take


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """Bytes on the learner's GPU.

    Attributes:
        weights: used in the forward pass, including adapters and a frozen reference.
        training: masters, gradients and moments.
        gradients: the part of these that exists only during an update.
        activations: of one forward pass.
        again: whether layers are recomputed in the backward pass, so that only their inputs are kept.
        logits: of one forward pass.
        layer: activations of one layer, needed by a forward pass without gradient.
        cache: of the embedded engine.
    """

    weights: int
    training: int
    gradients: int
    activations: int
    again: bool
    logits: int
    layer: int
    cache: int = 0

    @property
    def peak(self) -> int:
        """Bytes during an update."""
        return self.weights + self.training + self.activations + self.logits + self.cache + OVERHEAD

    @property
    def idle(self) -> int:
        """Bytes while another process samples."""
        return self.weights + self.training - self.gradients + self.logits + self.layer + OVERHEAD


def learner_memory(
    shape: Shape,
    *,
    width: int,
    tokens: int,
    adapters: int = 0,
    bits: int | None = None,
    copies: int = 0,
    averaged: bool = False,
    cached: int = 0,
    checkpointing: str = "auto",
    total: int | None = None,
) -> LearnerMemory:
    """Return the memory of a learner.

    Args:
        shape: of the model.
        width: bytes of each weight in the forward pass.
        tokens: of a forward pass.
        adapters: weights of all adapters; 0: all weights are trained.
        bits: of the frozen linear layers under adapters; None: `width`.
        copies: frozen copies of the starting policy, as a reference: of the model, or of its adapters.
        averaged: whether a teacher's average of the trained weights is kept.
        cached: tokens in the embedded engine's cache at once.
        checkpointing: whether layers are recomputed in the backward pass: on, off, or auto, if they would not fit.
        total: bytes of the GPU; None: unknown, so auto keeps all.
    """
    trained = adapters or shape.parameters
    weights = (1 + copies) * width * shape.parameters
    if adapters:
        weights = quantised_bytes(shape, bits, width=width) + (1 + copies) * width * adapters
    own_master = width != 4  # float32 weights are their own masters
    training = (8 + 4 + 4 * own_master + 4 * averaged) * trained
    logits = min(tokens * shape.vocabulary * width, _KEPT_LOGITS)
    logits += _POSITIONS * shape.vocabulary * (12 + 2 * width)
    cache = 2 * shape.layers * shape.kv_width * width * cached
    kept, inputs = kept_bytes(shape, width=width, tokens=tokens)
    free = None if total is None else total - weights - training - cache - OVERHEAD
    again = checkpointing == "on" or (checkpointing == "auto" and free is not None and kept > _SHARE * free)
    return LearnerMemory(
        weights=weights,
        training=training,
        gradients=4 * trained,
        activations=inputs if again else kept,
        again=again,
        logits=logits,
        layer=kept // shape.layers,
        cache=cache,
    )


def kept_bytes(shape: Shape, *, width: int, tokens: int) -> tuple[int, int]:
    """Return the bytes that a forward pass keeps, and those that it keeps if each layer is recomputed."""
    attention = shape.heads_width + shape.kv_width
    layer = activation_bytes(shape.hidden, shape.inner, width=width, tokens=tokens, attention=attention)
    return shape.layers * layer, shape.layers * tokens * width * shape.hidden + layer
