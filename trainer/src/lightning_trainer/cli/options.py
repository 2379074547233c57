"""Options that several commands share, and values read from them."""

from __future__ import annotations

import json
import os
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import click

from lightning_spans.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from rich.console import Console

    from lightning_spans.store import Store

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_STORE: Final = "lightning.db"  # where attach() writes outside a runner

store_option = click.option(
    "--store",
    default=DEFAULT_STORE,
    show_default=True,
    metavar="URL",
    help="A path, sqlite:///, postgresql:// or http://.",
)
key_file_option = click.option(
    "--key-file", type=click.Path(path_type=Path), help="File with the server's key; else LIGHTNING_KEY."
)

rewards_option = click.option(
    "--rewards",
    "automatic",
    multiple=True,
    metavar="NAME=WEIGHT",
    help="Show what this automatic rule would give, too, as in training. May be repeated.",
)


@contextmanager
def reading(url: str, key_file: Path | None) -> Iterator[Store]:
    """Open a store that is there already, to read it.

    Raises:
        ConfigError: there is none.
    """
    from lightning_spans.store import open_store

    path = Path(url.removeprefix("sqlite:///")) if "://" not in url or url.startswith("sqlite:///") else None
    if path is not None and not path.is_file():
        raise ConfigError(
            f"there is no store {path}. Run the agent once with attach(), or give the store of a run: "
            "--store runs/.../lightning.db"
        )
    store = open_store(url, key=read_key(key_file))
    try:
        yield store
    finally:
        store.close()


def read_key(key_file: Path | None) -> str | None:
    """Read a key from its file, else from the environment.

    Raises:
        ConfigError: the file can't be read.
    """
    if key_file is None:
        return os.environ.get("LIGHTNING_KEY")
    try:
        return key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"key file {key_file} can't be read: {error}. The server names its key file.") from None


def config_options(*, leave_out: frozenset[str] = frozenset()) -> Callable[[F], F]:
    """Make a command-line option of every field of `TrainConfig`: the field is the one home of name, help and default.

    Values arrive as text; `TrainConfig` checks them, so that a flag and a file fail with the same words.
    """
    from lightning_trainer.config import TrainConfig

    def decorate(function: F) -> F:
        for name, field in reversed(TrainConfig.model_fields.items()):
            if name not in leave_out:
                function = _option(name, field)(function)
        return function

    return decorate


def _option(name: str, field: FieldInfo) -> Callable[[F], F]:
    flag = f"--{name.replace('_', '-')}"
    text = " ".join((field.description or "").split()).replace("`", "")
    if field.default not in (None, "") and not field.is_required() and field.default_factory is None:
        shown = str(field.default).lower() if isinstance(field.default, bool) else field.default
        text += f" [default: {shown}]"
    if field.annotation is bool:
        return click.option(f"{flag}/--no-{name.replace('_', '-')}", name, default=None, help=text)
    if name == "policies":
        return click.option("--policy", "--policies", name, multiple=True, metavar="AGENT=POLICY,...", help=text)
    if typing.get_origin(field.annotation) is dict:
        return click.option(flag, name, multiple=True, metavar="NAME=VALUE", help=f"{text} May be repeated.")
    return click.option(flag, name, metavar=_metavar(field.annotation), help=text)


def _metavar(annotation: Any) -> str:
    parts = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    names = []
    for part in (part for part in parts if part is not type(None)):
        if typing.get_origin(part) is Literal:
            names += [str(value) for value in typing.get_args(part)]
        elif typing.get_origin(part) is tuple:
            names.append("NAME,...")
        else:
            names.append({int: "N", float: "X", Path: "PATH"}.get(part, "TEXT"))
    return "|".join(names)


def given(flags: dict[str, Any]) -> dict[str, Any]:
    """Keep the flags that were given; NAME=VALUE pairs become a dictionary with JSON values, or text where it is none.

    Raises:
        ConfigError: a pair has no equals sign.
    """
    kept = {name: value for name, value in flags.items() if value is not None and value != ()}
    for name, value in kept.items():
        if isinstance(value, tuple) and name != "policies":  # whose commas `TrainConfig` reads
            kept[name] = dict(_pair(name, item) for item in value)
    return kept


def _pair(option: str, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ConfigError(f"--{option.replace('_', '-')} {text!r}: write it as NAME=VALUE.")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def screen() -> Console:
    """Give stdout for tables and trees: as wide as the terminal, wide where there is none."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def print_json(value: Any) -> None:
    """Print one line of JSON on stdout, at once: a program may wait for it."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if not text.isprintable():  # JSON lets escapes above the first 32 and direction marks through
        text = "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text)
    click.echo(text)
