"""Check that a folder has the parts of a model."""

from __future__ import annotations

import json
from contextvars import ContextVar
from pathlib import Path
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_trainer.policies import ADAPTERS_NAME

_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")
_LONGEST_CONFIG: Final = 20 << 20  # bytes
_MOST_LAYERS: Final = 10_000
_LONGEST_HEADER: Final = 100_000_000  # bytes; also the limit of safetensors


SIZES_ALONE: Final[ContextVar[bool]] = ContextVar("a configuration is enough", default=False)  # for plans


def check_folder(folder: Path) -> None:
    """Check that a model folder has its parts.

    Raises:
        ConfigError: it is missing, lacks a configuration, a tokenizer or some of its weights, or has an incomplete file
            of weights; the message says which.
    """
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist.")
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json", ADAPTERS_NAME)):
        raise ConfigError(f"{folder} has no config.json, so it is not a model folder of transformers.")
    _check_config(folder / "config.json")
    if not SIZES_ALONE.get():
        _check_contents(folder)


def _check_contents(folder: Path) -> None:
    """Check that a folder has a tokenizer and all weights: `check_folder`."""
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ConfigError(f"{folder} has no tokenizer (tokenizer.json). Save it there with tokenizer.save_pretrained.")
    if not any(folder.glob("*.safetensors")) and not (folder / ADAPTERS_NAME).is_file():
        raise ConfigError(f"{folder} has no weights (*.safetensors). Save them there with model.save_pretrained.")
    for weights in sorted(folder.glob("*.safetensors")):
        if not _is_whole(weights):
            raise ConfigError(f"{weights} is cut or damaged. Copy or fetch it again.")
    whole = (folder / "model.safetensors").is_file()  # then transformers reads no index
    for index in () if whole else sorted(folder.glob("*.safetensors.index.json")):
        if missing := sorted(name for name in _shards(index) if not (folder / name).is_file()):
            raise ConfigError(
                f"{folder} lacks {len(missing)} of the files of weights that {index.name} names, {missing[0]} among"
                " them. Copy or fetch them."
            )
    check_adapter(folder)


def _check_config(path: Path) -> None:
    """Reject a configuration for which transformers would build endless layers before it reads a weight.

    Raises:
        ConfigError: it is larger than any configuration, is not a JSON object, or names more layers than any model has.
    """
    if not path.is_file():
        return
    try:
        if path.stat().st_size > _LONGEST_CONFIG:
            raise ConfigError(
                f"{path} has {path.stat().st_size} bytes, more than any model needs. Do not load this folder."
            )
        values = json.loads(path.read_text(encoding="utf-8"))
        parts = [values, *(part for part in values.values() if isinstance(part, dict))]
    except (ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(f"{path} is not a JSON object: {error}. Copy or fetch it again.") from None
    for name, value in (item for part in parts for item in part.items()):
        if name.endswith(("layer", "layers")) and isinstance(value, int) and value > _MOST_LAYERS:
            raise ConfigError(f"{path} says {name} = {value}, more than any model has. Do not load this folder.")


def _is_whole(weights: Path) -> bool:
    """Whether a file of weights has a header and the length that the header declares. Reads only a few kilobytes."""
    try:
        with weights.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = weights.stat().st_size - 8 - length
            if size < 0 or length > _LONGEST_HEADER:
                return False
            tensors = json.loads(file.read(length))
        ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
        return size == max(ends, default=0)
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):  # whatever the file contains
        return False


def _shards(index: Path) -> set[str]:
    """Return the names of the files that an index lists."""
    try:
        return {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError):
        raise ConfigError(f"{index} is cut or damaged. Copy or fetch it again.") from None


def check_adapter(folder: Path) -> None:
    """Check that an adapter's folder has its weights where peft reads them without pickle. Other folders pass.

    Raises:
        ConfigError: it has an adapter's configuration without ``adapter_model.safetensors``, or the configuration names
            a module which peft would import.
    """
    path = folder / "adapter_config.json"
    if not path.is_file():
        return
    if not (folder / "adapter_model.safetensors").is_file():
        raise ConfigError(f"{folder} is an adapter without adapter_model.safetensors, and pickle files are never read.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        named = values.get("megatron_config")
    except (OSError, ValueError, RecursionError, AttributeError) as error:
        raise ConfigError(f"{path} is not a JSON object: {error}. Copy or fetch it again.") from None
    if named is not None:
        raise ConfigError(f"{path} has megatron_config, which makes peft import a module. Do not load this folder.")
