"""Requests to third-party servers: valid addresses, keys that fit into a header, and answers with a deadline.

Concurrent requests run in daemon threads, which the process does not wait for when it ends.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, TypeVar

from lightning_spans.errors import ConfigError
from lightning_spans.record.unrecorded import asked_by_training

if TYPE_CHECKING:
    import httpx

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

_BUSY: Final = frozenset({429, 503})  # these may give the time of a retry with Retry-After (RFC 9110, section 10.2.3)
_LOOK_S: Final = 0.2
_LEAST_PAUSE_S: Final = 0.1  # if a server gives 0, or a past date


def is_url(text: str) -> bool:
    """Whether a text is an address that can be requested over HTTP."""
    import httpx

    try:
        url = httpx.URL(text)
        return url.scheme in {"http", "https"} and bool(url.host) and (url.port or 0) < 2**16
    except (httpx.InvalidURL, ValueError):  # idna's errors are ValueErrors
        return False


def bearer(key: str | None, origin: str) -> dict[str, str]:
    """Return the header of a key; empty if there is no key.

    Args:
        key: as given.
        origin: where the key comes from, for the error, which does not show the key.

    Raises:
        ConfigError: the key cannot be sent in a header.
    """
    key = (key or "").strip()
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the key in {origin} contains a line break or characters that are not allowed. Give only the key."
        )
    return {"authorization": f"Bearer {key}"}


def post_json(client: httpx.Client, url: str, body: dict[str, Any], *, within_s: float) -> httpx.Response:
    """Post a body, and return the whole answer.

    A client's time-out applies to each piece of an answer, so it would never end the wait for a server that sends
    blanks while it works; here the whole answer must arrive in time. If a busy server gives the time of a retry and
    that is within the limit, the request is sent again then.

    Args:
        client: its own time-out is ignored.
        url: where to.
        body: sent as ASCII, because recorded text may contain half of a surrogate pair, which UTF-8 cannot encode.
        within_s: seconds for the answer as a whole, including the wait for a busy server, and for each piece of it.

    Raises:
        httpx.HTTPError: there was no answer, or none within this time.
    """
    import httpx

    headers, content = {"content-type": "application/json"}, json.dumps(body).encode("ascii")
    end = time.monotonic() + within_s
    while True:
        pieces = []
        with (
            asked_by_training(),
            client.stream("POST", url, content=content, headers=headers, timeout=within_s) as answer,
        ):
            for piece in answer.iter_bytes():
                pieces.append(piece)
                if time.monotonic() > end:
                    raise httpx.ReadTimeout(f"its answer was not complete after {within_s:g} seconds")
        pause_s = _retry_after_s(answer.headers.get("retry-after", "")) if answer.status_code in _BUSY else math.inf
        if time.monotonic() + pause_s >= end:
            return httpx.Response(answer.status_code, content=b"".join(pieces))
        time.sleep(pause_s)


def at_once(
    ask: Callable[[Asked], Answer], about: Sequence[Asked], most: int, check: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Make several requests concurrently, and return the answers in the order of `about`.

    A server may take as long as a request's time-out. The threads are therefore daemons, which no executor waits for,
    so that the program can end: requests under way are then abandoned, and the others are never sent.

    Args:
        ask: makes a request.
        about: what each request is about.
        most: maximum number of concurrent requests.
        check: called while waiting; raises to give up.

    Raises:
        Exception: the first that `ask` or `check` raised.
    """
    left, ended = deque(enumerate(about)), SimpleQueue[tuple[int, Future[Answer]]]()

    def work() -> None:
        with suppress(IndexError):
            while True:
                place, each = left.popleft()
                ended.put((place, _answer_now(ask, each)))

    for _ in range(min(most, len(about))):
        threading.Thread(target=work, name="lightning-asking", daemon=True).start()
    found: dict[int, Answer] = {}
    try:
        while len(found) < len(about):
            check()
            with suppress(Empty):
                place, answer = ended.get(timeout=_LOOK_S)
                found[place] = answer.result()
    finally:
        left.clear()
    return [found[place] for place in range(len(about))]


def _answer_now(ask: Callable[[Asked], Answer], about: Asked) -> Future[Answer]:
    answer: Future[Answer] = Future()
    try:
        answer.set_result(ask(about))
    except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
        answer.set_exception(error)
    return answer


def _retry_after_s(text: str) -> float:
    """Return for how many seconds a server is busy, from a number or a date; infinite if the text is neither."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        return max(float(text), _LEAST_PAUSE_S)
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return math.inf
    if until.tzinfo is None:  # "-0000": UTC, from an unknown time zone
        until = until.replace(tzinfo=UTC)
    return max((until - datetime.now(UTC)).total_seconds(), _LEAST_PAUSE_S)
