"""The options that name an environment, the same for a flag, a file and `TrainConfig`: what goes with them, and not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.environments import DEFAULT_TASKS, open_environment, target_of

NAMES: Final = ("env", "env_options", "env_tasks", "env_held_out")
_PROGRAM: Final = ("target", "command", "data")


def to_open(values: Mapping[str, Any]) -> bool:
    """Return whether options name an environment that is not opened yet.

    Options of a run that began have both: the environment, and the target and the files that came of it.

    Raises:
        ConfigError: what is the environment's is given besides it, or options of an environment without one.
    """
    if values.get("env") is None:
        if others := [name for name in NAMES if values.get(name)]:
            raise ConfigError(f"{others[0]} is of an env. Name one.")
        return False
    if values.get("data") is not None and values.get("target") == target_of(str(values["env"])):
        return False
    if doubled := [name for name in _PROGRAM if values.get(name) is not None]:
        raise ConfigError(f"env gives the program and the tasks: leave out {' and '.join(doubled)}.")
    if values.get("env_held_out") is not None and values.get("val") is not None:
        raise ConfigError("env_held_out and val are two sets of held-out tasks. Give one of them.")
    return True


def unopened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands for an environment's target and files until it is opened, for a look at the other options."""
    pending = {"target": f"{__package__}:run", "data": Path()}
    return pending if values.get("env_held_out") is None else {**pending, "val": Path()}


def opened(
    env: str, options: Mapping[str, Any] | None, tasks: int | None = None, held_out: int | None = None
) -> dict[str, Any]:
    """Open an environment, and return its target and files as options: target, data, and val where tasks are held out.

    Raises:
        LightningError: see `open_environment`.
    """
    found = open_environment(env, options, tasks=tasks or DEFAULT_TASKS, held_out=held_out or 0)
    return {"target": found.target, "data": found.data, **({} if found.val is None else {"val": found.val})}


def of_a_run(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that goes on, so that its environment is opened again where that is needed.

    Args:
        values: the options that it began with.
        given: those given anew.

    Returns:
        Without what came of the environment, where it is named anew or its tasks are not there any more.
    """
    files = [Path(values[name]) for name in ("data", "val") if values.get(name) is not None]
    anew = any(name in given for name in NAMES) or not all(file.exists() for file in files)
    if values.get("env") is None or not anew:
        return dict(values)
    came = {"target", "data"} if values.get("env_held_out") is None else {"target", "data", "val"}
    return {name: value for name, value in values.items() if name not in came}
