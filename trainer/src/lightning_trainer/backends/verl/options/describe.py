"""Description of a run on verl: every option of verl, and the resources that it needs. Nothing is started."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.verl.options.algorithms import on_verl
from lightning_trainer.backends.verl.options.grammar import as_hydra
from lightning_trainer.backends.verl.options.needs import GIB, MICRO_BATCH, Requirements, checkpoint_bytes
from lightning_trainer.backends.verl.options.overrides import Site, overrides
from lightning_trainer.backends.verl.options.packing import has_flash_attention
from lightning_trainer.backends.verl.options.profiles import Values, needs_of
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.engines.devices import are_planned, gpu_totals
from lightning_trainer.models.shape import Shape, lora_parameters, read_shape
from lightning_trainer.run.data import load_tasks

_FITS_GIB = (24, 48, 80, 141)  # memory of common accelerators


def describe(config: TrainConfig) -> str:
    """Return verl's options and the resources that they need, as text for people.

    Raises:
        ConfigError: an option is wrong.
        DataError: the data file is wrong.
    """
    site = Site(folder=(config.out or Path("runs") / "DATE").absolute(), steps=count_steps(config))
    shape = read_shape(config.model)
    values = overrides(config, site, shape, flash_attention=has_flash_attention())
    parts = [_needs(config, values, shape), "options set over verl's defaults:", *as_hydra(values), ""]
    if importlib.util.find_spec("verl") is None:
        parts.append("verl is not installed here, so its whole configuration is not shown.")
    else:
        parts += ["verl's whole configuration:", compose(values)]
    return "\n".join(parts)


def count_steps(config: TrainConfig) -> int:
    """Return the number of optimiser steps of the run."""
    return config.steps if config.steps is not None else config.step_count(len(load_tasks(config.data, config.columns)))


def compose_options(values: Values) -> Any:
    """Apply options on top of verl's own `ppo_trainer`; return OmegaConf's DictConfig.

    Raises:
        ConfigError: verl has no such option, or rejects a value.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException

    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return hydra_compose("ppo_trainer", overrides=as_hydra(values))
    except HydraException as error:
        raise ConfigError(f"verl refuses an option: {error}. Look at the table verl of the configuration.") from None


def compose(values: Values) -> str:
    """Return verl's whole configuration as YAML, with references resolved."""
    from omegaconf import OmegaConf

    return str(OmegaConf.to_yaml(compose_options(values), resolve=True))


def _fits(needs: Requirements, memory: int, share: float, longest: int) -> str:
    """Return what fits for learning and sampling on accelerators with `memory` GiB each."""
    learned, cached = needs.micro_batch(memory), needs.while_sampling(memory, share)
    if not learned:
        return "too small to learn"
    short = f", too few for a row of {longest:,}" if learned < min(longest, MICRO_BATCH) else ""
    cache = f"{cached / 1000:.0f}k tokens of cache" if cached else "too small to sample"
    return f"micro-batches of {learned:,} tokens{short}; {cache}"


def _needs(config: TrainConfig, values: Values, shape: Shape | None) -> str:
    accelerators = config.gpus * config.nodes
    where = "CPU" if config.device == "cpu" else "GPU"
    lines = [
        f"model {config.model}, {config.nodes} node(s) with {config.gpus} {where}(s) each",
        f"{config.batch_size} tasks x {config.group_size} rollouts in a step, {count_steps(config)} steps",
    ]
    if shape is None:
        return "\n".join([*lines, "memory: not known, the model's config.json is not here", ""])
    parts = int(values["actor_rollout_ref.rollout.tensor_model_parallel_size"])
    longest = int(values["actor_rollout_ref.rollout.max_model_len"])
    tokens = max(longest, int(values["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"]))
    needs = needs_of(config, shape, parallel=parts, tokens=tokens)
    share = float(values["actor_rollout_ref.rollout.gpu_memory_utilization"])
    learning = (
        f"{needs.training:.1f} weights and optimiser + {needs.gathered:.1f} gathered + {needs.logits:.1f} logits"
        f" + {needs.activations:.1f} activations + {needs.reference:.1f} reference"
    )
    cache = f"{needs.kv_token / 1024:.0f} KiB cache a token"
    lines += [
        f"{shape.parameters / 1e6:,.0f} million weights, {accelerators} {where}(s), of each, estimated:",
        f"  learning  {needs.while_learning:6.1f} GiB = {learning}",
        f"  sampling  {share:.0%} of memory: {needs.rollout_weights:.1f} GiB weights on {parts} {where}(s); {cache}",
    ]
    sizes = {round(total / GIB) for total in gpu_totals()} if are_planned() else _FITS_GIB
    lines += [f"  with {memory} GiB each: {_fits(needs, memory, share, longest)}" for memory in sizes]
    adapters = (lora_parameters(Path(config.model), config.lora_rank) or 0) if config.lora_rank else 0
    saved = checkpoint_bytes(shape, adapters=adapters, critic=on_verl(config).critic)
    lines.append(f"  on disk, each checkpoint: {saved / GIB:.1f} GiB")
    return "\n".join([*lines, ""])
