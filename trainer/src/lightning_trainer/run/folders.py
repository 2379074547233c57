"""The folder of a run: its location, whether it contains anything to keep, and the options in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.config.files import CONFIG_NAME, read_kept
from lightning_trainer.models import NEWEST
from lightning_trainer.models.verl_folders import verl_checkpoint
from lightning_trainer.report.log.lines import read
from lightning_trainer.report.metrics import LOG_NAME
from lightning_trainer.report.runs import is_run
from lightning_trainer.run.state import FOLDER, find
from lightning_trainer.session.drafts import clear_drafts
from lightning_trainer.session.folder import in_use, is_held, open_folder

RUNS: Final = Path("runs")  # where runs without a named folder go


@contextmanager
def run_folder(out: Path | None, resume: Path | None = None) -> Iterator[Path]:
    """Lock the folder of a resumed run, or create a new one; see `session.folder.open_folder`.

    Hidden checkpoints that a killed process left in it are removed.

    Raises:
        ConfigError: the folder cannot be created, is in use by another process, is within another run's, or contains
            anything except a run that did not begin.
    """
    if out is not None and resume is None:
        _check_outside(out)
    with open_folder(
        out,
        resume,
        base=RUNS,
        begun=lambda folder: (folder / CONFIG_NAME).exists(),
        resumable=lambda folder: (folder / NEWEST).exists(),
        came_to_nothing=_came_to_nothing,
        keep_interrupted=False,
    ) as folder:
        clear_drafts(folder / FOLDER)
        yield folder


def _check_outside(out: Path) -> None:
    """Reject a folder within another run's: `runs` would not list it, and that run clears its own when it restarts.

    Raises:
        ConfigError: it is within one.
    """
    for parent in out.resolve().parents:
        if is_run(parent):
            raise ConfigError(f"{out} is inside the run folder {parent}. Choose another --out.")


def _came_to_nothing(folder: Path) -> bool:
    ours = is_run(folder)
    steps = ours and any(line["kind"] == "train" for line in read(folder / LOG_NAME))
    return ours and not steps and not (folder / NEWEST).exists() and not (folder / FOLDER).exists()


def read_config(resume: Path) -> dict[str, Any]:
    """Read the options of a continued run from its folder; those that were not set are left out.

    Raises:
        ConfigError: there is no run to continue, another process trains in it and has written no checkpoint yet, or its
            options cannot be read.
    """
    if not (resume / NEWEST).exists() and is_held(resume):
        raise ConfigError(in_use(resume))
    checkpoint = verl_checkpoint(resume / NEWEST if (resume / NEWEST).exists() else resume)
    run = find(resume)[0] if checkpoint is None else checkpoint.parent.parent
    values = read_kept(run, "Give all options again.")
    return {name: value for name, value in values.items() if value is not None and name != "out"}
