"""Options of a command that are fields of its configuration: name, type, bounds and default are those of the field."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from lightning_trainer.flags.group import F

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


def field_option(
    record: type[BaseModel],
    name: str,
    *,
    dest: str | None = None,
    text: str | None = None,
    filled: bool = False,
    **more: Any,
) -> Callable[[F], F]:
    """Return the option of a command for a field of its configuration.

    Args:
        record: the configuration, or a record that it inherits.
        name: of the field.
        dest: name of the command's parameter, if it is another one.
        text: help of this command; None: the field's own, with its default.
        filled: whether the command gets the field's default, and shows it, if the option is not given; otherwise None.
        more: other arguments of `click.option`, such as ``required`` and ``metavar``.
    """
    field = record.model_fields[name]
    if text is None:
        text = text_of(field) if filled else help_of(field)
    flags = [f"--{name.replace('_', '-')}", dest or name]
    default = {"default": field.default, "show_default": True} if filled else {}
    return click.option(*flags, help=text, **{**value_of(field), **default, **more})


def help_of(field: FieldInfo) -> str:
    """Return the help of a field, with its default."""
    return text_of(field) + ("" if field.annotation is bool else default_of(field))


def text_of(field: FieldInfo) -> str:
    """Return the docstring of a field as one line of plain text."""
    return " ".join((field.description or "").split()).replace("`", "")


def default_of(field: FieldInfo) -> str:
    """Return the default of a field as the end of its help; empty if there is none to show."""
    if field.default in (None, "", ()) or field.is_required() or field.default_factory is not None:
        return ""
    return f" [default: {str(field.default).lower() if isinstance(field.default, bool) else field.default}]"


def value_of(field: FieldInfo) -> dict[str, Any]:
    """Return the arguments of `click.option` for the values of a field. Text has none: the configuration checks it."""
    kinds = [kind for kind in _kinds(field.annotation) if kind is not type(None)]
    kind = kinds[0] if len(kinds) == 1 else None
    bounds = _bounds(field)
    if typing.get_origin(kind) is Literal:
        return {"type": click.Choice([str(value) for value in typing.get_args(kind)])}
    if typing.get_origin(kind) is dict:
        return {"multiple": True, "metavar": "NAME=VALUE"}
    known: dict[Any, dict[str, Any]] = {
        bool: {"is_flag": True, "default": None},
        int: {"type": click.IntRange(**bounds) if bounds else int},
        float: {"type": click.FloatRange(**bounds) if bounds else float},
        Path: {"type": click.Path(path_type=Path)},
    }
    return known.get(kind, {})


def _kinds(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation) if is_union else (annotation,)


def _bounds(field: FieldInfo) -> dict[str, Any]:
    """Return the bounds of a number, as arguments of click's ranges."""
    bounds: dict[str, Any] = {}
    for known in field.metadata:
        for name, end in (("ge", "min"), ("gt", "min"), ("le", "max"), ("lt", "max")):
            if (value := getattr(known, name, None)) is not None:
                bounds[end] = value
                if name in {"gt", "lt"}:
                    bounds[f"{end}_open"] = True
    return bounds
