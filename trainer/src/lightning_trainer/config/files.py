"""Sources of options: TOML files, flags, the folder of an earlier run."""

from __future__ import annotations

import difflib
import json
import logging
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel

from lightning_spans.errors import ConfigError
from lightning_trainer import environments as environment
from lightning_trainer.config.defaults import without_defaults
from lightning_trainer.config.mistakes import refuse_unknown
from lightning_trainer.config.passwords import refuse_hidden, without_passwords
from lightning_trainer.config.train import TrainConfig

logger = logging.getLogger(__name__)

CONFIG_NAME: Final = "config.json"  # the configuration, in the run's folder
_MOST_KEPT: Final = 4 << 20  # most characters read from it
_MOST_DEPTH: Final = 20  # deepest nesting allowed in it
_TABLES: Final = (
    "rewards",
    "policies",
    "credit_options",
    "backend_options",
)  # whose entries are read from folders that anyone may have written
_OF_COMMANDS: Final = (
    "workdir", "restore", "reward_command", "sandbox", "sandbox_image", "sandbox_read", "sandbox_env",
)  # fmt: skip
# Alternatives that an option replaces: a flag replaces these in the file, and the file these of an earlier run.
_INSTEAD: Final[Mapping[str, tuple[str, ...]]] = {
    "steps": ("epochs",),
    "epochs": ("steps",),
    "target": ("command", *_OF_COMMANDS, *environment.NAMES),
    "command": ("target", *environment.NAMES),
    "env": ("target", "command", "data", *_OF_COMMANDS),
    "reward": ("restore", "reward_command"),
    "reward_command": ("reward",),
    "env_held_out": ("val",),
    "val": ("env_held_out",),
}


def merge(file: Path | None, flags: Mapping[str, Any], base: Mapping[str, Any] | None = None) -> TrainConfig:
    """Build the configuration from a TOML file and command-line flags. Flags take precedence over the file.

    A flag NAME=VALUE replaces only this entry of a table. A table in the file replaces the whole table of `base`.

    Args:
        file: TOML file; None: none.
        flags: options by field name; None: not given.
        base: options over which both take precedence.

    Raises:
        ConfigError: see `TrainConfig`; or an option of `base` had a password, which is not stored.
    """
    own = read_toml(file) if file is not None else {}
    given = {name: value for name, value in flags.items() if value is not None}
    began = environment.of_a_run(base or {}, {**own, **given})
    plain = {name: field.default for name, field in TrainConfig.model_fields.items()}
    try:
        began = without_defaults(began, {**own, **given}, plain)
        below = _over(began, own)
        merged = _over(below, _with_entries(below, given, plain))
        refuse_hidden(merged)
        return TrainConfig(**merged)
    except ConfigError as error:
        told = [name for name in own if name not in given and f"{error}".startswith(f"{name} = ")]
        raise ConfigError(f"config file {file}: {error}") if told else error from None


def _over(values: Mapping[str, Any], nearer: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which nearer ones replace the same options and their alternatives."""
    replaced = {other for one in nearer for other in _INSTEAD.get(one, ())}
    return {**{name: value for name, value in values.items() if name not in replaced}, **nearer}


def _with_entries(values: Mapping[str, Any], flags: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return flags in which each table also has the entries of the same table in `values` that it does not replace.

    Entries are left out if the flags change what they belong to, such as the credit of `credit_options`.
    """
    filled = dict(flags)
    for name, table in flags.items():
        choice = name.removesuffix("_options") if name.endswith("_options") else None
        before = values.get(choice, plain.get(choice)) if choice else None
        below = values.get(name)
        if isinstance(table, Mapping) and isinstance(below, Mapping) and name != "policies":
            filled[name] = {**below, **table} if choice is None or flags.get(choice, before) == before else table
    return filled


def read_toml(path: Path) -> dict[str, Any]:
    """Read options from a TOML file.

    Raises:
        ConfigError: the file is missing, is not TOML, or has an unknown key.
    """
    values = parse_toml(path)
    with naming_file(path):
        if tables := [key for key, value in values.items() if isinstance(value, dict) and _is_heading(key)]:
            raise ConfigError(f"options are at the top of the file, not in a table. Remove [{tables[0]}].")
        refuse_unknown(values, TrainConfig.model_fields)
    return values


def parse_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file with any keys.

    Raises:
        ConfigError: the file is missing, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror}. Give the path of a TOML file.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} is not TOML: {error}") from None


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Name the file in an error about its contents."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"config file {path}: {error}") from None


def read_kept(folder: Path, otherwise: str) -> dict[str, Any]:
    """Read the options stored in a run's folder.

    Args:
        folder: of a run.
        otherwise: what to do if they cannot be read, for the error.

    Raises:
        ConfigError: they cannot be read.
    """
    path = folder / CONFIG_NAME
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait, and a device never ends
            raise ValueError("it is not a file")
        with path.open(encoding="utf-8") as file:
            values = json.loads(file.read(_MOST_KEPT))
        json.dumps(values, ensure_ascii=False).encode()  # a lone surrogate cannot be shown
        if _is_deeper(values, _MOST_DEPTH):
            raise ValueError(f"it is nested deeper than {_MOST_DEPTH} levels")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}. {otherwise}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} is not a JSON object, so it contains no options. {otherwise}")
    if wrong := [name for name in _TABLES if not isinstance(values.get(name) or {}, dict)]:
        raise ConfigError(f"{path}: {', '.join(wrong)} is not a JSON object. {otherwise}")
    if not isinstance(values.get("tool_format"), str | None):
        raise ConfigError(f"{path}: tool_format is not a text. {otherwise}")
    return values


def read_shown(folder: Path) -> dict[str, Any]:
    """Read the options stored in a run's folder, for a list of runs; {} with one warning if they cannot be read."""
    try:
        return read_kept(folder, "The run is shown without its options.")
    except ConfigError as error:
        _warn(str(error))
        return {}


@cache
def _warn(text: str) -> None:
    """Log a warning once, because the viewer reads the file repeatedly."""
    logger.warning("%s", text)


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    within = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in within)


def _is_heading(key: str) -> bool:
    """Whether a table's key is neither an option nor a misspelt one."""
    return not difflib.get_close_matches(key, TrainConfig.model_fields, n=1, cutoff=0.8)


def to_json(config: BaseModel) -> str:
    """Return a configuration as JSON text, as stored in the run's folder; see `without_passwords`."""
    return json.dumps(without_passwords(config.model_dump(mode="json")), indent=2) + "\n"
