"""Options of tasks: the file, and which parts of it are read."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from lightning_trainer.options.record import Names, OptionRecord


class TaskOptions(OptionRecord):
    """The tasks."""

    data: Path
    """Tasks: a JSON Lines, JSON, CSV or Parquet file, a glob of such files, or the folder of a Hugging Face data
    set."""


class ColumnOptions(OptionRecord):
    """Which columns of the tasks are read."""

    columns: Names = ()
    """Columns of the tasks to read. Default: all, so each must be of a type that JSON can hold."""


class CountOptions(OptionRecord):
    """How many of the tasks are used."""

    tasks: int | None = Field(default=None, ge=1)
    """Use only the first N tasks."""


class HeldOutOptions(OptionRecord):
    """How held-out tasks are measured."""

    val_samples: int = Field(default=1, ge=1)
    """Rollouts per held-out task, sampled as in training."""
