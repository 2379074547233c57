"""Masks keys and passwords in texts that leave the server."""

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
_LEAST: Final = 6  # shortest secret that is masked; shorter ones are ordinary words
_secrets: set[str] = set()


def remember(secret: str | None) -> None:
    """Mask this too from now on: a key that the server was given."""
    if secret and len(secret) >= _LEAST:
        _secrets.add(secret)


def remember_password(url: str) -> None:
    """Mask a URL's password wherever it occurs, also without the URL."""
    password = urlsplit(url).password
    remember(password)
    remember(None if password is None else unquote(password))


def mask_secrets(text: str) -> str:
    """Return a text in which known secrets and what looks like a key are replaced by stars."""
    for secret in _secrets:
        text = text.replace(secret, HIDDEN)
    text = without_secrets(text)
    for pattern, shown in _PATTERNS:
        text = pattern.sub(shown, text)
    return text


def masking_logger(name: str) -> logging.Logger:
    """Return a logger whose messages are masked for all handlers, because a process may configure its own logging."""
    logger = logging.getLogger(name)
    logger.addFilter(_mask)
    return logger


def _mask(record: logging.LogRecord) -> bool:
    record.msg, record.args = mask_secrets(record.getMessage()), None
    return True
