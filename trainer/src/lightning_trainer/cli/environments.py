"""`--env` and what goes with it: an environment that exists gives the program and the tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from lightning_spans.errors import ConfigError
from lightning_trainer.cli.options import GroupedOption

F = TypeVar("F", bound=Callable[..., Any])

_GROUP: Final = "What runs, and on what"
_NAMES: Final = ("env", "env_options", "env_tasks", "env_held_out")


def environment_options(*, held_out: bool = False) -> Callable[[F], F]:
    """Add the options that name an environment.

    Args:
        held_out: whether the command has held-out tasks, too.
    """

    def decorate(function: F) -> F:
        options = [
            click.option(
                "--env",
                metavar="NAME",
                help="Instead of TARGET and --data: an environment of verifiers by its module's name, or an OpenEnv"
                " server by its URL. It gives the tasks, the loop and the reward.",
                cls=GroupedOption,
            ),
            click.option(
                "--env-option",
                "env_options",
                multiple=True,
                metavar="NAME=VALUE",
                help="Option of the environment. May be repeated.",
                cls=GroupedOption,
            ),
            click.option(
                "--env-tasks",
                type=click.IntRange(1),
                metavar="N",
                help="Take at most so many of its tasks. [default: 200]",
                cls=GroupedOption,
            ),
            click.option(
                "--env-held-out",
                type=click.IntRange(1),
                metavar="N",
                help="Hold so many others out, as --val does. [default: none]",
                cls=GroupedOption,
            ),
        ]
        for option in reversed(options if held_out else options[:-1]):
            function = option(function)
            function.__click_params__[-1].group = _GROUP  # type: ignore[attr-defined]
        return function

    return decorate


def with_environment(flags: dict[str, Any]) -> dict[str, Any]:
    """Return a command's flags with the environment's target and data in place of `--env`.

    Args:
        flags: as `given` gives them, with ``target``.

    Raises:
        LightningError: the environment can't be opened, or something else is named besides it.
    """
    env, options, tasks, held_out = (flags.get(name) for name in _NAMES)
    left = {name: value for name, value in flags.items() if name not in _NAMES}
    if env is None:
        if others := [name for name in _NAMES if flags.get(name) not in (None, ())]:
            raise ConfigError(f"--{others[0].replace('_', '-').replace('options', 'option')} is of an --env. Name one.")
        return left
    program = {"target": "TARGET", "command": "--command", "program": "--command", "data": "--data"}
    if doubled := [word for name, word in program.items() if left.get(name) is not None]:
        raise ConfigError(f"--env gives the program and the tasks: leave out {' and '.join(doubled)}.")
    if held_out is not None and left.get("val") is not None:
        raise ConfigError("--env-held-out and --val are two sets of held-out tasks. Give one of them.")
    from lightning_trainer.environments import DEFAULT_TASKS, open_environment

    opened = open_environment(env, options, tasks=tasks or DEFAULT_TASKS, held_out=held_out or 0)
    val = {} if opened.val is None else {"val": opened.val}
    return {**left, "target": opened.target, "data": opened.data, **val}
