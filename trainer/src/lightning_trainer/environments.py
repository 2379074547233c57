"""Existing environments as task sources: a `verifiers` environment or an OpenEnv server becomes tasks and a target.

An environment has its own tasks, loop and reward. `open_environment` writes its tasks to a file and names the function
that runs the loop on one of them, with every model call sent to the attempt's gateway. Training, evaluation and
everything else then work as with any program and any task file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from lightning_spans.errors import ConfigError, DataError
from lightning_trainer import registry
from lightning_trainer.models import cache_folder

__all__ = ["EnvironmentKind", "OpenedEnvironment", "open_environment"]

Row: TypeAlias = dict[str, Any]

DEFAULT_TASKS: Final = 200
_OWN: Final = ("verifiers", "openenv")
NAMES: Final = ("env", "env_options", "env_tasks", "env_held_out")  # options
_PROGRAM: Final = ("target", "command", "data")


@dataclass(frozen=True, slots=True)
class OpenedEnvironment:
    """What a run needs from an environment.

    Attributes:
        target: ``module:function`` that runs the environment's loop on one task and returns its reward.
        data: file of its tasks.
        val: file of held-out tasks; None if none were requested.
    """

    target: str
    data: Path
    val: Path | None


class UnknownEnvironmentError(ConfigError):
    """An environment is not installed here, or its kind is not."""


class EnvironmentKind(Protocol):
    """Interface of a module for a kind of environments. It also has ``run(row)``, which returns the reward of one task.

    It is registered by the hook `lightning_register_environments`. ``run`` is imported by the agent's workers.
    """

    __name__: str

    def tasks(
        self, name: str, options: Mapping[str, Any], count: int, held_out: int
    ) -> tuple[Sequence[Row], Sequence[Row]]:
        """Return training tasks and held-out tasks, as JSON."""
        ...


def open_environment(
    name: str, options: Mapping[str, Any] | None = None, *, tasks: int = DEFAULT_TASKS, held_out: int = 0
) -> OpenedEnvironment:
    """Write an environment's tasks to files, and return the target that runs them.

    Args:
        name: ``verifiers:NAME`` or NAME, an installed environment of verifiers; ``openenv:URL`` or URL, a running
            OpenEnv server; KIND or ``KIND:NAME`` for a kind that a plugin registers.
        options: of the environment; see its kind.
        tasks: maximum number of training tasks.
        held_out: number of further tasks, for ``val``.

    Raises:
        ConfigError: the package or the environment is missing, or it rejects the options.
        DataError: it has too few tasks, or one that is not JSON.
    """
    kind, rest = _kind(name)
    source: EnvironmentKind = registry.by_name("environment", kind)
    own = dict(options or {})
    try:
        learned, held = source.tasks(rest, own, tasks, held_out)
    except UnknownEnvironmentError as error:
        if kind == name.partition(":")[0]:
            raise
        known = registry.unknown("environment", name, registry.offered_names("environment"))
        raise ConfigError(f"{known} Not a module of verifiers either: {error}") from error
    if not learned or len(held) < held_out:
        raise DataError(
            f"environment {name} has {len(learned) + len(held)} tasks, "
            f"and needs at least one training task and {held_out} held out. Hold out fewer."
        )
    place = cache_folder() / "environments"
    data = _write_tasks(place, rest, [{"environment": rest, "options": own, "task": task} for task in learned])
    val = _write_tasks(place, rest, [{"environment": rest, "options": own, "task": task} for task in held])
    return OpenedEnvironment(target=f"{source.__name__}:run", data=data, val=val if held else None)


def _kind(name: str) -> tuple[str, str]:
    kind, colon, rest = name.partition(":")
    if name.startswith(("http://", "https://", "ws://", "wss://")):
        return "openenv", name
    if kind in _OWN and colon and not rest:
        raise ConfigError(
            f"environment {name!r}: write verifiers:NAME, openenv:URL, the bare name of an environment of verifiers, or"
            " the bare URL of an OpenEnv server."
        )
    if colon or (kind not in _OWN and kind in registry.registrations("environment")):
        registry.by_name("environment", kind)  # raises if it is unknown
        return kind, rest
    return "verifiers", name


def target_of(name: str) -> str:
    """Return ``module:function`` of the function that runs an environment.

    Raises:
        ConfigError: the kind of environments is unknown.
    """
    source: EnvironmentKind = registry.by_name("environment", _kind(name)[0])
    return f"{source.__name__}:run"


def _write_tasks(folder: Path, name: str, rows: Sequence[Row]) -> Path:
    """Write tasks under a name derived from their content, so that a resumed run finds its own."""
    try:
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise DataError(f"environment {name} has a task that can't be kept as JSON: {error}.") from None
    plain = "".join(letter if letter.isalnum() else "-" for letter in name).strip("-")[-60:]
    path = folder / f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    if rows and not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    return path


def to_open(values: Mapping[str, Any]) -> bool:
    """Return whether options name an environment that is not opened yet.

    The options of a run that has begun contain both the environment and the target and files that it was opened to.

    Raises:
        ConfigError: an option that the environment sets is given as well, or environment options without an
            environment.
    """
    if values.get("env") is None:
        if others := [name for name in NAMES if values.get(name)]:
            raise ConfigError(f"{others[0]} is an option of env. Name an environment with env.")
        return False
    if values.get("data") is not None and values.get("target") == target_of(str(values["env"])):
        return False
    if doubled := [name for name in _PROGRAM if values.get(name) is not None]:
        raise ConfigError(f"env provides the program and the tasks: leave out {' and '.join(doubled)}.")
    if values.get("env_held_out") is not None and values.get("val") is not None:
        raise ConfigError("env_held_out and val both set the held-out tasks. Give one of them.")
    return True


def placeholder_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return placeholders for an environment's target and files until it is opened, to check the other options."""
    pending = {"target": f"{__name__}:run", "data": Path()}
    return pending if values.get("env_held_out") is None else {**pending, "val": Path()}


def open_as_options(
    env: str, options: Mapping[str, Any] | None, tasks: int | None = None, held_out: int | None = None
) -> dict[str, Any]:
    """Open an environment, and return its target and files as options: target, data, and val if tasks are held out."""
    found = open_environment(env, options, tasks=tasks or DEFAULT_TASKS, held_out=held_out or 0)
    return {"target": found.target, "data": found.data, **({} if found.val is None else {"val": found.val})}


def of_a_run(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a resumed run, so that its environment is opened again if needed.

    Args:
        values: the options with which it began.
        given: those given again.

    Returns:
        Without the environment's target and files, if an environment option is given again or a file of tasks is
            missing. The program that runs it is the current version's, even if an earlier version wrote another.
    """
    if values.get("env") is None:
        return dict(values)
    files = [Path(values[name]) for name in ("data", "val") if values.get(name) is not None]
    anew = any(name in given for name in NAMES) or not all(file.exists() for file in files)
    if not anew:
        return {**values, "target": target_of(str(values["env"]))}
    came = {"target", "data"} if values.get("env_held_out") is None else {"target", "data", "val"}
    return {name: value for name, value in values.items() if name not in came}
