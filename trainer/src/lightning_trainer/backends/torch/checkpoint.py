"""Checkpoints: a model folder that transformers and ``lightning-rl serve`` load, together with the trainer's state.

No pickle: tensors are safetensors, the rest is JSON.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.torch.learn.adapters import (
    ADAPTER,
    check_same,
    has_adapters,
    saved_shape,
    select,
    shape_of,
)
from lightning_trainer.backends.torch.learn.policy import TrainedWeights
from lightning_trainer.backends.torch.model.load import LoadedModel, load
from lightning_trainer.backends.torch.model.quantised import write_dequantised
from lightning_trainer.backends.torch.model.quiet import quiet_libraries
from lightning_trainer.backends.torch.options import make_options
from lightning_trainer.engines.contract import PolicyEngines
from lightning_trainer.models.bases import NEEDED, AdapterBase, NumberFormat, read_base, read_format, write_format
from lightning_trainer.policies import ADAPTERS_NAME
from lightning_trainer.session.drafts import replace_folder

STATE = "trainer.json"
TENSORS = "trainer.safetensors"
_FORMAT = 1
_ADAPTER = re.compile(r"\.lora_\w+\.([^.]+)\.")


def fingerprint(model: LoadedModel) -> str:
    """Return a hash that identifies a model: names, shapes and first weights of its parameters before training."""
    digest = hashlib.sha256(model.causal.config.model_type.encode())
    for name, parameter in model.causal.named_parameters():
        if "lora_" in name:
            continue
        first = parameter.detach().flatten()[:64].float().cpu().numpy().tobytes()
        digest.update(f"{name}{tuple(parameter.shape)}".replace(".base_layer", "").encode() + first)
    return digest.hexdigest()


def save(
    folder: Path,
    model: LoadedModel,
    policies: Mapping[str | None, TrainedWeights],
    engine: PolicyEngines,
    base: str,
    *,
    resumable: bool = True,
) -> None:
    """Write a checkpoint atomically: into a folder next to it, which is then renamed.

    Args:
        folder: where to; existing content is replaced.
        model: weights in their working format, and the tokenizer. With LoRA only the adapters are written, with the
            location of their base model; several adapters each into their own folder, in peft's format.
        policies: masters and optimisers, by adapter; None stands for the only one.
        engine: its version and random state.
        base: fingerprint of the model that training started from.
        resumable: whether to write masters, moments and random state, from which a run resumes exactly.

    Raises:
        OSError: it cannot be written.
    """
    try:
        with replace_folder(folder.absolute()) as draft:
            model.tokenizer.save_pretrained(draft)
            for adapter, policy in policies.items():
                own = draft if adapter is None else draft / adapter
                write_adapter(model, adapter, own)
                model.tokenizer.save_pretrained(own)
                if resumable:
                    save_file(policy.state(), own / TENSORS)
            if resumable:
                state = _state_to_keep(model, policies, engine, base)
                (draft / STATE).write_text(json.dumps(state), encoding="utf-8")
            if adapters := [adapter.model for adapter in engine.engines[1:] if adapter.model in policies]:
                index = {"base": str(model.source.absolute()), "adapters": adapters}
                (draft / ADAPTERS_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            _write_needed(model, draft)
    except SafetensorError as error:  # contains the operating system's error number only in its text
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error)) from error


@quiet_libraries()
def write_adapter(model: LoadedModel, adapter: str | None, folder: Path) -> None:
    """Write one adapter as peft does, with the format of the model that it needs; None: all that the model has."""
    select(model, adapter)
    model.causal.save_pretrained(folder)
    _write_needed(model, folder)


def _write_needed(model: LoadedModel, folder: Path) -> None:
    """Write the number format of the frozen model, if there are adapters on it. A whole model's config.json has it."""
    if has_adapters(model):
        write_format(folder / NEEDED, NumberFormat(model.base_bits, _dtype_of(model)))


def _dtype_of(model: LoadedModel) -> str:
    return str(model.shape.dtype).removeprefix("torch.")


def _state_to_keep(
    model: LoadedModel, policies: Mapping[str | None, TrainedWeights], engine: PolicyEngines, base: str
) -> dict[str, Any]:
    """Return the state that `restore` compares and restores, without the tensors."""
    return {
        "format": _FORMAT,
        "base": base,
        "source": str(model.source.absolute()),
        "dtype": _dtype_of(model),
        "version": engine.engines[0].version,
        "versions": {adapter.model: adapter.version for adapter in engine.engines[1:] if adapter.model in policies},
        "trained": sorted(name for policy in policies.values() for name in policy.working),
        "random": engine.random.getstate(),
    }


def strip(folder: Path) -> None:
    """Remove what only `restore` needs; weights, tokenizer and the names of adapters stay."""
    for path in (folder / STATE, *folder.rglob(TENSORS)):
        path.unlink(missing_ok=True)


def format_options(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base_bits` and `dtype` for the model in a folder: of its adapters' training, if it is a checkpoint.

    Raises:
        ConfigError: other bits are requested than those of its training, or the file cannot be read.
    """
    asked, dtype = options.get("base_bits"), options.get("dtype") or "auto"
    number = read_format(folder / NEEDED)
    if number is None:
        return {"base_bits": asked, "dtype": dtype}
    if asked not in (None, number.bits):
        over = f"a model of {number.bits} bits" if number.bits else "a model that was not rounded"
        then = f"Set base_bits to {number.bits}" if number.bits else "Leave base_bits out"
        raise ConfigError(f"{folder} was trained over {over}, not over one of {asked} bits. {then}.")
    return {"base_bits": number.bits, "dtype": number.dtype or dtype if dtype == "auto" else dtype}


def write_base(folder: Path, out: Path, **options: Any) -> AdapterBase:
    """Write the model under a folder's adapters, with the rounded weights that they were trained over.

    Args:
        folder: a checkpoint, or one adapter in it.
        out: a folder that is empty or does not exist.
        options: fields of `TorchOptions`, such as the device that rounds.

    Raises:
        ConfigError: the adapters were trained over unrounded weights, or the folder has files.
    """
    base = read_base(folder)
    if base.bits is None:
        raise ConfigError(f"{folder} was not trained with base_bits. Serve its model itself: {base.folder}.")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} has files already. Name an empty folder.")
    model = load(make_options(base.folder, {**options, "base_bits": base.bits}))
    out.mkdir(parents=True, exist_ok=True)
    write_dequantised(model.causal, base.bits, base.folder, out)
    return base


def saved_adapters(folder: Path) -> tuple[Path, tuple[str, ...]] | None:
    """Return the folder of the base model and the names of the adapters in a checkpoint of several.

    Returns:
        None if the folder is not a checkpoint of several adapters.

    Raises:
        ConfigError: the index cannot be read or has an invalid name, or the base model is no longer there.
    """
    path = folder / ADAPTERS_NAME
    if not path.is_file():
        return None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        source, names = Path(index["base"]), tuple(str(name) for name in index["adapters"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} can't be read: {error}. Give another checkpoint.") from None
    for name in names or ("",):
        if name in ("", "..") or Path(name).name != name or (folder / name).is_symlink():
            raise ConfigError(f"{path} names an adapter {name!r}, which is not a folder in {folder}.")
    if not source.is_dir():
        raise ConfigError(
            f"{folder} holds adapters of {source}, which is not there. Write its place as base in {path}."
        )
    return source, names


def restore(
    folder: Path, model: LoadedModel, policies: Mapping[str | None, TrainedWeights], engine: PolicyEngines, base: str
) -> tuple[int, dict[str, int]]:
    """Read a checkpoint into policies and their engine, and return the version of the weights, and of each adapter.

    Raises:
        ConfigError: it is incomplete, or of another model, or other weights were trained.
    """
    state = _state(folder)
    trained, own = state.get("dtype"), _dtype_of(model)
    if trained not in (None, own):
        raise ConfigError(f"{folder} was trained in {trained}, and this run computes in {own}. Set --dtype {trained}.")
    if state["base"] != base:
        raise ConfigError(
            f"{folder} is a checkpoint of {state['source']}, not of {model.source}. Start from that model."
        )
    kinds = [_kind(names) for names in (state["trained"], [name for one in policies.values() for name in one.working])]
    if kinds[0] != kinds[1]:
        raise ConfigError(f"{folder} trained {kinds[0]}, this run trains {kinds[1]}. Use the same LoRA options.")
    places = {adapter: folder if adapter is None else folder / adapter for adapter in policies}
    if has_adapters(model):
        for adapter, place in places.items():
            check_same(saved_shape(place), shape_of(model, adapter), place)
    try:
        for adapter, policy in policies.items():
            policy.set_state(load_file(places[adapter] / TENSORS))
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise ConfigError(
            f"{folder}: {TENSORS} does not fit this model or is damaged: {error}. Resume from an earlier checkpoint of"
            " the run, or start a new run with its weights as --model."
        ) from error
    try:
        kind, numbers, gauss = state["random"]
        engine.random.setstate((kind, tuple(numbers), gauss))
        return int(state["version"]), {name: int(version) for name, version in state.get("versions", {}).items()}
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / STATE} is damaged: {error}. Give another checkpoint.") from error


def read_policy(folder: Path) -> dict[str, Tensor]:
    """Read the masters of one policy that `TorchLearner.save_policy` wrote.

    Raises:
        ConfigError: they cannot be read.
    """
    try:
        return load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{folder / TENSORS} can't be read: {error}. Restore {folder} from a copy, or delete it; then continue with"
            " --resume."
        ) from None


def _state(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not a checkpoint: it has no {STATE}. Give one from training.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / STATE} can't be read: {error}") from error
    if not isinstance(state, dict):
        raise ConfigError(f"{folder / STATE} is damaged. Give another checkpoint.")
    if state.get("format") != _FORMAT:
        raise ConfigError(f"{folder} is a checkpoint of format {state.get('format')}; this version reads {_FORMAT}.")
    if not state.keys() >= {"base", "source", "version", "trained", "random"}:
        raise ConfigError(f"{folder / STATE} is damaged. Give another checkpoint.")
    return state


def _kind(names: Iterable[str]) -> str:
    found = sorted({match[1] for name in names if (match := _ADAPTER.search(name))})
    if not found:
        return "all weights"
    return "LoRA adapters" if found == [ADAPTER] else f"the adapters {', '.join(found)}"
