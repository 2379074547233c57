"""The folder of a run: made when it starts, found again when it goes on, left as it was when nothing came of it."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.checkpoints import FOLDER, NEWEST, find
from lightning_trainer.metrics import LOG_NAME, read

CONFIG_NAME: Final = "config.json"
STORE_NAME: Final = "lightning.db"


def make_folder(out: Path | None, base: Path = Path("runs")) -> Path:
    """Make a run's folder: the one asked for, or one named after the day.

    What an earlier run left there that never took a step is cleared away.

    Raises:
        ConfigError: the folder holds anything else, or can't be made.
    """
    try:
        if out is None:
            return _dated(base)
        out.mkdir(parents=True, exist_ok=True)
        if _came_to_nothing(out):
            shutil.rmtree(out)
            out.mkdir()
        if any(out.iterdir()):
            raise ConfigError(f"{out} is not empty. Choose another --out, or go on from it with --resume {out}.")
    except OSError as error:
        raise ConfigError(f"the run's folder {out or base} can't be made: {error.strerror}. Choose --out.") from None
    return out


def _dated(base: Path) -> Path:
    day, number = dt.datetime.now().astimezone().date().isoformat(), 1
    base.mkdir(parents=True, exist_ok=True)
    while True:
        folder = base / (day if number == 1 else f"{day}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def _came_to_nothing(folder: Path) -> bool:
    ours = (folder / CONFIG_NAME).is_file() and (folder / LOG_NAME).is_file()
    steps = ours and any(line["kind"] == "train" for line in read(folder / LOG_NAME))
    return ours and not steps and not (folder / NEWEST).exists() and not (folder / FOLDER).exists()


def read_config(resume: Path) -> dict[str, Any]:
    """Read the options of a run that goes on, from its folder; those that were not set are left out.

    Raises:
        ConfigError: there is no run to go on from, or its options can't be read.
    """
    run, _ = find(resume)
    try:
        values: dict[str, Any] = json.loads((run / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run / CONFIG_NAME} can't be read: {error}. Give all options again.") from None
    return {name: value for name, value in values.items() if value is not None and name != "out"}
