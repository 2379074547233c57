"""Options as stored in files and sent to trackers: without the passwords in URLs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_OF_USER: Final = re.compile(r"(://[^/@:\s]*):[^/@\s]*@")
_OF_OPTION: Final = re.compile(r"(?i)[?&]password=[^&\s]*&?")


def without_passwords(value: Any) -> Any:
    """Return a JSON value without the passwords of URLs in its texts.

    ``a://me:secret@host`` becomes ``a://me@host``.
    """
    if isinstance(value, str):
        whole = _OF_OPTION.sub(lambda found: found[0][0] if found[0].endswith("&") else "", value)
        return _OF_USER.sub(r"\1@", whole)
    if isinstance(value, Mapping):
        return {name: without_passwords(each) for name, each in value.items()}
    return [without_passwords(each) for each in value] if isinstance(value, list | tuple) else value
