"""Find the model that ``--model`` names: a local folder, a hub id, or ``smollm2-135m``. No torch at import."""

from __future__ import annotations

from pathlib import Path

from lightning_spans.errors import ConfigError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def check_folder(folder: Path) -> None:
    """Make sure that a model folder has its parts.

    Raises:
        ConfigError: it is missing, or lacks a configuration, a tokenizer or weights; the message says which.
    """
    if not folder.is_dir():
        raise ConfigError(f"model folder {folder} does not exist. Give a folder, a hub id, or smollm2-135m.")
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ConfigError(f"{folder} has no config.json, so it is not a model folder of transformers.")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES[:3]):
        raise ConfigError(f"{folder} has no tokenizer (tokenizer.json). Save it there with tokenizer.save_pretrained.")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ConfigError(f"{folder} has no weights (*.safetensors).")
