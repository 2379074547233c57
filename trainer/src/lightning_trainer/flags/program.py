"""Options of commands that run a program on tasks: the program, its tasks, and how its attempts run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_spans.errors import ConfigError
from lightning_trainer.flags.common import config_options
from lightning_trainer.flags.group import F, group_options
from lightning_trainer.options.record import split_names

if TYPE_CHECKING:
    from lightning_trainer.work import Work

_REWARD: Final = "Reward function module:function, called as score(task, result)"


def _names(_context: click.Context, _option: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    names = None if value is None else split_names(value)
    if names == ():
        raise click.BadParameter("name at least one column.")
    return names


def data_option(*, required: bool = False) -> Callable[[F], F]:
    """Return the option that names the tasks."""
    return click.option(
        "--data",
        required=required,
        type=click.Path(path_type=Path),
        help="Tasks: a JSON Lines, JSON, CSV or Parquet file, a glob of such files, or the folder of a data set.",
    )


def program_options(*, judge: bool = False) -> Callable[[F], F]:
    """Return the options for a command instead of TARGET, and for the reward.

    Args:
        judge: whether a judge may give the reward.
    """
    return group_options(
        click.option("--command", "program", help="The agent as a command, instead of TARGET."),
        click.option("--reward", help=f"{_REWARD}, or judge." if judge else f"{_REWARD}."),
    )


def timeout_option(note: str = "") -> Callable[[F], F]:
    """Return the option for the time limit of an attempt; the note is added to its help."""
    text = "Time limit of an attempt, in seconds."
    return click.option("--timeout-s", type=click.FloatRange(0, min_open=True), help=f"{text}{note}")


workers_option = click.option("--workers", type=click.IntRange(1), help="Worker processes. Default: one per core.")
concurrency_option = click.option(
    "--concurrency", type=click.IntRange(1), help="Concurrent rollouts per worker. [default: 16]"
)
columns_option = click.option(
    "--columns",
    metavar="NAME,...",
    callback=_names,
    help="Columns of the tasks to read. Default: all, so each must be of a type that JSON can hold.",
)
isolate_option = click.option(
    "--isolate",
    is_flag=True,
    default=None,
    help="Run each attempt in its own process, which is ended together with every process that it started. Its run and"
    " score functions get the main thread, which signals need. One attempt at once per worker.",
)


def work_options(function: F) -> F:
    """Add the options of an agent command's work to one of our commands."""
    from lightning_trainer.options.work import WorkOptions

    return config_options(WorkOptions)(function)


def take_work(flags: dict[str, Any]) -> Work:
    """Remove the options of a command's work from the flags, and return the work.

    Raises:
        ConfigError: one has a wrong value.
    """
    from pydantic import ValidationError

    from lightning_trainer.config.mistakes import explain
    from lightning_trainer.options.work import WorkOptions

    values = {name: flags.pop(name, None) for name in WorkOptions.model_fields}
    try:
        return WorkOptions(**{name: value for name, value in values.items() if value is not None}).work
    except ValidationError as error:
        raise ConfigError(explain(error)) from None
