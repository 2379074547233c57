"""The state to resume learning from, kept in the run's folder until it has finished: of the loop and of the learner.

The learner's part is complete before the file names it, and stays until the file names a newer one. So whenever a
process is killed, one of the two is there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.backend_protocol import Learner
from lightning_trainer.config.files import read_kept
from lightning_trainer.config.passwords import with_passwords
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.run.folders import run_folder

CHECKPOINT: Final = "checkpoint"  # in the run's folder: only the weights, of the best step or the newest round
_SLOTS: Final = ("resume-a", "resume-b")  # also there: the learner's part, in one of them


def keep(folder: Path, name: str, values: Mapping[str, Any], learner: Learner, before: str) -> str:
    """Save the state of learning.

    Args:
        folder: of the run.
        name: of the file.
        values: content of the file; ``weights`` is added.
        learner: its weights, master weights and moments are saved.
        before: ``weights`` of the previous save, which is removed; "" if there was none.

    Returns:
        ``weights``: the folder of the learner's part.
    """
    weights = next(slot for slot in _SLOTS if slot != before)
    learner.save(folder / weights)
    write_atomically(folder / name, (json.dumps({**values, "weights": weights}, indent=2) + "\n").encode())
    if before:
        shutil.rmtree(folder / before, ignore_errors=True)
    return weights


def read(folder: Path, name: str) -> dict[str, Any]:
    """Read the state of learning.

    Raises:
        ConfigError: nothing was saved, or it cannot be read.
    """
    try:
        values: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
        return dict(values)
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} can't be resumed: nothing was saved yet, or it is finished. Start a new run; to start from its"
            f" weights, give --model {folder / CHECKPOINT}."
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise damaged_file(folder, name, error) from None


def damaged_file(folder: Path, name: str, error: Exception) -> ConfigError:
    """Return the error for a file with unexpected content."""
    return ConfigError(f"{folder / name} can't be read: {error!r}. Start a new run.")


def forget(folder: Path, name: str) -> None:
    """Remove what only resuming needs."""
    (folder / name).unlink(missing_ok=True)
    for slot in _SLOTS:
        shutil.rmtree(folder / slot, ignore_errors=True)


@contextmanager
def learning_folder(out: Path | None, resume: Path | None) -> Iterator[Path]:
    """Open the folder of a run, and remove what a killed process left half written.

    Raises:
        ConfigError: see `run_folder`.
    """
    with run_folder(out, resume) as folder:
        for name in (CHECKPOINT, *_SLOTS):
            for left in folder.glob(f".{name}.*"):
                shutil.rmtree(left, ignore_errors=True)
        yield folder


def began_with(folder: Path, again: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read the options that learning began with, except those that were not set.

    Args:
        folder: of the run.
        again: options, from which those that had a password are taken.

    Raises:
        ConfigError: they cannot be read, or one that had a password is not given again.
    """
    values = with_passwords(read_kept(folder, "Start a new run."), again or {})
    return {name: value for name, value in values.items() if value is not None and name != "out"}
