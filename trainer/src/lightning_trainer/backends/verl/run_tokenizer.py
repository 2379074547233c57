"""The tokenizer of a run, in all its checkpoints: verl writes the model's own, without the run's chat template."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Final

from lightning_trainer.config.train import TrainConfig
from lightning_trainer.models.tokenizers import load_tokenizer

_FOLDER: Final = "tokenizer"  # in the run's folder, which verl's processes read


def open_tokenizer(config: TrainConfig, run: Path) -> Any:
    """Load the tokenizer that renders the run's conversations, and keep it in the run's folder.

    Raises:
        ConfigError: see `load_tokenizer`.
    """
    tokenizer = load_tokenizer(config.model, config.chat_template, config.system_messages)
    tokenizer.save_pretrained(run / _FOLDER)
    return tokenizer


def put_tokenizer(run: Path, model: Path) -> None:
    """Put the run's tokenizer into a model folder, in place of the one there."""
    shutil.copytree(run / _FOLDER, model, dirs_exist_ok=True)
