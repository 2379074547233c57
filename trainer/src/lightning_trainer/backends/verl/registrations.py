"""Registers with verl what verl looks up by name.

verl imports this as the model's `external_lib`, in every process that makes a model; the process of the trainer imports
it first of all.
"""

from __future__ import annotations

from typing import Any

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.verl import estimators, packed


def on_cpu() -> bool:
    """Whether verl works on the CPU platform in this process.

    Raises:
        ConfigError: it should, and the platform was not loaded.
    """
    import os

    from verl.plugin.platform import PlatformRegistry

    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return False
    if PlatformRegistry.get("cpu") is None:
        raise ConfigError(
            "verl did not load the entry point verl.plugins of lightning-trainer. Is VERL_USE_EXTERNAL_PLUGINS set?"
            " Is lightning-trainer installed where verl runs?"
        )
    return True


def register_engines() -> None:
    """Let the FSDP engines, which are registered for CUDA and NPU, be found for the CPU."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from lightning_trainer.backends.verl.cpu.critic import ValueEngineCPU

    for kind, engine in (("language_model", FSDPEngineWithLMHead), ("value_model", ValueEngineCPU)):
        for backend in ("fsdp", "fsdp2"):
            if "cpu" not in EngineRegistry._engines.get(kind, {}).get(backend, {}):
                EngineRegistry.register(model_type=kind, backend=[backend], device=["cpu"])(engine)


def register_replica() -> None:
    """Replace verl's vLLM replica by one whose workers take new weights the way vLLM's CPU layers need it."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    def load() -> Any:
        from lightning_trainer.backends.verl.cpu.vllm import ReplicaCPU

        return ReplicaCPU

    RolloutReplicaRegistry.register("vllm", load)


estimators.register()
packed.register()
if on_cpu():
    register_engines()
    register_replica()
