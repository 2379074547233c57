"""Counts unrecorded HTTP requests that look like model calls.

It covers the standard library (requests, urllib3) and aiohttp.
"""

from __future__ import annotations

import http.client
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lightning_spans.record import unrecorded
from lightning_spans.record.instrument.imports import when_imported
from lightning_spans.record.instrument.patches import Undo, replace
from lightning_spans.record.recorder import log_failure


def watch(recorded: Callable[[], bool]) -> Undo:
    """Count calls that look like a model's and are not recorded, until the undo.

    Args:
        recorded: whether the current request is part of a call that is recorded or already counted.
    """

    def wrap_putrequest(original: Callable[..., Any]) -> Callable[..., Any]:
        def putrequest(connection: Any, method: str, url: str, *args: Any, **options: Any) -> Any:
            look(recorded, method, lambda: (f"{connection.host}:{connection.port}", url))
            return original(connection, method, url, *args, **options)

        return putrequest

    def wrap_request(original: Callable[..., Any]) -> Callable[..., Any]:
        async def request(session: Any, method: str, url: Any, *args: Any, **options: Any) -> Any:
            look(recorded, method, lambda: _of_aiohttp(session, url))
            return await original(session, method, url, *args, **options)

        return request

    def change(module: ModuleType) -> Callable[[], None]:
        return replace(module.ClientSession, "_request", wrap_request)

    undo = Undo()
    undo.add(replace(http.client.HTTPConnection, "putrequest", wrap_putrequest))
    undo.add(when_imported("aiohttp.client", change))
    return undo


def look(recorded: Callable[[], bool], method: str, where: Callable[[], tuple[str, str]]) -> None:
    """Count a request about to be sent, if it looks like a model call. Never raises.

    Args:
        recorded: see `watch`.
        method: the HTTP method.
        where: returns host and path.
    """
    try:
        if method.upper() != "POST":
            return
        host, path = where()
        if unrecorded.is_model_call(method, path) and not recorded():
            unrecorded.count(host, path)
    except Exception as error:  # noqa: BLE001 - logged
        log_failure("the counter of calls that are not recorded", error)


def _of_aiohttp(session: Any, url: Any) -> tuple[str, str]:
    built = session._build_url(url)
    return f"{built.host}:{built.port}", built.path
