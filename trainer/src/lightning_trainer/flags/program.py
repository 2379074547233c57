"""Options of commands that run a program on tasks: the program, its tasks, and how its attempts run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from lightning_spans.errors import ConfigError
from lightning_trainer.flags.common import config_options
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.group import F, group_options
from lightning_trainer.options.limits import LimitOptions
from lightning_trainer.options.measuring import MeasuringOptions
from lightning_trainer.options.program import TargetOptions
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
    return field_option(MeasuringOptions, "data", required=required)


def program_options(*, judge: bool = False) -> Callable[[F], F]:
    """Return the options for a command instead of TARGET, and for the reward.

    Args:
        judge: whether a judge may give the reward.
    """
    return group_options(
        field_option(TargetOptions, "command", dest="program", text="The agent as a command, instead of TARGET."),
        field_option(TargetOptions, "reward", text=f"{_REWARD}, or judge." if judge else f"{_REWARD}."),
    )


def timeout_option(note: str = "") -> Callable[[F], F]:
    """Return the option for the time limit of an attempt; the note is added to its help."""
    return field_option(LimitOptions, "timeout_s", text=f"{LimitOptions.model_fields['timeout_s'].description}{note}")


workers_option = field_option(
    LimitOptions, "workers", type=click.IntRange(1), text="Worker processes. Default: one per core."
)
concurrency_option = field_option(LimitOptions, "concurrency")
columns_option = field_option(MeasuringOptions, "columns", metavar="NAME,...", callback=_names)
isolate_option = field_option(LimitOptions, "isolate")


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
