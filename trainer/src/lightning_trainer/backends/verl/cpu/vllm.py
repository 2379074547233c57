"""vLLM on CPU as a replica of verl's: new weights are loaded in place, through vLLM's own reload.

vLLM's CPU layers repack their weights for oneDNN after loading, so verl's plain `model.load_weights` works only once.
"""

from __future__ import annotations

from typing import Any

import ray
import torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica


class WorkerExtensionCPU(vLLMColocateWorkerExtension):  # type: ignore[misc]  # verl has no types
    """Extends vLLM's worker: receives weights from verl's trainer."""

    def update_weights_from_ipc(
        self,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = False,
        use_shm: bool = False,
    ) -> None:
        """Receive all weights, then load them.

        A sender waits forever for a receiver that failed half-way, so nothing that can fail runs before the last bucket
        is acknowledged. A later error reaches the sender as the error of this call.
        """
        if peft_config and base_sync_done:
            super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
            return
        received: dict[str, torch.Tensor] = {}

        def keep(weights: list[tuple[str, torch.Tensor]], _: bool) -> None:
            received.update((name, tensor.clone()) for name, tensor in weights)
            weights.clear()

        handle = self._get_zmq_handle()
        receiver = BucketedWeightReceiver(zmq_handle=handle, device=torch.device("cpu"), use_shm=use_shm)
        receiver.receive_weights(on_bucket_received=keep)
        self.model_runner.reload_weights(weights_iterator=iter(received.items()))
        _retie(self.model_runner.get_model())


def _retie(model: Any) -> None:
    """Make a tied output layer use the new embedding.

    vLLM 0.27's reload skips the output layer of a model with tied embeddings ("ParallelLMHead: Failed to load
    weights"): its repacked copy keeps the old weights, and no error is raised.
    """
    head, body = getattr(model, "lm_head", None), getattr(model, "model", None)
    embedding = getattr(body, "embed_tokens", None)
    if head is None or embedding is None or not getattr(model.config, "tie_word_embeddings", False):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head.weight = embedding.weight
    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


class ServerCPU(vLLMHttpServer):  # type: ignore[misc]  # verl has no types
    """verl's vLLM server, with our worker extension."""

    def _get_worker_extension_cls(self) -> str:
        return f"{WorkerExtensionCPU.__module__}.{WorkerExtensionCPU.__qualname__}"


class ReplicaCPU(vLLMReplica):  # type: ignore[misc]  # verl has no types
    """verl's vLLM replica, with our server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(ServerCPU)
