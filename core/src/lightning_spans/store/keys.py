"""Bearer keys from the environment or a file."""

from __future__ import annotations

import re
from typing import Final

from lightning_spans.errors import ConfigError

_KEY: Final = re.compile(r"[ -~]+")


def read_bearer(text: str | None, source: str) -> str | None:
    """Return the key in a text without surrounding line breaks; None if there is none.

    Args:
        text: such as the value of `LIGHTNING_KEY`, or the content of a file.
        source: where it comes from, for the error.

    Raises:
        ConfigError: it is not a key; the message does not contain it.
    """
    key = (text or "").strip()
    if key and not _KEY.fullmatch(key):
        raise ConfigError(
            f"{source} contains no key: a key is one line of ASCII. Copy it again from the server's key file."
        )
    return key or None
