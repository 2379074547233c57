"""Counts unrecorded HTTP calls that look like model calls, so that none is missed silently.

`watch` covers the standard library (requests, urllib3) and aiohttp.
"""

from __future__ import annotations

import http.client
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Final

from lightning_spans.record.instrument.imports import when_imported
from lightning_spans.record.instrument.patches import Undo, replace
from lightning_spans.record.process import in_child
from lightning_spans.record.recorder import log_failure

logger = logging.getLogger("lightning_spans")
_PATHS: Final = re.compile(
    r"/(chat/)?completions$"
    r"|/(v\d\w*|openai)/(responses|messages|chat)$"
    r"|/api/(chat|generate)$"  # Ollama
    r"|:(stream)?generateContent$"
    r"|/model/[^/]+/(invoke|converse)[\w-]*$",  # Bedrock
    re.IGNORECASE,
)
_training: ContextVar[bool] = ContextVar("lightning_training_asks", default=False)
_counts: Counter[str] = Counter()
_untold: Counter[str] = Counter()  # to a runner
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent's may hold it
    _lock = threading.Lock()
    _counts.clear()
    _untold.clear()


in_child(_after_fork)


def is_model_call(method: str, path: str) -> bool:
    """Whether a request looks like a model call, by its path; a query is ignored."""
    if _training.get() or method.upper() != "POST":
        return False
    return _PATHS.search(path.partition("?")[0].rstrip("/")) is not None


@contextmanager
def asked_by_training() -> Iterator[None]:
    """Mark the block's requests as the training's own, to a judge or the gateway: neither recorded nor counted.

    The training process may have called `attach`, for example if a script trains its own program.
    """
    token = _training.set(True)
    try:
        yield
    finally:
        _training.reset(token)


def count(host: str, path: str) -> None:
    """Count a call that nothing records."""
    where = host + path.partition("?")[0]
    with _lock:
        _counts[where] += 1
        _untold[where] += 1


def take() -> dict[str, int]:
    """Return how many there were since the last time, by host and path."""
    with _lock:
        taken = dict(_untold)
        _untold.clear()
    return taken


def forget() -> None:
    """Start again."""
    with _lock:
        _counts.clear()
        _untold.clear()


def warn() -> None:
    """Log how many there were since `forget`."""
    with _lock:
        told = lines(_counts)
    for line in told:
        logger.warning("lightning: %s", line)


def lines(counts: Mapping[str, int]) -> list[str]:
    """Describe how many calls went where without being recorded."""
    return [
        f"{number} {'call' if number == 1 else 'calls'} to {where} {'was' if number == 1 else 'were'} not recorded: no"
        " client that is followed made them, so they have no agent, and can't be trained. Use an OpenAI-compatible"
        " client, LiteLLM, or Anthropic's, Gemini's, Ollama's or Cohere's own over httpx for them. Ignore this if no"
        " model answers there."
        for where, number in sorted(counts.items())
    ]


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
        if is_model_call(method, path) and not recorded():
            count(host, path)
    except Exception as error:  # noqa: BLE001 - logged
        log_failure("the counter of calls that are not recorded", error)


def _of_aiohttp(session: Any, url: Any) -> tuple[str, str]:
    built = session._build_url(url)
    return f"{built.host}:{built.port}", built.path
