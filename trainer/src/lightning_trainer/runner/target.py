"""The user's own functions: found by `module:function`, checked before anything starts."""

from __future__ import annotations

import importlib
import inspect
import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from lightning_spans.errors import ConfigError
from lightning_trainer.work import Work

JUDGE: Final = "judge"  # the reward that a judge gives, once all rollouts of a group have ended


class ProgramOptions(Protocol):
    """Options that determine what runs: every command's configuration has them."""

    @property
    def target(self) -> str | None: ...  # noqa: D102
    @property
    def command(self) -> str | None: ...  # noqa: D102
    @property
    def reward(self) -> str | None: ...  # noqa: D102
    @property
    def work(self) -> Work: ...  # noqa: D102
    @property
    def isolate(self) -> bool: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a runner runs for each rollout.

    Attributes:
        target: ``module:function``, called as run(task); None if `command` is given.
        command: program and arguments, started for each attempt; None if `target` is given.
        reward: ``module:function``, called as score(task, result); None: the agent gives the reward; `JUDGE`: the
            agent's result is not a reward, because a judge gives it later.
        needs_reward: whether an attempt without a reward is an error.
        work: for a command: its working folder, and the command that gives its reward.
        isolate: whether each attempt gets a separate process, and its functions the main thread.
        withheld: files and folders that no work folder contains, such as keys and the run's own folder.
    """

    target: str | None = None
    command: str | None = None
    reward: str | None = None
    needs_reward: bool = True
    work: Work = field(default_factory=Work)
    isolate: bool = False
    withheld: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.work, dict):  # the form in which it reaches a worker
            object.__setattr__(self, "work", Work(**self.work))
        self.work.check(command=self.command, reward=self.reward)

    @classmethod
    def of(cls, options: ProgramOptions, *, needs_reward: bool = True, withheld: Iterable[Path] = ()) -> Job:
        """Return the job of a configuration; the others are attributes of the job."""
        return cls(
            target=options.target, command=options.command, reward=options.reward, needs_reward=needs_reward,
            work=options.work, isolate=options.isolate, withheld=tuple(str(each.absolute()) for each in withheld),
        )  # fmt: skip

    @property
    def judged(self) -> bool:
        """Whether a judge gives the reward."""
        return self.reward == JUDGE


def load_function(spec: str, *, option: str, parameters: tuple[str, ...], yields: bool = False) -> Callable[..., Any]:
    """Import a function of the user, with the current folder on the path.

    Args:
        spec: ``module:function``; the part after the colon may have dots.
        option: its name in messages: ``target`` or ``reward``.
        parameters: names of its arguments, by position.
        yields: whether it may yield its values, as automatic rewards may.

    Raises:
        ConfigError: it cannot be imported, does not exist, is not a function, takes other parameters, or yields.
    """
    module_name, colon, path = spec.partition(":")
    if not (module_name and colon and path):
        raise ConfigError(f"{option} {spec!r}: write it as module:function, for example my_app:run.")
    _check_module_name(module_name, path, spec, option)
    found: Any = _import(module_name, spec, option)
    for name in path.split("."):
        if not hasattr(found, name):
            raise ConfigError(f"{option} {spec!r}: {module_name} has no {path!r}.{_functions_of(found)}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{option} {spec!r} is not a function but of type {type(found).__name__}. Name a function.")
    if inspect.isclass(found):
        raise ConfigError(
            f"{option} {spec!r} is a class, not a function. Name a function, or an object's method: app.run."
        )
    _check_signature(found, spec, option, parameters)
    if not yields and (inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found)):
        raise ConfigError(f"{option} {spec!r} is a generator, but must return one value. Use return instead of yield.")
    return found  # type: ignore[no-any-return]


def split_command(command: str, *, folder: str | None = None, image: str | None = None) -> list[str]:
    """Split a command like a shell, and check that its program exists.

    Args:
        command: as the user wrote it.
        folder: where it will run, if that is a separate folder: a program in it is not checked now.
        image: of the container in which it will run, which contains its program.

    Raises:
        ConfigError: it cannot be split, is empty, or its program is not found or is a script without an interpreter.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"command {command!r}: {error}. Check its quotes.") from None
    if not words:
        raise ConfigError("command is empty. Give the program and its arguments, such as 'node agent.js'.")
    if image is not None or (folder is not None and not words[0].startswith(("/", "~")) and "/" in words[0]):
        return words  # a program in that folder, or in the image
    program = shutil.which(words[0])
    if program is None:
        raise ConfigError(f"command {command!r}: no program {words[0]!r} is found. Check the path, or install it.")
    if _lacks_interpreter(Path(program)):
        raise ConfigError(
            f"command {command!r}: {words[0]} is a script whose first line does not name its interpreter. Add a first"
            f" line such as #!/bin/sh, or give the interpreter: 'sh {words[0]}'."
        )
    return words


def _lacks_interpreter(program: Path) -> bool:
    """Whether a file is plain text without ``#!``: a shell would run it, and the system does not."""
    try:
        with program.open("rb") as file:
            start = file.read(256)
    except OSError:  # it may be executable but not readable
        return False
    text = all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in start)
    return os.name == "posix" and bool(start) and text and not start.startswith(b"#!")


def _check_module_name(module_name: str, function: str, spec: str, option: str) -> None:
    """Reject a path in place of a module: ``my_app.py``, ``src/my_app.py``."""
    if not (set(module_name) & {"/", "\\"} or Path(module_name).is_file()):
        return
    file = Path(module_name)
    start = "" if file.parent == Path() else f", and start in {file.parent}"
    name = file.name.removesuffix(".py")
    raise ConfigError(f"{option} {spec!r} is the path of a file. Name its module, {name}:{function}{start}.")


def _import(module_name: str, spec: str, option: str) -> Any:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{option} {spec!r} can't be imported: there is no module {error.name!r} in {folder} or on the path. "
                "Start in the folder that holds it."
            ) from None
        raised = f"{module_name} raises {type(error).__name__}: {error}{_where(error)}{_install(error)}"
        raise ConfigError(f"{option} {spec!r} can't be imported: {raised}") from error


def _where(error: BaseException) -> str:
    """Return where the user's code failed: the last frame that is not Python's own import machinery."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
    frames = [f for f in frames if f.filename != __file__]
    return f"\n  at {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}" if frames else ""


def _install(error: BaseException) -> str:
    """Return how to install a plugin, if that is what is missing."""
    name = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if not name.startswith("lightning_") or "." in name:
        return ""
    package = name.replace("_", "-")
    plugin = package.removeprefix("lightning-")
    return f"\nIf that is our plugin {package}: from a clone, uv pip install ./core ./plugins/openai ./plugins/{plugin}"


def _functions_of(module: Any) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == getattr(module, "__name__", None) and name[0] != "_"
    ]
    return f" Its functions: {', '.join(names)}." if names else ""


def _check_signature(function: Callable[..., Any], spec: str, option: str, parameters: tuple[str, ...]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some callables written in C have none
    try:
        signature.bind(*parameters)
    except TypeError:
        name = spec.partition(":")[2]
        wanted = f"{name}({', '.join(parameters)})"
        raise ConfigError(
            f"{option} {spec!r} has the wrong signature: it is {name}{signature}, "
            f"and it is called as {wanted}. Give it these parameters; any more need defaults."
        ) from None
