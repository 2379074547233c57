"""How one GPU is divided between vLLM and the learner. Pure functions of numbers.

    vLLM      weights + adapters + overhead + cache
    learner   what it says that it needs
    cache     2 layers kv_width bytes for each token; as many tokens as fit, at most slots x max_model_len

If both do not fit side by side, vLLM can sleep while the learner trains. Then the larger of two sums counts: what the
learner keeps between updates plus all of vLLM, or all of the learner plus what vLLM keeps asleep.

The overhead, 2 GiB of CUDA context, graphs and activations, is an assumption; so is the 1.5 GiB that vLLM keeps asleep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_trainer.models.shape import Shape, quantised_bytes

OVERHEAD: Final = 2 * 2**30
ASLEEP: Final = 3 * 2**29
SPARE: Final = 0.04  # share of the GPU that is left unplanned


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one GPU.

    Attributes:
        total: of the GPU.
        learner: of the learner during an update; 0 if it has another GPU.
        idle: of the learner while vLLM samples.
        weights: of vLLM's copy of the model, adapters included.
        cache: of vLLM's key-value cache.
        tokens: number of tokens that fit into the cache.
        sleeps: whether vLLM sleeps during an update.
    """

    total: int
    learner: int
    idle: int
    weights: int
    cache: int
    tokens: int
    sleeps: bool = False

    @property
    def served(self) -> int:
        """Memory of vLLM while it samples."""
        return self.weights + self.cache + OVERHEAD

    @property
    def share(self) -> float:
        """The share of the GPU that vLLM may use: its ``--gpu-memory-utilization``."""
        return round(self.served / self.total, 3)

    @property
    def line(self) -> str:
        """The plan as a sentence."""
        asleep = ""
        if self.sleeps:
            asleep = (
                f"; vLLM sleeps in each update, then {gib(ASLEEP)}, and {gib(self.weights)} of the machine's memory"
            )
        between = f" ({gib(self.idle)} between updates)" if self.sleeps else ""
        return (
            f"GPU memory: {gib(self.total)}; vLLM {gib(self.served)} (model {gib(self.weights)}, cache"
            f" {gib(self.cache)} for {self.tokens:,} tokens, {gib(OVERHEAD)} more), learner"
            f" {gib(self.learner)}{between}{asleep}"
        )


def least_memory(shape: Shape, *, width: int, context: int, bits: int | None = None) -> int:
    """Return the least memory of vLLM while it samples: with a cache for one answer."""
    return quantised_bytes(shape, bits, width=width) + OVERHEAD + 2 * shape.layers * shape.kv_width * width * context


def plan_memory(
    shape: Shape,
    *,
    total: int,
    width: int,
    slots: int,
    context: int,
    adapters: int = 0,
    learner: int = 0,
    idle: int | None = None,
    bits: int | None = None,
) -> MemoryPlan:
    """Divide a GPU.

    Args:
        shape: of the model.
        total: bytes of the GPU.
        width: bytes of each weight, and of each number in the cache.
        slots: answers at once.
        context: maximum tokens of each.
        adapters: weights of all adapters that are loaded at once.
        learner: bytes that the learner needs on this GPU during an update.
        idle: bytes that it needs between updates, if vLLM may sleep during them; None: it may not.
        bits: of the weights in vLLM's linear layers; None: `width`.

    Raises:
        ConfigError: not even one answer fits; the message says how much is missing.
    """
    weights = quantised_bytes(shape, bits, width=width) + width * adapters
    token = 2 * shape.layers * shape.kv_width * width
    budget, needed = int(total * (1.0 - SPARE)), weights + OVERHEAD + token * context
    missing = learner + needed - budget
    sleeps = missing > 0 and idle is not None
    if sleeps and idle is not None:
        missing = max(idle + needed, learner + ASLEEP) - budget
    if missing > 0:
        even = ", even if vLLM sleeps in updates" if sleeps else ""
        raise ConfigError(
            f"one GPU of {gib(total)} does not hold both vLLM and the learner{even}: {gib(missing)} are missing (in"
            f" vLLM the model {gib(weights)}, {gib(OVERHEAD)} more and a cache of one answer {gib(token * context)};"
            f" the learner {gib(learner)} in an update)."
        )
    beside = idle if sleeps and idle is not None else learner
    tokens = min((budget - beside - weights - OVERHEAD) // token, slots * context)
    return MemoryPlan(
        total=total,
        learner=learner,
        idle=beside,
        weights=weights,
        cache=tokens * token,
        tokens=tokens,
        sleeps=sleeps,
    )


def gib(number: float) -> str:
    """Return bytes as text in GiB."""
    return f"{number / 2**30:.1f} GiB"
