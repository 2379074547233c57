"""The torch backend's choice of engine, and the engine named ``embedded``, which shares the learner's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_spans.errors import ConfigError
from lightning_trainer import models, registry
from lightning_trainer.backends.torch.footprint import LearnerMemory, learner_memory
from lightning_trainer.backends.torch.needs import weights_of
from lightning_trainer.callbacks import wanted_callbacks
from lightning_trainer.engines.contract import EngineKind, EngineRequest, HeldModel
from lightning_trainer.engines.devices import are_planned, gpu_total
from lightning_trainer.engines.vllm.kind import is_installed
from lightning_trainer.engines.vllm.memory import least_memory
from lightning_trainer.engines.vllm.rounding import read_vllm_bits
from lightning_trainer.models.bases import adapter_rank, read_base
from lightning_trainer.policies import parse

if TYPE_CHECKING:
    from lightning_trainer.backends.torch.generate.engine import TorchEngine
    from lightning_trainer.config.train import TrainConfig

EMBEDDED = "embedded"
ASSUMED_TOKENS = 2048  # tokens of an answer with its prompt, if the model's limit is higher


class EmbeddedKind:
    """The engine in the learner's process: `EngineKind`."""

    def check(self, request: EngineRequest) -> None:
        """Refuse options of external engines.

        Raises:
            ConfigError: names them.
        """
        if request.python or request.urls or request.gpus or request.options:
            raise ConfigError(
                "engine_python, engine_url, engine_gpus and engine_options need engine = vllm. Set it, or leave them"
                " out."
            )

    def plan(self, request: EngineRequest) -> Sequence[str]:  # noqa: ARG002 - the protocol's
        """Return no lines: its memory is measured."""
        return []

    def open(self, request: EngineRequest, held: HeldModel) -> TorchEngine:  # noqa: ARG002 - the protocol's
        """Start the engine: `EngineKind.open`."""
        from lightning_trainer.backends.torch.generate.engine import TorchEngine

        return TorchEngine(held.loaded, held.options)


def engine_name(config: TrainConfig) -> str:
    """Return the engine that a run uses: the chosen one, otherwise vLLM if possible, otherwise the embedded one."""
    if config.engine is not None:
        return config.engine
    if config.engine_python or config.engine_url:
        return "vllm"
    able = config.device != "cpu" and is_installed() and has_cuda(config.device)
    if able and (config.lora_rank or adapter_rank(config.model)):
        return "vllm"
    return EMBEDDED


def engine_of(config: TrainConfig) -> tuple[EngineKind, EngineRequest]:
    """Return the engine of a run, and what it serves.

    Raises:
        ConfigError: there is no engine of this name, or no such model.
    """
    kind: EngineKind = registry.by_name("engine", engine_name(config))
    base = read_base(models.look(config.model).folder or models.resolve(config.model))
    copies = copies_of(config)
    total = gpu_total(config.device)
    learner = learner_memory_of(config, total)
    request = EngineRequest(
        model=base.folder,
        policies=(*parse(config.policies).adapters, *copies) if config.policies else (),
        copies=copies,
        lora_rank=config.lora_rank or base.rank,
        lora_targets=tuple(config.backend_options.get("lora_targets") or base.targets),
        base_bits=config.base_bits or base.bits,
        staleness=config.staleness,
        slots=int(config.backend_options.get("slots", 64)),
        max_model_len=config.max_model_len,
        dtype=_dtype_of(config) if total else config.dtype,
        device=config.device,
        seed=config.seed,
        tool_format=config.tool_format,
        python=config.engine_python,
        urls=tuple(url.strip().rstrip("/") for url in (config.engine_url or "").split(",") if url.strip()),
        gpus=config.engine_gpus,
        learner_bytes=learner.peak if learner else 0,
        learner_idle_bytes=learner.idle if learner else 0,
        options=config.engine_options,
    )
    return kind, request


def copies_of(config: TrainConfig) -> tuple[str, ...]:
    """Return the names of the frozen policy copies that a run's callbacks request."""
    return tuple(copy for kind in wanted_callbacks(config) for copy in kind.learner_options(config).get("copies", ()))


def _dtype_of(config: TrainConfig) -> str:
    """Return the number format of the weights on a GPU; ``auto`` is the model's own."""
    weights = weights_of(config)
    return config.dtype if weights is None else {4: "float32", 2: "bfloat16"}[weights.width]


def learner_memory_of(config: TrainConfig, total: int | None = None) -> LearnerMemory | None:
    """Return the memory of a run's learner on its device; None for a model of unknown shape.

    Args:
        config: of the run.
        total: bytes of the GPU, which vLLM shares unless it has its own; None: unknown.

    Raises:
        ConfigError: there is no such model.
    """
    weights = weights_of(config)
    if weights is None or weights.shape is None:
        return None
    options = config.backend_options
    embedded = engine_name(config) == EMBEDDED
    slots = int(options.get("slots", 64)) if embedded else 0
    context = config.max_model_len or weights.shape.context
    if total is not None and not (embedded or config.engine_gpus or config.engine_url):
        bits = read_vllm_bits(config.engine_options)
        total -= least_memory(weights.shape, width=weights.width, context=context, bits=bits)
    return learner_memory(
        weights.shape,
        width=weights.width,
        tokens=int(options.get("micro_batch_tokens", 2048)),
        adapters=weights.trained if weights.rank else 0,
        bits=weights.bits,
        copies=int(config.kl_coef > 0),
        averaged=options.get("teacher_weights") == "ema",
        cached=slots * min(context, ASSUMED_TOKENS),
        checkpointing=str(options.get("activation_checkpointing", "auto")),
        total=total,
    )


def has_cuda(device: str) -> bool:
    """Return whether torch finds the GPU that a device names, or whether one is planned for."""
    if device.partition(":")[0] not in ("auto", "cuda"):
        return False
    if are_planned():
        return True
    import torch

    return torch.cuda.is_available()
