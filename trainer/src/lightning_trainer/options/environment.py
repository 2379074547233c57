"""Options of an existing environment, which gives the tasks and runs the program."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from lightning_trainer.options.record import OptionRecord


class EnvironmentOptions(OptionRecord):
    """The environment to use, and how many of its tasks."""

    env: str | None = None
    """Environment to use instead of target and data: the module name of a verifiers environment, the URL of an OpenEnv
    server, or one that a plugin registers. It provides the tasks, the loop and the reward."""
    env_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment."""
    env_tasks: int | None = Field(default=None, ge=1)
    """Maximum number of tasks to take from the environment. Default: 200."""
    env_held_out: int | None = Field(default=None, ge=1)
    """Number of further tasks of the environment to hold out, as with val."""
