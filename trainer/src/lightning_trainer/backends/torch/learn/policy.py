"""The weights that are trained: a float32 master copy, AdamW, and LoRA adapters.

The working copy is what generates and goes forward. Each step changes the masters and rounds them into the working
copy, so steps smaller than bfloat16's resolution are not lost.
"""

from __future__ import annotations

import logging
import re
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch.learn.schedule import schedule
from lightning_trainer.backends.torch.learn.value import ValueHead
from lightning_trainer.backends.torch.model.load import LoadedModel
from lightning_trainer.backends.torch.options import TorchOptions
from lightning_trainer.models import check_adapter

ADAPTER = "default"
_TAKEN = {"base_layer", "lora_A", "lora_B"}  # what peft adds to the names of parameters


def add_adapters(model: LoadedModel, options: TorchOptions, saved: Path | None = None) -> None:
    """Add the LoRA adapters that were asked for, which start as no change; a folder that has some keeps its own.

    Args:
        model: gets them.
        options: say which.
        saved: folder of a checkpoint; an adapter that is in it goes on from there.

    Raises:
        ConfigError: the folder's adapters have another rank, or no module has one of the names.
    """
    causal = model.causal
    if has_adapters(model) and options.adapters:
        raise ConfigError(
            f"{model.source} has LoRA adapters, and adapters of agents go over a model without. Use that."
        )
    if has_adapters(model):
        rank = causal.peft_config[ADAPTER].r
        if options.lora_rank not in (0, rank):
            raise ConfigError(
                f"{model.source} has LoRA adapters of rank {rank}. Set lora_rank to that, or leave it out."
            )
        if options.kl_coef > 0:
            raise ConfigError(
                f"{model.source} has LoRA adapters, so kl_coef would compare with its base model. Leave it out."
            )
        return
    for name in options.adapters or ((ADAPTER,) if options.lora_rank else ()):
        if saved is not None and (saved / name).is_dir():
            _load(model, saved / name, options)
        elif name in options.fixed:
            place = saved or model.source
            raise ConfigError(
                f"there is no adapter {name} in {place} to keep. Give a checkpoint that has it as --model."
            )
        else:
            _add(model, name, options)


def _load(model: LoadedModel, folder: Path, options: TorchOptions) -> None:
    """Add an adapter from its folder.

    Raises:
        ConfigError: it can't be read, has another rank, or `kl_coef` would compare it with the model without it.
    """
    if options.kl_coef > 0 and folder.name not in options.fixed:
        raise ConfigError(f"{folder} is trained, and kl_coef would compare it with the model without. Leave it out.")
    check_adapter(folder)
    try:
        with _several():
            found = model.causal.load_adapter(str(folder), adapter_name=folder.name, use_safetensors=True)
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, SafetensorError) as error:
        raise ConfigError(f"the adapter {folder} can't be loaded: {error}") from error
    lacking = [name for name in found.missing_keys if name.endswith(f".{folder.name}.weight")]
    if lacking or found.unexpected_keys:
        raise ConfigError(
            f"the adapter {folder} is not of this model: {len(lacking)} weights are missing in it, and the model has no"
            f" place for {len(found.unexpected_keys)} others. Give the model that it was trained over."
        )
    rank = model.causal.peft_config[folder.name].r
    if rank != options.lora_rank:
        raise ConfigError(f"{folder} has rank {rank}. Set lora_rank to that.")


def _add(model: LoadedModel, name: str, options: TorchOptions) -> None:
    from peft import LoraConfig

    causal = model.causal
    if name in _TAKEN | {part for parameter, _ in causal.named_parameters() for part in parameter.split(".")}:
        raise ConfigError(
            f"an adapter can't be named {name!r}: that is a part of the model, for which peft would take it, and its"
            " weights would be lost. Give it another name: AGENT=lora:NAME."
        )
    config = LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha or 2 * options.lora_rank,  # type: ignore[arg-type]  # peft only divides it
        target_modules=list(options.lora_targets) if options.lora_targets else _linear_names(causal),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(model.source.resolve()),
    )
    with torch.random.fork_rng(devices=[]), _several():
        # Each starts from its own draw, whatever others there are.
        torch.manual_seed(options.seed if name == ADAPTER else options.seed + zlib.crc32(name.encode()))
        try:
            causal.add_adapter(config, adapter_name=name)
        except ValueError as error:
            raise ConfigError(f"lora_targets: {error}") from None


@contextmanager
def _several() -> Iterator[None]:
    """Keep libraries from warning that a model gets a second adapter: it is meant to.

    peft says that there are two, and transformers that the file of the second lacks the weights of the first.
    """
    report = logging.getLogger("transformers.integrations.peft")
    level = report.level
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")
        report.setLevel(logging.ERROR)
        try:
            yield
        finally:
            report.setLevel(level)


def has_adapters(model: LoadedModel) -> bool:
    """Whether the model has LoRA adapters; then only they are trained."""
    return bool(getattr(model.causal, "peft_config", None))


def _linear_names(causal: Any) -> list[str]:
    """Names of all linear layers but the head; peft's own `all-linear` needs a wrapped model."""
    head = causal.get_output_embeddings()
    return sorted({name.rpartition(".")[2] for name, module in _outermost(causal) if module is not head})


def _outermost(module: torch.nn.Module, path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Return linear layers and LoRA's wrappings of such, not what a wrapping holds."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear) or hasattr(child, "base_layer"):
            yield f"{path}{name}", child
        else:
            yield from _outermost(child, f"{path}{name}.")


def select(model: LoadedModel, adapter: str | None) -> None:
    """Let the model go through one of its adapters, in training and in what peft computes; None: there is only one."""
    if adapter is not None:
        model.causal.set_adapter(adapter)


class Policy:
    """Masters, gradients and optimiser of the trained parameters: all, those of adapters, or those of one adapter."""

    def __init__(self, model: LoadedModel, options: TorchOptions, adapter: str | None = None) -> None:
        self._options = options
        wanted = re.compile("" if not has_adapters(model) else r"\.lora_" if adapter is None else _of(adapter))
        self.working: dict[str, Tensor] = {n: p for n, p in model.causal.named_parameters() if wanted.search(n)}
        self.masters: dict[str, Tensor] = {}
        for name, parameter in self.working.items():
            parameter.requires_grad_()
            same = parameter.dtype is torch.float32
            self.masters[name] = parameter if same else parameter.detach().float()
            if not same:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _into(self.masters[name])
                )
        self.optimiser = torch.optim.AdamW(
            self.masters.values(),
            lr=options.learning_rate,
            betas=options.betas,
            weight_decay=options.weight_decay,
            fused=True,
        )
        self._schedule = schedule(options)
        self.value = ValueHead(model, options) if options.critic else None

    def step(self) -> tuple[float, bool]:
        """Take an optimiser step with the gradients that have come in, and round the masters into the working copy.

        Returns:
            The norm of the gradients before clipping, and whether the step was taken: with a gradient that is not
            finite nothing changes.
        """
        norm = torch.nn.utils.clip_grad_norm_(self.masters.values(), self._options.max_grad_norm)
        taken = bool(torch.isfinite(norm))
        if taken:
            self._set_learning_rate()
            self.optimiser.step()
            self.publish()
        self.optimiser.zero_grad(set_to_none=True)
        if self.value is not None:
            self.value.step(taken=taken)
        return float(norm), taken

    @property
    def steps(self) -> int:
        """Optimiser steps taken so far, those before a checkpoint among them."""
        return max((int(state["step"]) for state in self.optimiser.state.values()), default=0)

    def _set_learning_rate(self) -> None:
        """Set the learning rate of the next step: it follows from the number of steps, which a checkpoint has."""
        for group in self.optimiser.param_groups:
            group["lr"] = self._options.learning_rate * self._schedule(self.steps)

    def state(self) -> dict[str, Tensor]:
        """Return masters and moments by name: what `set_state` needs to go on exactly from here."""
        tensors = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            tensors |= {f"{key}.{name}": value for key, value in self.optimiser.state.get(master, {}).items()}
        return tensors if self.value is None else {**tensors, **self.value.state()}

    @torch.no_grad()
    def set_state(self, tensors: dict[str, Tensor]) -> None:
        """Take masters and moments, and publish the weights.

        Raises:
            KeyError: a master is missing.
            ValueError: one has another shape.
        """
        for name, master in self.masters.items():
            if tensors[f"master.{name}"].shape != master.shape:
                raise ValueError(f"{name} is {tuple(tensors[f'master.{name}'].shape)}, here {tuple(master.shape)}")
        for name, master in self.masters.items():
            master.copy_(tensors[f"master.{name}"])
            moments = {key: tensors.get(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            self.optimiser.state.pop(master, None)
            if moments["step"] is not None:
                self.optimiser.state[master] = {
                    key: value.to(master.device, copy=True) for key, value in moments.items() if value is not None
                }
        if self.value is not None:
            self.value.set_state(tensors)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the working copy, in place: whoever holds a parameter has the new weights."""
        for name, parameter in self.working.items():
            if parameter is not self.masters[name]:
                parameter.copy_(self.masters[name])


def _of(adapter: str) -> str:
    """Match the names of one adapter's parameters: ``...q_proj.lora_A.NAME.weight``."""
    return rf"\.lora_\w+\.{re.escape(adapter)}\."


def _into(master: Tensor) -> Any:
    """Return a hook that adds a working copy's gradient to its master's, in float32, and frees it."""

    def add(parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:
            if master.grad is None:
                master.grad = gradient.float()
            else:
                master.grad.add_(gradient)

    return add


@contextmanager
def reference(model: LoadedModel, frozen: LoadedModel | None) -> Iterator[LoadedModel]:
    """Return the model that the policy started from: the frozen copy, or the model with its adapters switched off."""
    if frozen is not None:
        yield frozen
        return
    model.causal.disable_adapters()
    try:
        yield model
    finally:
        model.causal.enable_adapters()
