"""Options as stored in files and sent to trackers: without the passwords in URLs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_spans.store.urls import PASSWORD

_HIDDEN: Final = "***"
_OF_OPTION: Final = re.compile(r"(?i)[?&]password=[^&\s]*&?")
_MARKS: Final = re.compile(r"(?i)://[^/@:\s]*:\*\*\*@|[?&]password=\*\*\*")
_STORE: Final = "store"  # its password may also come from the environment, so its URL is stored without a mark
_RECORDS: Final = ("work", "train", "distil")  # of evaluations and searches: their entries are options of the command


def without_passwords(value: Any) -> Any:
    """Return a JSON value in which passwords of URLs are replaced by ``***``.

    ``a://me:secret@host`` becomes ``a://me:***@host``. The option ``store`` becomes ``a://me@host``.
    """
    if isinstance(value, str):
        whole = _OF_OPTION.sub(_hide_option, value)
        return PASSWORD.sub(rf"\1\2:{_HIDDEN}@", whole)
    if isinstance(value, Mapping):
        return {
            name: without_password(each) if name == _STORE and isinstance(each, str) else without_passwords(each)
            for name, each in value.items()
        }
    return [without_passwords(each) for each in value] if isinstance(value, list | tuple) else value


def without_password(url: str) -> str:
    """Return the URL of a store without its password: ``a://me:secret@host`` becomes ``a://me@host``."""
    whole = _OF_OPTION.sub(lambda found: found[0][0] if found[0].endswith("&") else "", url)
    return PASSWORD.sub(r"\1\2@", whole)


def hidden_options(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the stored options in which `without_passwords` replaced a password."""
    found: list[str] = []
    for name, value in values.items():
        if name in _RECORDS and isinstance(value, Mapping):
            found += hidden_options(value)
        elif _is_hidden(value):
            found.append(name)
    return found


def with_passwords(values: Mapping[str, Any], again: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored options in which those with a replaced password have the values that were given again.

    Args:
        values: options as stored.
        again: options in the same form; others than those are ignored.

    Raises:
        ConfigError: one was not given again.
    """
    filled = _fill(values, again)
    refuse_hidden(filled)
    return dict(filled)


def refuse_hidden(values: Mapping[str, Any]) -> None:
    """Refuse stored options in which a password was replaced: they are not the original ones.

    Raises:
        ConfigError: names the options.
    """
    if names := hidden_options(values):
        flags = " and ".join("DATA" if name == "data" else f"--{name.replace('_', '-')}" for name in names)
        raise ConfigError(f"passwords in URLs are not stored, and {', '.join(names)} had one. Give {flags} again.")


def _fill(value: Any, again: Any) -> Any:
    if isinstance(value, Mapping):
        given = again if isinstance(again, Mapping) else {}
        return {name: _fill(each, given.get(name)) for name, each in value.items()}
    return again if again is not None and _is_hidden(value) else value


def _is_hidden(value: Any) -> bool:
    if isinstance(value, str):
        return _MARKS.search(value) is not None
    within: Sequence[Any] = ()
    if isinstance(value, Mapping):
        within = list(value.values())
    elif isinstance(value, list | tuple):
        within = value
    return any(map(_is_hidden, within))


def _hide_option(found: re.Match[str]) -> str:
    return f"{found[0].partition('=')[0]}={_HIDDEN}{'&' if found[0].endswith('&') else ''}"
