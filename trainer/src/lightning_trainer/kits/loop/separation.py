"""Keeps the calls of a loop's rollouts away from the production server, which would count them as users' calls."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from lightning_spans.errors import ConfigError

if TYPE_CHECKING:
    from lightning_trainer.kits.loop.config import LoopConfig

_VARIABLE: Final = re.compile(r"[A-Z0-9_]*(BASE_URL|API_BASE)")  # of the clients of model providers
_PORTS: Final = {"http": 80, "https": 443}
_HERE: Final = ("localhost", "127.0.0.1", "::1")


def refuse_production_server(config: LoopConfig) -> None:
    """Reject a loop whose rollouts would call the server in `store`.

    Their calls would be recorded there as live, take part in shadows and canaries, and become tasks of later rounds.

    Raises:
        ConfigError: a variable or an option names the server.
    """
    server = _place_of(config.store)
    if server is None:
        return
    for name, value in _addresses(config):
        if _place_of(value) == server:
            raise ConfigError(
                f"{name} is {value}, the server in --store: it would count the calls of the loop's rollouts as users'"
                " calls, in canaries, guardrails and live traces. Give the address of the model itself, such as that of"
                " the server's --upstream."
            )


def _addresses(config: LoopConfig) -> Iterator[tuple[str, str]]:
    """Yield what names the servers that the program, a search or an evaluation calls."""
    yield from ((name, value) for name, value in os.environ.items() if _VARIABLE.fullmatch(name))
    options = {f"train.{name}": value for name, value in config.method_options.items()}
    for name, value in {**options, "evaluate.against": config.evaluate.against}.items():
        yield from ((name, one) for one in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in an option, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _place_of(address: str) -> tuple[str, int | None] | None:
    """Return host and port of ``[MODEL=]http://...``; None if it is no address."""
    found = re.search(r"https?://\S+", address)
    if found is None:
        return None
    try:
        parts = urlsplit(found[0])
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return None
    return ("localhost" if host in _HERE else host), port or _PORTS[parts.scheme]
