"""Checkpoints: a model folder that transformers and ``lightning-rl serve`` load, and beside it the trainer's state.

No pickle: tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch.engine import TorchEngine
from lightning_trainer.backends.torch.model import LoadedModel
from lightning_trainer.backends.torch.policy import Policy

STATE = "trainer.json"
TENSORS = "trainer.safetensors"
_FORMAT = 1


def fingerprint(model: LoadedModel) -> str:
    """Tell one model from another by the names, shapes and first weights of its parameters, before they are trained."""
    digest = hashlib.sha256(model.causal.config.model_type.encode())
    for name, parameter in model.causal.named_parameters():
        if "lora_" in name:
            continue
        first = parameter.detach().flatten()[:64].float().cpu().numpy().tobytes()
        digest.update(f"{name}{tuple(parameter.shape)}".replace(".base_layer", "").encode() + first)
    return digest.hexdigest()


def save(folder: Path, model: LoadedModel, policy: Policy, engine: TorchEngine, base: str) -> None:
    """Write a checkpoint, whole or not at all: into a folder beside it that then takes its name.

    Args:
        folder: where to; what is there is replaced.
        model: weights in their working format, and the tokenizer. With LoRA only the adapters are written, with the
            place of the model that they belong to.
        policy: masters and optimiser.
        engine: its version and random state.
        base: fingerprint of the model that training started from.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        model.causal.save_pretrained(unfinished)
        model.tokenizer.save_pretrained(unfinished)
        save_file(policy.state(), unfinished / TENSORS)
        state = {
            "format": _FORMAT,
            "base": base,
            "source": str(model.source.absolute()),
            "version": engine.version,
            "trained": sorted(policy.working),
            "random": engine.random.getstate(),
        }
        (unfinished / STATE).write_text(json.dumps(state), encoding="utf-8")
        for path in unfinished.rglob("*"):
            _sync(path)
        _sync(unfinished)
        _replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def restore(folder: Path, model: LoadedModel, policy: Policy, engine: TorchEngine, base: str) -> int:
    """Read a checkpoint into a policy and its engine, and give the version of its weights.

    Raises:
        ConfigError: it is incomplete, or of another model, or other weights were trained.
    """
    state = _state(folder)
    if state["base"] != base:
        raise ConfigError(
            f"{folder} is a checkpoint of {state['source']}, not of {model.source}. Start from that model."
        )
    if state["trained"] != sorted(policy.working):
        kinds = [_kind(names) for names in (state["trained"], policy.working)]
        raise ConfigError(f"{folder} trained {kinds[0]}, this run trains {kinds[1]}. Use the same LoRA options.")
    try:
        policy.set_state(load_file(folder / TENSORS))
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{folder}: {TENSORS} does not fit this model or is damaged: {error}") from error
    kind, numbers, gauss = state["random"]
    engine.random.setstate((kind, tuple(numbers), gauss))
    return int(state["version"])


def _state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} is no checkpoint: it has no {STATE}. Give a folder that training wrote.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / STATE} can't be read: {error}") from error
    if state.get("format") != _FORMAT:
        raise ConfigError(f"{folder} is a checkpoint of format {state.get('format')}; this version reads {_FORMAT}.")
    return state


def _kind(names: Iterable[str]) -> str:
    return "LoRA adapters" if any("lora_" in name for name in names) else "all weights"


def _sync(path: Path) -> None:
    """Have a file's content, or a folder's entries, on disk before going on."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _replace(new: Path, folder: Path) -> None:
    """Give a finished folder its name; what had the name is there until then."""
    old = new.with_name(new.name + ".old")
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)
