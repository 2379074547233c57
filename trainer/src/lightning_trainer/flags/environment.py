"""`--env` and its related options, worded identically for commands without a `TrainConfig`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer import environments as environment
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.group import F, group_options
from lightning_trainer.options.environment import EnvironmentOptions

_OPTIONS: Final = {
    "env": field_option(
        EnvironmentOptions,
        "env",
        metavar="NAME",
        text="Environment to use instead of TARGET and --data: the module name of a verifiers"
        " environment, the URL of an OpenEnv server, or one that a plugin registers. It provides"
        " the tasks, the loop and the reward. Needs --model or --endpoint.",
    ),
    "env_options": field_option(EnvironmentOptions, "env_options", text="Option of the environment. May be repeated."),
    "env_tasks": field_option(
        EnvironmentOptions,
        "env_tasks",
        metavar="N",
        text="Maximum number of tasks to take from the environment. [default: 200]",
    ),
}


def environment_options(*, tasks: bool = True) -> Callable[[F], F]:
    """Return the options that name an environment.

    Args:
        tasks: whether to include the option for the number of tasks, for commands that have no such option.
    """
    return group_options(*(option for name, option in _OPTIONS.items() if tasks or name != "env_tasks"))


def with_environment(flags: dict[str, Any]) -> dict[str, Any]:
    """Return a command's flags with the environment's target and data instead of `--env`.

    Args:
        flags: as returned by `given`, with ``target``; ``program`` is `--command`.

    Raises:
        LightningError: the environment cannot be opened, no model or endpoint is named, or a program is also named.
    """
    left = {name: value for name, value in flags.items() if name not in environment.NAMES}
    if not environment.to_open({**flags, "command": flags.get("program")}):
        return left
    if flags.get("model") is None and flags.get("endpoint") is None:
        raise ConfigError("--env needs --model or --endpoint.")
    return {**left, **environment.open_as_options(flags["env"], flags.get("env_options"), flags.get("env_tasks"))}
