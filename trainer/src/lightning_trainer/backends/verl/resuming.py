"""Resuming a run: its newest checkpoint from verl, and whether it is the same run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.models import NEWEST
from lightning_trainer.models.verl_folders import step_of, verl_checkpoint
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.run.state import State, check_identity, set_link

_IDENTITY: Final = "identity.json"
_NEWEST: Final = "latest_checkpointed_iteration.txt"  # verl's
_PARTS: Final = "fsdp_config.json"  # verl's


def find_checkpoint(resume: Path, identity: Mapping[str, Any], *, accelerators: int) -> Path:
    """Find verl's checkpoint to resume from: the one that is named, or the newest complete one of a run.

    Args:
        resume: a run's folder, or one of its checkpoints.
        identity: what must be the same for the next batch to be the same.
        accelerators: number of them, all nodes together.

    Raises:
        ConfigError: there is none, or it is from another run or from another number of accelerators.
    """
    checkpoint = verl_checkpoint(resume) or _newest_checkpoint(resume)
    run = checkpoint.parent.parent
    if not (checkpoint / "actor").is_dir():  # verl removes only this of an old checkpoint
        raise ConfigError(
            f"{checkpoint} contains no weights: verl keeps those of the newest checkpoints (keep). Resume from the"
            f" newest: --resume {run}."
        )
    check_identity(State(step=step_of(checkpoint), identity=_read(run / _IDENTITY)), identity, checkpoint)
    told = checkpoint / "actor" / _PARTS
    if told.is_file() and (parts := _read(told)["world_size"]) != accelerators:
        raise ConfigError(
            f"{checkpoint} holds weights and moments in parts for {parts} GPUs, not {accelerators}. "
            "Resume with the same gpus and nodes, or start a new run from its weights, without --resume:"
            f" --model {checkpoint}/actor/huggingface."
        )
    return checkpoint


def note_identity(folder: Path, identity: Mapping[str, Any]) -> None:
    """Write the identity into the run's folder."""
    write_atomically(folder / _IDENTITY, json.dumps(dict(identity)).encode())


def make_newest(run: Path, checkpoint: Path) -> None:
    """Make a checkpoint the newest one of its run, so that `--resume RUN` means it and not an abandoned later one."""
    link_newest(run, checkpoint)
    write_atomically(checkpoint.parent / _NEWEST, str(step_of(checkpoint)).encode())


def link_newest(run: Path, checkpoint: Path) -> None:
    """Link the run's `checkpoint` to the model folder of one of its checkpoints."""
    set_link(run.resolve() / NEWEST, (checkpoint / "actor" / "huggingface").resolve())


def _newest_checkpoint(run: Path) -> Path:
    checkpoints = run.resolve() / "checkpoints"
    try:
        number = int((checkpoints / _NEWEST).read_text(encoding="ascii"))
    except (OSError, ValueError):
        raise ConfigError(f"{run} contains no checkpoint of a run on verl. Give a run's folder.") from None
    return checkpoints / f"global_step_{number}"


def _read(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}. Is this the folder of a run on verl?") from None
    return values
