"""Reads the configuration of a loop, and rejects invalid options before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from lightning_spans.errors import ConfigError
from lightning_trainer.config.files import naming_file, parse_toml
from lightning_trainer.config.mistakes import refuse_unknown
from lightning_trainer.kits.loop.config import LoopConfig
from lightning_trainer.kits.loop.methods.names import find_method
from lightning_trainer.kits.loop.separation import refuse_production_server

_OF_COMMAND: Final = ("target", "store", "key_file")


def read_loop(file: Path, target: str, store: str, key_file: Path | None) -> LoopConfig:
    """Read the configuration, and reject invalid options before anything is started.

    Raises:
        ConfigError: an option is invalid; the message says where and why.
    """
    values = parse_toml(file)
    with naming_file(file):
        refuse_unknown(values, {name: None for name in LoopConfig.model_fields if name not in _OF_COMMAND})
        config = _validate({**values, "target": target, "store": store, "key_file": key_file})
        _check(config)
    refuse_production_server(config)
    return config


def _validate(values: dict[str, Any]) -> LoopConfig:
    try:
        return LoopConfig(**values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        name = ".".join(map(str, problem["loc"]))
        if problem["type"] == "missing":
            table = name == "train"
            raise ConfigError(
                f"{name} is missing. Write {'the table [train]' if table else f'{name} = ...'}."
            ) from None
        if problem["type"] == "extra_forbidden":
            raise ConfigError(f"unknown option {name!r}. See docs/how-to/loop.md.") from None
        message = f"{problem['msg'][0].lower()}{problem['msg'][1:]}"
        raise ConfigError(f"{name} = {problem['input']!r}: {message}.") from None


def _check(config: LoopConfig) -> None:
    config.canary.rules  # noqa: B018 - or refuse
    config.shadow_rules  # noqa: B018 - or refuse
    method = find_method(config.method)
    if method.needs_base and config.base is None:
        raise ConfigError("base is missing. Write base = ..., the model of the server that the candidate belongs to.")
    method.check(config)
