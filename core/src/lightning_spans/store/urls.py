"""The URLs and paths of stores and of servers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

_ENDS: Final = ("", "-wal", "-shm", "-journal", "-turn")  # of the names of a SQLite store's files
HIDDEN: Final = "***"


def _password(ends: str) -> re.Pattern[str]:
    """Return an expression for a URL up to the end of its password: groups for ``scheme://`` and for the user.

    A password may contain slashes. But digits, or a placeholder, followed by a slash are a port and a path, except in
    PostgreSQL's URLs: there, SQLAlchemy takes everything before the ``@`` as user and password.

    Args:
        ends: characters that end the URL, as in brackets of an expression.
    """
    user = rf"[^/@:\[{ends}]*"
    port = r"(?:\d*|\$?\{\w+\}|\$\w+)"  # also as a placeholder
    before = rf"(postgres\w{{0,20}}(?:\+\w{{1,50}})?://|://(?!{user}:{port}/))({user})"
    return re.compile(rf"(?i){before}:(?:[^/{ends}]*|[^@{ends}]{{0,200}})@")


PASSWORD: Final = _password(r"\s")
_ENDS_IN_TEXT: Final = r"""\s"'<>"""
_SECRETS: Final = (
    (re.compile(rf"(?<=://)[^/{_ENDS_IN_TEXT}]*@"), f"{HIDDEN}@"),
    (_password(_ENDS_IN_TEXT), rf"\g<1>{HIDDEN}@"),
    (
        re.compile(r"(?i)([?&](?:api[-_]?key|key|token|access[-_]token|secret|signature|sig|password)=)[^&\s\"'<>]+"),
        rf"\g<1>{HIDDEN}",
    ),
)


def absolute(store: str) -> str:
    """Return a store's URL or path so that it names the same file in every folder. Others are returned unchanged."""
    scheme, slashes, path = store.rpartition(":///")
    is_file = scheme.partition("+")[0] in {"", "sqlite"} and "://" not in path
    if not (is_file and path) or path.startswith((":memory:", "file:")):
        return store
    return f"{scheme}{slashes}{os.path.abspath(path)}"  # noqa: PTH100 - no link is followed


def files_of(store: str) -> list[Path]:
    """Return the files of a SQLite store; none for those of other databases."""
    url = absolute(store)
    path = url.rpartition(":///")[2].partition("?")[0]
    return [Path(f"{path}{end}") for end in _ENDS] if os.path.isabs(path) else []  # noqa: PTH117


def without_secrets(text: str) -> str:
    """Return a text in which users, passwords and keys in URLs are replaced by stars."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text
