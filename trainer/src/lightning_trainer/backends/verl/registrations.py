"""Registrations of what verl looks up by name.

verl imports this as the model's `external_lib`, in every process that creates a model; the trainer's process imports it
first of all.
"""

from __future__ import annotations

from typing import Any

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.verl import estimators, packed


def on_cpu() -> bool:
    """Whether verl uses the CPU platform in this process.

    Raises:
        ConfigError: it should, but the platform was not loaded.
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
    """Register the FSDP engines, which verl registers for CUDA and NPU, for the CPU too."""
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from lightning_trainer.backends.verl.cpu.critic import ValueEngineCPU

    for kind, engine in (("language_model", FSDPEngineWithLMHead), ("value_model", ValueEngineCPU)):
        for backend in ("fsdp", "fsdp2"):
            if "cpu" not in EngineRegistry._engines.get(kind, {}).get(backend, {}):
                EngineRegistry.register(model_type=kind, backend=[backend], device=["cpu"])(engine)


def register_replica() -> None:
    """Replace verl's vLLM replica by one with workers that load new weights as vLLM's CPU layers need it."""
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
