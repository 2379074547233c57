"""How one GPU is divided between vLLM and the learner. Pure: numbers in, numbers out.

    vLLM      weights + adapters + overhead + cache
    learner   what it says that it needs
    cache     2 layers kv_width bytes for each token; as many tokens as fit, at most slots x max_model_len

If both do not fit side by side, vLLM can sleep while the learner learns. Then the larger of two sums counts: what the
learner keeps between updates and all of vLLM, or all of the learner and what vLLM keeps asleep.

The overhead, 2 GiB of CUDA context, graphs and activations, is an assumption; and so is what it keeps asleep, 1.5 GiB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_trainer.models.shape import Shape

OVERHEAD: Final = 2 * 2**30
ASLEEP: Final = 3 * 2**29
SPARE: Final = 0.04  # of the GPU, which nobody plans with


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on one GPU.

    Attributes:
        total: of the GPU.
        learner: of the learner in an update; 0 where it has another GPU.
        idle: of the learner while vLLM samples.
        weights: of vLLM's copy of the model, adapters included.
        cache: of vLLM's key-value cache.
        tokens: that the cache holds.
        sleeps: whether vLLM sleeps in an update.
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
        """What vLLM takes while it samples."""
        return self.weights + self.cache + OVERHEAD

    @property
    def share(self) -> float:
        """What vLLM may take of the GPU: its ``--gpu-memory-utilization``."""
        return round(self.served / self.total, 3)

    @property
    def line(self) -> str:
        """The plan in a sentence."""
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


def least_memory(shape: Shape, *, width: int, context: int) -> int:
    """Return the least that vLLM takes while it samples: with a cache of one answer."""
    return width * shape.parameters + OVERHEAD + 2 * shape.layers * shape.kv_width * width * context


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
) -> MemoryPlan:
    """Divide a GPU.

    Args:
        shape: of the model.
        total: bytes of the GPU.
        width: bytes of each weight, and of each number in the cache.
        slots: answers at once.
        context: most tokens of each.
        adapters: weights of all adapters that are loaded at once.
        learner: bytes that the learner needs on this GPU in an update.
        idle: bytes that it needs between updates, if vLLM may sleep in them; None: it may not.

    Raises:
        ConfigError: not one answer fits; says how much is missing.
    """
    weights = width * (shape.parameters + adapters)
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
    """Return bytes as people read them."""
    return f"{number / 2**30:.1f} GiB"
