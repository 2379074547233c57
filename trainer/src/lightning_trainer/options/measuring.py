"""Options of commands that run a program on tasks without training it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from lightning_trainer.options.limits import LimitOptions
from lightning_trainer.options.program import TargetOptions
from lightning_trainer.options.record import OptionRecord
from lightning_trainer.work import Work


class RequestOptions(OptionRecord):
    """How answers are sampled if nothing is learned from them: as the agents' requests specify."""

    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature, set on all calls. Default: the temperature in the request."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of an answer if the request sets no limit."""
    sampling: Literal["plain", "asked"] = "asked"
    """`plain` ignores top_p, top_k, min_p and penalties in requests, as in training; `asked` applies them."""
    name_by: tuple[str, ...] = ()
    """Rules that name the agents of calls without an agent header. Default: those of the run."""
    load: dict[str, Any] = Field(default_factory=dict)
    """Further options of the backend that loads weights."""


class MeasuringOptions(RequestOptions, LimitOptions, TargetOptions):
    """A program to run on tasks."""

    data: Path
    """Tasks: a JSON Lines, JSON, CSV or Parquet file, a glob of such files, or the folder of a data set."""
    columns: tuple[str, ...] = ()
    """Columns of the tasks to read. Default: all, so each must be of a type that JSON can hold."""
    work: Work = Field(default_factory=Work)
    """Of a command: where it works, and what gives its reward."""
