"""The folder of a run: where it is, when there is something in it to keep, and the options that it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.config.files import CONFIG_NAME, read_kept
from lightning_trainer.models import NEWEST
from lightning_trainer.report.metrics import LOG_NAME, read
from lightning_trainer.report.runs import is_run
from lightning_trainer.run.state import FOLDER, find
from lightning_trainer.session.folder import in_use, is_held, open_folder

RUNS: Final = Path("runs")  # where runs without a folder of their own go


@contextmanager
def run_folder(out: Path | None, resume: Path | None = None) -> Iterator[Path]:
    """Lock the folder of a run that is resumed, or make a new one: see `session.folder.open_folder`.

    Raises:
        ConfigError: the folder can't be made, is another process's, lies in another run's, or holds anything but a run
            that came to nothing.
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
        yield folder


def _check_outside(out: Path) -> None:
    """Refuse a folder in another run's: `runs` would not list it, and that run clears its own when it begins anew.

    Raises:
        ConfigError: it lies in one.
    """
    for parent in out.resolve().parents:
        if is_run(parent):
            raise ConfigError(f"{out} lies in the folder of the run {parent}. Choose another --out.")


def _came_to_nothing(folder: Path) -> bool:
    ours = is_run(folder)
    steps = ours and any(line["kind"] == "train" for line in read(folder / LOG_NAME))
    return ours and not steps and not (folder / NEWEST).exists() and not (folder / FOLDER).exists()


def read_config(resume: Path) -> dict[str, Any]:
    """Read the options of a run that goes on, from its folder; those that were not set are left out.

    Raises:
        ConfigError: there is no run to go on from, another process trains in it and has written no checkpoint yet, or
            its options can't be read.
    """
    if not (resume / NEWEST).exists() and is_held(resume):
        raise ConfigError(in_use(resume))
    run, _ = find(resume)
    values = read_kept(run, "Give all options again.")
    return {name: value for name, value in values.items() if value is not None and name != "out"}
