"""How one GPU is divided between vLLM and the learner. Pure: numbers in, numbers out.

    vLLM      weights + adapters + overhead + cache
    learner   what it says that it needs
    cache     2 layers kv_width bytes for each token; as many tokens as fit, at most slots x max_model_len

The overhead, 2 GiB of CUDA context, graphs and activations, is an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_trainer.models.shape import Shape, activation_bytes

OVERHEAD: Final = 2 * 2**30
_SPARE: Final = 0.04  # of the GPU, which nobody plans with


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one GPU.

    Attributes:
        total: of the GPU.
        learner: of the learner; 0 where it has another GPU.
        weights: of vLLM's copy of the model, adapters included.
        cache: of vLLM's key-value cache.
        tokens: that the cache holds.
    """

    total: int
    learner: int
    weights: int
    cache: int
    tokens: int

    @property
    def share(self) -> float:
        """What vLLM may take of the GPU: its ``--gpu-memory-utilization``."""
        return round((self.weights + self.cache + OVERHEAD) / self.total, 3)

    @property
    def line(self) -> str:
        """The plan in a sentence."""
        served = self.weights + self.cache + OVERHEAD
        return (
            f"GPU memory: {gib(self.total)}; vLLM {gib(served)} (model {gib(self.weights)}, cache {gib(self.cache)} for"
            f" {self.tokens:,} tokens, {gib(OVERHEAD)} more), learner {gib(self.learner)}"
        )


def plan_memory(
    shape: Shape, *, total: int, width: int, slots: int, context: int, adapters: int = 0, learner: int = 0
) -> MemoryPlan:
    """Divide a GPU.

    Args:
        shape: of the model.
        total: bytes of the GPU.
        width: bytes of each weight, and of each number in the cache.
        slots: answers at once.
        context: most tokens of each.
        adapters: weights of all adapters that are loaded at once.
        learner: bytes that the learner needs on this GPU.

    Raises:
        ConfigError: not one answer fits; says how much is missing, and what to change.
    """
    weights = width * (shape.parameters + adapters)
    token = 2 * shape.layers * shape.kv_width * width
    left = int(total * (1.0 - _SPARE)) - learner - weights - OVERHEAD
    if left < token * context:
        raise ConfigError(
            f"one GPU of {gib(total)} does not hold both vLLM and the learner: {gib(token * context - left)} are"
            f" missing for a cache of one answer (model {gib(weights)}, learner {gib(learner)}). Lower max_model_len or"
            " micro_batch_tokens, give vLLM another GPU (--engine-gpus 1), or use --engine embedded."
        )
    tokens = min(left // token, slots * context)
    return MemoryPlan(total=total, learner=learner, weights=weights, cache=tokens * token, tokens=tokens)


def learner_memory(shape: Shape, *, width: int, trained: int, tokens: int) -> int:
    """Return the bytes that a learner of adapters needs: frozen weights, adapters with optimiser, one forward pass.

    Args:
        shape: of the model.
        width: bytes of each frozen weight.
        trained: weights of the adapters: each has a float32 master, gradient and two moments, and its working copy.
        tokens: of a forward pass; besides its activations, its logits twice in float32.
    """
    activations = activation_bytes(shape.layers, shape.hidden, width=width, tokens=tokens)
    activations += 2 * 4 * shape.vocabulary * tokens
    return width * shape.parameters + (16 + width) * trained + activations + OVERHEAD // 2


def gib(number: float) -> str:
    """Return bytes as people read them."""
    return f"{number / 2**30:.1f} GiB"
