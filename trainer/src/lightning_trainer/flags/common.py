"""Options that several commands share, and values read from them."""

from __future__ import annotations

import json
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import click

from lightning_spans.errors import ConfigError
from lightning_trainer.flags.complete import for_option
from lightning_trainer.flags.fields import default_of, field_option, text_of
from lightning_trainer.flags.group import F
from lightning_trainer.options.learning import CreditOptions

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo
    from rich.console import Console

    from lightning_spans.store import Store

rewards_option = field_option(
    CreditOptions,
    "rewards",
    dest="automatic",
    metavar="NAME=WEIGHT",
    text="Also show the reward of this automatic rule, as in training. May be repeated.",
)


trust_option = click.option(
    "--trust",
    is_flag=True,
    help="Trust the folder: import the reward rules and open the store that its config.json names.",
)

allow_blocked_option = click.option(
    "--allow-blocked",
    is_flag=True,
    help="Also take a checkpoint that is blocked because it learned from deleted traces.",
)


@contextmanager
def reading(url: str, key_file: Path | None) -> Iterator[Store]:
    """Open an existing store for reading.

    Raises:
        ConfigError: there is none.
    """
    from lightning_spans.store import open_store
    from lightning_spans.store.sql.reader import SqlReader

    path = Path(url.removeprefix("sqlite:///")) if "://" not in url or url.startswith("sqlite:///") else None
    if path is not None and not path.is_file():
        if (own := path / "lightning.db").is_file():
            raise ConfigError(f"{path} is a run's folder, not a store. Give its store: --store {own}")
        raise ConfigError(
            f"there is no store {path}. Run the agent once with attach(), or give the store of a run: "
            "--store runs/.../lightning.db"
        )
    store = SqlReader(url) if path is not None and not _writable(path) else open_store(url, key=read_key(key_file))
    try:
        yield store
    finally:
        store.close()


def _writable(path: Path) -> bool:
    """Whether a store can be opened for writing, including the files that SQLite creates next to it."""
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def read_key(key_file: Path | None) -> str | None:
    """Read a key from its file, or from the environment if no file is given.

    Raises:
        ConfigError: the file cannot be read, or contains no key.
    """
    from lightning_spans.store.keys import read_bearer

    if key_file is None:
        return read_bearer(os.environ.get("LIGHTNING_KEY"), "LIGHTNING_KEY")
    try:
        text = key_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"key file {key_file} can't be read: {error}. The server names its key file.") from None
    key = read_bearer(text, f"key file {key_file}")
    if key is None:
        raise ConfigError(f"key file {key_file} is empty. The server names its key file.")
    return key


# Headings of a run's options in the help, by the first option of each group in the order of `TrainConfig`.
_GROUPS: Final = {
    "target": "What runs, and on what",
    "agents": "What is trained",
    "steps": "How long",
    "algorithm": "How it learns",
    "temperature": "How it samples",
    "workers": "How the agent runs",
    "out": "What is kept",
}


class GroupedOption(click.Option):
    """An option that the help lists under a heading."""

    group: str = "Other"


class GroupedCommand(click.Command):
    """A command whose help has headings, and an example above them."""

    example: str = ""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example, then the options under their headings; those of this command alone come last."""
        if self.example:
            with formatter.section("Example"):
                formatter.write_text(self.example)
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in _GROUPS.values()}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def headings(names: Iterable[str]) -> dict[str, str]:
    """Return the heading of each option of a configuration, in the order of its fields."""
    found, title = {}, "Other"
    for name in names:
        title = found[name] = _GROUPS.get(name, title)
    return found


def config_options(
    kind: type[BaseModel] | None = None,
    *,
    leave_out: frozenset[str] = frozenset(),
    notes: Callable[[str], str] = lambda _name: "",
) -> Callable[[F], F]:
    """Create a command-line option for every field of a configuration, the single source of its name, help and default.

    Values arrive as text. The configuration checks them, so that flags and files fail with the same messages.

    Args:
        kind: the configuration; None: `TrainConfig`.
        leave_out: fields that get no option.
        notes: returns the text added to a field's help.
    """

    def decorate(function: F) -> F:
        fields = (kind or _train_config()).model_fields
        groups = headings(fields)
        for name, field in reversed(fields.items()):
            if name not in leave_out:
                function = _option(name, field, notes(name))(function)
                params = function.__click_params__  # type: ignore[attr-defined]
                params[-1].group = groups[name]
        return function

    return decorate


def _train_config() -> type[BaseModel]:
    from lightning_trainer.config.train import TrainConfig

    return TrainConfig


def _option(name: str, field: FieldInfo, note: str) -> Callable[[F], F]:
    flag = f"--{name.replace('_', '-')}"
    text = text_of(field)
    text = (f"{text.removesuffix('.')} {note}." if note else text) + default_of(field)
    flags = [flag, name]
    more: dict[str, Any] = {"multiple": True}
    if field.annotation is bool:
        flags, more = [f"{flag}/--no-{name.replace('_', '-')}", name], {"default": None}
    elif name == "policies":
        flags, more["metavar"] = ["--policy", "--policies", name], "AGENT=POLICY,..."
    elif name == "name_by" or typing.get_origin(field.annotation) is dict:
        text += " May be repeated."
        more["metavar"] = "RULE" if name == "name_by" else "NAME=VALUE"
    else:
        more = {"metavar": _metavar(field.annotation), "shell_complete": for_option(name)}
    return click.option(*flags, help=text, cls=GroupedOption, **more)


def _metavar(annotation: Any) -> str:
    parts = (
        typing.get_args(annotation)
        if typing.get_origin(annotation) in (types.UnionType, typing.Union)
        else (annotation,)
    )
    names = []
    for part in (part for part in parts if part is not type(None)):
        if typing.get_origin(part) is Literal:
            names += [str(value) for value in typing.get_args(part)]
        elif typing.get_origin(part) is tuple:
            names.append("NAME,...")
        elif typing.get_origin(part) is dict:
            names.append("NAME=X,...")
        else:
            names.append({int: "N", float: "X", Path: "PATH"}.get(part, "TEXT"))
    return "|".join(names)


_LISTS: Final = {"columns", "policies", "name_by"}  # values that are not pairs, or are parsed where they are used


def given_flags(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the given flags. NAME=VALUE pairs become a dictionary with JSON values, or text if a value is not JSON.

    Raises:
        ConfigError: a pair has no equals sign.
    """
    kept = {name: value for name, value in flags.items() if value is not None and value != ()}
    for name, value in kept.items():
        if isinstance(value, tuple) and name not in _LISTS:
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
    """Return stdout for tables and trees: as wide as the terminal, or wide if there is none."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def print_json(value: Any) -> None:
    """Print one line of JSON on stdout immediately, because a program may wait for it."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    if not text.isprintable():  # JSON allows control characters beyond the first 32, and direction marks
        text = "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a locale without these characters
        text = json.dumps(value, default=str)
    click.echo(text)
