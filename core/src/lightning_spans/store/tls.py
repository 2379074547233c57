"""The certificates that TLS connections to the training side trust."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lightning_spans.errors import ConfigError

if TYPE_CHECKING:
    import ssl


def trusted_certificates() -> ssl.SSLContext | bool:
    """Return httpx's ``verify``: the certificates in the file named by `SSL_CERT_FILE`, otherwise its own.

    Our clients ignore the environment's proxies, and httpx then ignores this variable too, so it is read here.

    Raises:
        ConfigError: the file cannot be read, or contains no certificate.
    """
    path = os.environ.get("SSL_CERT_FILE")
    if not path:
        return True
    import ssl

    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise ConfigError(f"SSL_CERT_FILE={path} can't be read as certificates: {error}. Name a PEM file.") from None
