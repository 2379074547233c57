"""Texts that leave the server, without the keys and passwords that may have got into them."""

from __future__ import annotations

import logging
import re
from typing import Final
from urllib.parse import unquote, urlsplit

from lightning_spans.store.urls import HIDDEN, without_secrets

_PATTERNS: Final = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{12,}"), rf"\g<1> {HIDDEN}"),
    (re.compile(r"\b(lk|sk|hf|gsk|xai)([-_])[\w.-]{12,}"), rf"\g<1>\g<2>{HIDDEN}"),
)
_LEAST: Final = 6  # characters of a secret that is looked for; shorter ones are ordinary words
_secrets: set[str] = set()


def remember(secret: str | None) -> None:
    """Mask this, too, wherever it stands from now on: a key that the server was given."""
    if secret and len(secret) >= _LEAST:
        _secrets.add(secret)


def remember_password(url: str) -> None:
    """Mask the password of an address wherever it stands, also without the address."""
    password = urlsplit(url).password
    remember(password)
    remember(None if password is None else unquote(password))


def masked(text: str) -> str:
    """Return a text with what looks like a key, and what was given as one, replaced by stars."""
    for secret in _secrets:
        text = text.replace(secret, HIDDEN)
    text = without_secrets(text)
    for pattern, shown in _PATTERNS:
        text = pattern.sub(shown, text)
    return text


def masking_logger(name: str) -> logging.Logger:
    """Return a logger whose messages are masked, whoever handles them: a process may set up logging of its own."""
    logger = logging.getLogger(name)
    logger.addFilter(_mask)
    return logger


def _mask(record: logging.LogRecord) -> bool:
    record.msg, record.args = masked(record.getMessage()), None
    return True
