"""LoRA adapters: those that a model gets, and checks that existing ones match the options."""

from __future__ import annotations

import json
import logging
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch.model.load import LoadedModel
from lightning_trainer.backends.torch.model.quiet import quiet_libraries
from lightning_trainer.backends.torch.options import TorchOptions
from lightning_trainer.models import check_adapter

ADAPTER = "default"
_TAKEN = {"base_layer", "lora_A", "lora_B"}  # names that peft adds to those of parameters


class LoraShape(NamedTuple):
    """The properties that make adapters with the same weights different policies, named like their options."""

    lora_rank: int
    lora_alpha: float
    lora_targets: tuple[str, ...]


def shape_of(model: LoadedModel, adapter: str | None = None) -> LoraShape:
    """Return the shape of one of a model's adapters; None stands for the only one."""
    return _shape(vars(model.causal.peft_config[adapter or ADAPTER]))


def saved_shape(folder: Path) -> LoraShape:
    """Read the shape of an adapter's folder.

    Raises:
        ConfigError: its configuration cannot be read.
    """
    try:
        return _shape(json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder} is not a PEFT adapter: {error}. Give another checkpoint.") from None


def check_same(saved: LoraShape, now: LoraShape, place: Path) -> None:
    """Check that saved adapters resume with the same shape.

    Raises:
        ConfigError: one has another rank, scale or other modules; names the option, and both values.
    """
    for name, was, has in zip(LoraShape._fields, saved, now, strict=True):
        if was != has:
            raise ConfigError(
                f"{place} was trained with {name} {_words(was)}, this run has {_words(has)}. Use the same LoRA options."
            )


@quiet_libraries()
def add_adapters(model: LoadedModel, options: TorchOptions, saved: Path | None = None) -> None:
    """Add the requested LoRA adapters, which start as no change; a folder that has adapters keeps its own.

    Args:
        model: gets them.
        options: of the adapters.
        saved: folder of a checkpoint; an adapter in it resumes from there. New ones next to it get its scale and
            modules, if the options name none.

    Raises:
        ConfigError: the folder's adapters do not match the options, or no module has one of the names.
    """
    if has_adapters(model) and options.adapters:
        raise ConfigError(
            f"{model.source} has LoRA adapters, and adapters of agents need a model without adapters. Use the base"
            " model."
        )
    if has_adapters(model):
        _check_asked(shape_of(model), options, model.source)
        return
    names = options.served or ((ADAPTER,) if options.lora_rank else ())
    there = [name for name in options.adapters if saved is not None and (saved / name).is_dir()]
    for name in there:
        _load(model, saved / name, options)  # type: ignore[operator]  # one is there
        check_same(shape_of(model, there[0]), shape_of(model, name), saved / name)  # type: ignore[operator]
    for name in names:
        if name in there:
            continue
        if name in options.fixed:
            place = saved or model.source
            raise ConfigError(
                f"there is no adapter {name} in {place} to keep. Give a checkpoint that has it as --model."
            )
        _add(model, name, options)


def _load(model: LoadedModel, folder: Path, options: TorchOptions) -> None:
    """Add an adapter from its folder.

    Raises:
        ConfigError: it cannot be read, or does not match the options.
    """
    check_adapter(folder)
    try:
        with _several():
            found = model.causal.load_adapter(str(folder), adapter_name=folder.name, use_safetensors=True)
    except (
        OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, ImportError, SafetensorError,
    ) as error:  # fmt: skip
        raise ConfigError(f"the adapter {folder} can't be loaded: {error}") from error
    lacking = [name for name in found.missing_keys if name.endswith(f".{folder.name}.weight")]
    if lacking or found.unexpected_keys:
        raise ConfigError(
            f"the adapter {folder} does not belong to this model: {len(lacking)} weights are missing in it, "
            f"and the model does not have {len(found.unexpected_keys)} others. Give the model that it was trained over."
        )
    _check_asked(shape_of(model, folder.name), options, folder)


def _check_asked(found: LoraShape, options: TorchOptions, place: Path) -> None:
    """Refuse an option that differs from an existing adapter's.

    An option that was left out takes the adapter's value.
    """
    asked = {
        "lora_rank": options.lora_rank or None,
        "lora_alpha": options.lora_alpha,
        "lora_targets": None if options.lora_targets is None else tuple(sorted(set(options.lora_targets))),
    }
    for name, value in found._asdict().items():
        if asked[name] not in (None, value):
            raise ConfigError(
                f"{place} has LoRA adapters with {name} {_words(value)}, not {_words(asked[name])}. Set {name} to that."
            )


def _shape(config: Mapping[str, Any]) -> LoraShape:
    """Return an adapter's shape from peft's configuration, as an object's fields or as JSON."""
    targets = config["target_modules"]
    return LoraShape(
        int(config["r"]),
        float(config["lora_alpha"]),
        (targets,) if isinstance(targets, str) else tuple(sorted(targets)),
    )


def _words(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else f"{value:g}"


def _add(model: LoadedModel, name: str, options: TorchOptions) -> None:
    from peft import LoraConfig

    causal = model.causal
    if name in _TAKEN | {part for parameter, _ in causal.named_parameters() for part in parameter.split(".")}:
        raise ConfigError(
            f"an adapter can't be named {name!r}: a part of the model has that name, and peft would lose the adapter's"
            " weights. Give it another name: AGENT=lora:NAME."
        )
    beside = next(iter(causal.peft_config.values())) if has_adapters(model) else None
    scale: Any = options.lora_alpha or (beside.lora_alpha if beside else 2 * options.lora_rank)  # peft's type is int
    targets = options.lora_targets or (beside.target_modules if beside else _linear_names(causal))
    config = LoraConfig(
        r=options.lora_rank,
        lora_alpha=scale,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(model.source.resolve()),
    )
    with torch.random.fork_rng(devices=[]), _several():
        # Each starts from its own random state, whatever others there are.
        torch.manual_seed(options.seed if name == ADAPTER else options.seed + zlib.crc32(name.encode()))
        try:
            causal.add_adapter(config, adapter_name=name)
        except ValueError as error:
            raise ConfigError(f"lora_targets: {error}") from None


@contextmanager
def _several() -> Iterator[None]:
    """Suppress the libraries' warnings about a second adapter, which is intended.

    peft warns that there are two, and transformers that the file of the second lacks the weights of the first.
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


def target_names(model: LoadedModel) -> tuple[str, ...]:
    """Return the names of the layers that have LoRA adapters; empty if there are none, or a pattern names them."""
    targets = [config.target_modules for config in (getattr(model.causal, "peft_config", None) or {}).values()]
    if any(isinstance(names, str) for names in targets):
        return ()
    return tuple(sorted({name for names in targets for name in names}))


def _linear_names(causal: Any) -> list[str]:
    """Return the names of all linear layers except the head; peft's own `all-linear` needs a wrapped model."""
    head = causal.get_output_embeddings()
    return sorted({name.rpartition(".")[2] for name, module in _outermost(causal) if module is not head})


def _outermost(module: torch.nn.Module, path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield linear layers and LoRA's wrappers of such, not the layers inside a wrapper."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear) or hasattr(child, "base_layer"):
            yield f"{path}{name}", child
        else:
            yield from _outermost(child, f"{path}{name}.")


def select(model: LoadedModel, adapter: str | None) -> None:
    """Activate one of the model's adapters, for training and for peft's own computations; None: there is only one."""
    if adapter is not None:
        model.causal.set_adapter(adapter)


@torch.no_grad()
def fill_copy(model: LoadedModel, copy: str, policy: str, masters: Mapping[str, torch.Tensor]) -> None:
    """Round the masters of a policy into the adapter that is its copy, as a policy's own are rounded.

    Raises:
        KeyError: a master is missing.
    """
    for name, parameter in model.causal.named_parameters():
        if f".{copy}." in name:
            parameter.copy_(masters[f"master.{name.replace(f'.{copy}.', f'.{policy}.')}"])
