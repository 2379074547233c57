"""Bearer keys as they come from the environment or a file."""

from __future__ import annotations

import re
from typing import Final

from lightning_spans.errors import ConfigError

_KEY: Final = re.compile(r"[ -~]+")


def read_bearer(text: str | None, source: str) -> str | None:
    """Return the key in a text without the line break around it; None where there is none.

    Args:
        text: such as the value of `LIGHTNING_KEY`, or what a file holds.
        source: where it stands, for the error.

    Raises:
        ConfigError: it is no key; the message does not tell it.
    """
    key = (text or "").strip()
    if key and not _KEY.fullmatch(key):
        raise ConfigError(
            f"{source} holds no key: a key is one line of ASCII. Copy it again from the server's key file."
        )
    return key or None
