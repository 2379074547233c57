"""The backend named ``torch``: from a run's configuration to a learner in this process. No torch at import."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer import models
from lightning_trainer.backends.torch.fit import plan_run
from lightning_trainer.backends.torch.needs import check_disk, room, weights_of
from lightning_trainer.backends.torch.options import check_device, make_options
from lightning_trainer.backends.torch.sampler import EMBEDDED, engine_name, engine_of, has_cuda
from lightning_trainer.callbacks import wanted_callbacks
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.engines.devices import are_planned
from lightning_trainer.models import look
from lightning_trainer.policies import parse
from lightning_trainer.run.data import load_tasks
from lightning_trainer.run.embedded import EmbeddedBackend

if TYPE_CHECKING:
    from lightning_trainer.backends.torch.learner import TorchLearner

# Options of a run that the learner has under the same name.
_SHARED: Final = (
    "agent_weight", "base_bits", "chat_template", "clip_high", "clip_low", "device", "dtype", "kl_coef",
    "learning_rate", "lora_alpha", "lora_rank", "loss_aggregation", "max_grad_norm", "max_model_len", "seed",
    "system_messages", "tool_format",
)  # fmt: skip

_LEARNING: Final = (
    "old_logprobs", "update_epochs", "minibatches", "warmup_steps", "importance_cap", "importance_mask",
    "importance_moment",
)  # fmt: skip


_TOKENS_CPU: Final = 2048  # of a forward pass
_TOKENS_GPU: Final = 8192


def backend() -> EmbeddedBackend:
    """Make the backend."""
    return EmbeddedBackend(_open, check, checkpoint_bytes, _learner, plan=plan_run)


def _open(config: TrainConfig) -> TorchLearner:
    """Load the model of a run, with the engine that samples for it."""
    planned = plan_run(config)
    if not planned.fits and (engine_name(config) != EMBEDDED or has_cuda(config.device)):
        raise ConfigError("\n".join(planned.lines))
    name = engine_name(config)
    sampler = None if name == EMBEDDED else engine_of(config)
    return open_torch(config.model, sampler=sampler, **learner_options(config))


def _learner(model: str, options: Mapping[str, Any]) -> TorchLearner:
    """Load a model to learn from data. A forward pass takes more tokens on a GPU than on a CPU."""
    need_torch()
    import torch

    on_cpu = options.get("device", "auto") == "cpu" or not torch.cuda.is_available()
    return open_torch(model, **{"micro_batch_tokens": _TOKENS_CPU if on_cpu else _TOKENS_GPU, **options})


def open_torch(model: str, **options: Any) -> TorchLearner:
    """Load a model.

    Args:
        model: a folder, a hub id, or a name that `lightning_trainer.models` knows.
        options: fields of `TorchOptions`, and `sampler` of `TorchLearner`.

    Raises:
        ConfigError: a package is missing, an option is wrong, or the model cannot be loaded.
    """
    need_torch()
    from lightning_trainer.backends.torch.learner import TorchLearner

    return TorchLearner(models.resolve(model), **options)


def check(config: TrainConfig) -> None:
    """Refuse options that this backend does not support.

    Raises:
        ConfigError: says which option, or what to install.
    """
    if config.workers == 0:
        raise ConfigError('workers = 0 leaves the rollouts to runners elsewhere. Only backend = "verl" supports them.')
    if (config.gpus, config.nodes, dict(config.verl)) != (1, 1, {}):
        raise ConfigError('gpus, nodes and verl are options of backend = "verl". Set it, or leave them out.')
    make_options(config.model, learner_options(config))
    if not are_planned():
        check_device(config.device)
        need_torch()
    if look(config.model).folder is None and are_planned():
        raise ConfigError(
            f"the files of {config.model} are not on this machine, so its sizes are not known. Give a folder with its"
            " config.json as --model."
        )
    kind, request = engine_of(config)
    kind.check(request)
    if not are_planned():
        check_disk(config, config.steps)


def checkpoint_bytes(config: TrainConfig, steps: int) -> tuple[int, int] | None:
    """Return the bytes of a checkpoint, and of all that a run keeps at once; None if the model is not here yet."""
    weights = weights_of(config)
    if weights is None:
        return None
    one = weights.light if config.checkpoint == "weights" else weights.checkpoint
    return one, room(config, weights, steps)


def need_torch() -> None:
    """Check that the packages of the embedded backend are installed.

    Raises:
        ConfigError: one is missing; the message says how to install it.
    """
    missing = [package for package in ("torch", "transformers", "peft", "safetensors") if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f'this needs {", ".join(missing)}, not installed here. Run: pip install "lightning-trainer[torch]"'
        )


def learner_options(config: TrainConfig) -> dict[str, Any]:
    """Return the learner's options: those of every run, and those for the learner alone.

    Raises:
        ConfigError: an option is given twice.
    """
    options = {name: getattr(config, name) for name in _SHARED} | _learning_options(config)
    if config.policies:
        own = parse(config.policies)
        options |= {"adapters": own.adapters, "fixed": tuple(sorted(own.fixed))}
    for name in config.backend_options:
        if name in options:
            raise ConfigError(f"backend_options: {name} is a separate option. Write it outside backend_options.")
    return {**options, **config.backend_options}


def _learning_options(config: TrainConfig) -> dict[str, Any]:
    """Return the learner options that an algorithm needs beyond those of GRPO."""
    asked: dict[str, Any] = {"algorithm": config.algorithm, "entropy_coef": config.entropy_coef}
    for kind in wanted_callbacks(config):
        asked |= kind.learner_options(config)
    asked |= {"kl_in": config.kl_in, "kl_estimator": config.kl_estimator} if config.kl_coef > 0 else {}
    of_critic = {name: getattr(config, name) for name in ("gae_lambda", "value_learning_rate", "value_clip")}
    asked |= {name: getattr(config, name) for name in _LEARNING if getattr(config, name) is not None}
    if config.lr_schedule != "constant":
        asked |= {
            "lr_schedule": config.lr_schedule, "min_lr_ratio": config.min_lr_ratio, "total_steps": _steps(config)
        }  # fmt: skip
    return asked | {name: value for name, value in of_critic.items() if value is not None}


def _steps(config: TrainConfig) -> int:
    """Return the optimiser steps that a policy takes in the whole run."""
    batches = (
        config.steps if config.steps is not None else config.step_count(len(load_tasks(config.data, config.columns)))
    )
    for kind in wanted_callbacks(config):
        batches = kind.learning_steps(config, batches)
    return batches * config.update_epochs * config.minibatches
