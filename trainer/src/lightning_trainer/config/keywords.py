"""Checks of the options of a function that is chosen by name, such as a credit assigner, before it is first called."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from lightning_spans.errors import ConfigError


def check_keywords(what: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse options that are not keyword-only arguments of a function, or have another type.

    A parameter without annotation has the type of its default: a number, a text, or true or false.

    Raises:
        ConfigError: an option is unknown, missing or of a wrong type; the message starts with `what`.
    """
    parameters = inspect.signature(function).parameters.values()
    known = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{what} has no option {name!r}. It has: {', '.join(known) or 'none'}.")
        check_type(f"{what}: {name} = {value!r}", _type_of_parameter(function, known[name]), value)
    if missing := [name for name, each in known.items() if each.default is each.empty and name not in options]:
        raise ConfigError(f"{what} needs the option {missing[0]}. Set it.")


def _type_of_parameter(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the type of a parameter's annotation; that of its default if there is none that exists at run time."""
    only = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
    if parameter.annotation is parameter.empty:
        return _type_of(parameter.default)
    try:
        return get_type_hints(only, getattr(function, "__globals__", {}), include_extras=True)["it"]
    except NameError:
        return _type_of(parameter.default)


def _type_of(default: Any) -> Any:
    if isinstance(default, bool):
        return bool
    if isinstance(default, (int, float)):
        return float
    return str if isinstance(default, str) else Any


def check_type(where: str, expected: Any, value: Any) -> None:
    """Refuse a value of another type. A list from a file is fine for a tuple, but a text is never a number.

    Raises:
        ConfigError: starts with `where`.
    """
    strict = isinstance(value, (str, bool, int, float))
    try:
        config = ConfigDict(arbitrary_types_allowed=True)
        TypeAdapter(expected, config=config).validate_python(value, strict=strict)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise ConfigError(f"{where}: {message[0].lower()}{message[1:]}.") from None
