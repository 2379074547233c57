"""Proxies of the environment: never used for this machine, and named in errors about other servers."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from lightning_spans.store.urls import without_secrets

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_NAMES: Final = ("no_proxy", "NO_PROXY")  # most programs read the first, some only the second


def bypass_for_loopback(environ: MutableMapping[str, str]) -> None:
    """Let this process and its child processes reach this machine without a proxy.

    A company's ``HTTP_PROXY`` cannot reach the gateway, or a model on this machine.
    """
    for name in _NAMES:
        given = environ.get(name) or environ.get("no_proxy", environ.get("NO_PROXY", ""))
        named = [host.strip() for host in given.split(",") if host.strip()]
        if "*" not in named:
            environ[name] = ",".join([*named, *(host for host in LOOPBACK if host not in named)])


def through_proxy(url: str) -> str:
    """Return a suffix that names the environment's proxy through which a URL is reached; empty if there is none."""
    place = urlsplit(url)
    if proxy_bypass(place.hostname or ""):
        return ""
    known = getproxies()
    proxy = known.get(place.scheme) or known.get("all")
    return f" through the proxy {without_secrets(proxy)}" if proxy else ""
