"""Where verl puts the checkpoints of a run: ``RUN/checkpoints/global_step_N``, each with a model for transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_CHECKPOINT: Final = re.compile(r"global_step_[0-9]+")
_ALL: Final = "checkpoints"
_MODEL: Final = "actor/huggingface"


def verl_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint by verl that a folder is, or the one that the folder is the model of; None: neither."""
    folder = folder.resolve()
    checkpoint = folder.parent.parent if folder.match(_MODEL) else folder
    is_by_verl = checkpoint.parent.name == _ALL and _CHECKPOINT.fullmatch(checkpoint.name)
    return checkpoint if is_by_verl else None


def step_of(checkpoint: Path) -> int:
    """Return the number of steps after which verl made a checkpoint."""
    return int(checkpoint.name.removeprefix("global_step_"))
