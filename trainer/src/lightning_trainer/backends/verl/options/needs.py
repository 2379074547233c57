"""The resources that a run needs: memory of each accelerator, and of the machines. Estimates, each with its formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_trainer.models.shape import Shape

GIB = 1024**3
MICRO_BATCH: Final = 16384  # tokens at most, verl's own default; a longer row gets its own micro-batch
LEAST: Final = 1024  # tokens of a micro-batch: with fewer, a device spends its time on launching work
_FILLED: Final = 0.85  # of a device's memory; an H200 reserved a tenth more than was allocated
_ROLLOUT_WEIGHTS_GIB = 24.0  # vLLM's copy on one accelerator; a larger one is split over several


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Memory in GiB of one accelerator, by purpose.

    Attributes:
        accelerators: number of them, all nodes together.
        training: weights, gradients and Adam's two moments in float32, sharded: 16 bytes a weight.
        gathered: one layer's weights, unsharded in bfloat16, and the next one's, prefetched.
        token: bytes that a token of a micro-batch needs: logits and activations.
        logits: scores of a micro-batch over the vocabulary in float32, and their gradient.
        activations: what is kept of a micro-batch for the backward pass, with gradient checkpointing.
        reference: the starting policy's weights in bfloat16, sharded; 0 without a KL term or with LoRA.
        rollout_weights: vLLM's copy in bfloat16, split over `tensor_parallel`.
        kv_token: bytes that one token keeps in vLLM's cache, on all accelerators of a replica together.
        tensor_parallel: accelerators that share one vLLM replica.
    """

    accelerators: int
    training: float
    gathered: float
    token: int
    logits: float
    activations: float
    reference: float
    rollout_weights: float
    kv_token: int
    tensor_parallel: int

    @property
    def while_learning(self) -> float:
        """Peak memory of an accelerator during an update, while vLLM sleeps and has freed its weights and cache."""
        return self.training + self.gathered + self.logits + self.activations + self.reference

    def micro_batch(self, memory: float) -> int:
        """Return how many tokens a micro-batch may have on accelerators with `memory` GiB each; 0 if none fit."""
        free = _FILLED * memory - self.training - self.gathered - self.reference
        fitting = int(free * GIB / self.token) // LEAST * LEAST
        return max(0, min(MICRO_BATCH, fitting))

    def while_sampling(self, memory: float, utilization: float) -> float:
        """Return how many tokens vLLM's cache has room for on one replica of accelerators with `memory` GiB each."""
        free = (memory * utilization - self.rollout_weights) * self.tensor_parallel * GIB
        return max(0.0, free / self.kv_token)


def tensor_parallel(shape: Shape | None, gpus: int) -> int:
    """Return how many accelerators of a node share a vLLM replica: one, unless the weights are too large for it."""
    parts = 1
    while shape is not None and parts * 2 <= gpus and gpus % (parts * 2) == 0:
        if 2 * shape.parameters / parts <= _ROLLOUT_WEIGHTS_GIB * GIB:
            break
        parts *= 2
    return parts


def checkpoint_bytes(shape: Shape, *, adapters: int, critic: bool) -> int:
    """Return the bytes of verl's checkpoint, all of it in float32: weights, moments, and the model folder.

    Args:
        shape: of the model.
        adapters: number of weights of the LoRA adapters; 0: all weights are trained.
        critic: whether a critic is saved, too: its weights and moments, without a model folder.
    """
    trained = adapters or shape.parameters
    actor = 4 * (shape.parameters + adapters) + 8 * trained + 4 * shape.parameters
    return actor + (12 * shape.parameters if critic else 0)


def estimate(
    shape: Shape, *, accelerators: int, tensor_parallel: int, tokens: int, lora: bool, reference: bool, critic: bool
) -> Requirements:
    """Estimate the memory of one accelerator.

    Args:
        shape: of the model.
        accelerators: over which FSDP shards weights and optimiser.
        tensor_parallel: accelerators that share a vLLM replica.
        tokens: of one accelerator's micro-batch.
        lora: only adapters have gradients and moments: 4 bytes a weight remain.
        reference: whether the starting policy is kept too.
        critic: whether a second model of the same shape learns.
    """
    per_weight = (4 if lora else 16) + (16 if critic else 0)
    layer = (shape.parameters - shape.vocabulary * shape.hidden) / shape.layers
    logits, activations = 2 * 4 * shape.vocabulary, 2 * shape.hidden * shape.layers
    return Requirements(
        accelerators=accelerators,
        training=shape.parameters * per_weight / accelerators / GIB,
        gathered=2 * layer * 2 / GIB,
        token=logits + activations,
        logits=logits * tokens / GIB,
        activations=activations * tokens / GIB,
        reference=2 * shape.parameters / accelerators / GIB if reference and not lora else 0.0,
        rollout_weights=2 * shape.parameters / tensor_parallel / GIB,
        kv_token=2 * 2 * shape.kv_width * shape.layers,
        tensor_parallel=tensor_parallel,
    )
