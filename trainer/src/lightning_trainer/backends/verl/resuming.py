"""Going on with a run: its newest checkpoint of verl's, and whether it is the same run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.checkpoints import State, check_identity
from lightning_trainer.config import TrainConfig
from lightning_trainer.data import digest, load_tasks
from lightning_trainer.metrics import write_atomically

_IDENTITY: Final = "identity.json"
_NEWEST: Final = "latest_checkpointed_iteration.txt"  # verl's


def newest_checkpoint(config: TrainConfig) -> Path:
    """Find verl's newest whole checkpoint in the folder to go on from.

    Raises:
        ConfigError: there is none, or the run was another one.
    """
    folder = Path(config.resume or ".").resolve()
    if folder.name.startswith("global_step_"):
        folder = folder.parent.parent
    if config.out is not None and config.out.resolve() != folder:
        raise ConfigError(f"a run goes on in its own folder, {folder}, not in {config.out}. Leave --out away.")
    try:
        number = int((folder / "checkpoints" / _NEWEST).read_text(encoding="ascii"))
    except (OSError, ValueError):
        raise ConfigError(f"{config.resume} holds no checkpoint of a run on verl. Give a run's folder.") from None
    checkpoint = folder / "checkpoints" / f"global_step_{number}"
    state = State(step=number, identity=_read(folder / _IDENTITY))
    check_identity(state, identity_of(config), checkpoint)
    return checkpoint


def identity_of(config: TrainConfig) -> dict[str, Any]:
    """Give what must be the same for the next batch to be the same."""
    return {
        "data": digest(load_tasks(config.data)),
        "batch_size": config.batch_size,
        "group_size": config.group_size,
        "seed": config.seed,
    }


def note_identity(folder: Path, config: TrainConfig) -> None:
    """Keep it in the run's folder."""
    write_atomically(folder / _IDENTITY, json.dumps(identity_of(config)).encode())


def _read(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}. Is this the folder of a run on verl?") from None
    return values
