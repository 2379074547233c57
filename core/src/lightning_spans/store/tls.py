"""Whom TLS connections to the training side trust."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lightning_spans.errors import ConfigError

if TYPE_CHECKING:
    import ssl


def trusted() -> ssl.SSLContext | bool:
    """Return what httpx takes as ``verify``: the certificates in the file that `SSL_CERT_FILE` names, else its own.

    Our clients ignore the environment's proxies, and with them httpx ignores this variable too. So it is read here.

    Raises:
        ConfigError: the file can't be read, or holds no certificate.
    """
    path = os.environ.get("SSL_CERT_FILE")
    if not path:
        return True
    import ssl

    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise ConfigError(f"SSL_CERT_FILE={path} can't be read as certificates: {error}. Name a PEM file.") from None
