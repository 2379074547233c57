"""Environments of `verifiers`, by the name of their installed module.

Two generations are supported. From verifiers 0.4 on, and for modules of ``verifiers.v1`` before: tasksets, played by
harnesses; an option is a dotted path into the environment's configuration (``taskset.num_tasks``,
``agent.harness.id``), as for ``verifiers``' own commands. Before 0.4: modules with ``load_environment``; an option is
one of its arguments.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_spans.schema.spans import Json
from lightning_trainer.environments import UnknownEnvironmentError

INSTALL: Final = 'Run: pip install "lightning-trainer[verifiers]"'


def tasks(
    name: str, options: Mapping[str, Any], count: int, held_out: int
) -> tuple[Sequence[dict[str, Json]], Sequence[dict[str, Json]]]:
    """Return training tasks and held-out ones.

    Raises:
        ConfigError: verifiers or the environment is not installed, or it rejects the options.
    """
    generation = _generation(name)
    try:
        return generation.tasks(name, options, count, held_out)  # type: ignore[no-any-return]
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"environment {name} can't be loaded: {type(error).__name__}: {error}") from error


async def run(task: dict[str, Any]) -> float | dict[str, float]:
    """Run the environment's own loop on one of its tasks.

    Args:
        task: a row of `tasks`, with the environment's name and options.

    Returns:
        The reward of its rubric; by agent if the environment has several.
    """
    # In a thread because the import takes seconds, and other attempts run meanwhile.
    generation = await asyncio.to_thread(_generation, task["environment"])
    found: float | dict[str, float] = await generation.play(task["environment"], task["options"], task["task"])
    return found


def _generation(name: str) -> Any:
    """Return the module that reads this environment.

    Raises:
        ConfigError: verifiers or the environment is not installed, or they are of different generations.
    """
    try:
        importlib.import_module("verifiers")
    except ImportError as error:
        raise UnknownEnvironmentError(
            f"environment {name!r} is one of verifiers, which can't be imported: {error}. {INSTALL}"
        ) from None
    module = module_name(name)
    if not _is_there(f"verifiers.v1.tasksets.{module}") and hasattr(_import(name, module), "load_environment"):
        return importlib.import_module("lightning_trainer.kits.environments.verifiers_classic")
    if not _is_there("verifiers.v1.taskset"):
        raise ConfigError(
            f"environment {name!r} has no load_environment, and this verifiers is older than 0.4. Update it."
        )
    importlib.import_module("verifiers.v1")
    return importlib.import_module("lightning_trainer.kits.environments.verifiers_tasksets")


def module_name(name: str) -> str:
    """Return the module of an environment, whose name may be that of a hub, ``owner/name@version``."""
    return name.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _import(name: str, module: str) -> Any:
    if (folder := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module
        kind = UnknownEnvironmentError if missing else ConfigError
        why = f"there is no module {module!r}. Install it" if missing else f"{type(error).__name__}: {error}"
        raise kind(f"environment {name!r} of verifiers can't be imported: {why}.") from error
