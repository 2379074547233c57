"""Requests to servers of others: an address that is one, a key that a header can carry, an answer that has an end.

Several are made at once by threads that nobody waits for.
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

_BUSY: Final = frozenset({429, 503})  # that may say with Retry-After when to come again (RFC 9110, section 10.2.3)
_LOOK_S: Final = 0.2
_LEAST_PAUSE_S: Final = 0.1  # where a server says 0, or a date that is past


def is_url(text: str) -> bool:
    """Whether a text is an address that can be asked over HTTP."""
    import httpx

    try:
        url = httpx.URL(text)
        return url.scheme in {"http", "https"} and bool(url.host) and (url.port or 0) < 2**16
    except (httpx.InvalidURL, ValueError):  # idna's errors are ValueErrors
        return False


def bearer(key: str | None, origin: str) -> dict[str, str]:
    """Return the header of a key; none where there is no key.

    Args:
        key: as it was given.
        origin: where it comes from, for the error, which does not show it.

    Raises:
        ConfigError: no header can carry it.
    """
    key = (key or "").strip()
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the key in {origin} has a line break or letters that no key has. Give the key alone.")
    return {"authorization": f"Bearer {key}"}


def post_json(client: httpx.Client, url: str, body: dict[str, Any], *, within_s: float) -> httpx.Response:
    """Post a body, and return the whole answer.

    A client's time-out is that of each piece of an answer, so a server that sends blanks while it works would be
    waited for without end: here the whole of it has to be there. A server that is busy, and says for how long, is asked
    again then, where that is within the time.

    Args:
        client: its own time-out is of no account.
        url: where to.
        body: sent as ASCII: what was recorded may hold half of a character, which UTF-8 has not.
        within_s: seconds, of the answer as a whole, what is waited for a busy server included, and of each piece of it.

    Raises:
        httpx.HTTPError: there was none, or none within this time.
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
                    raise httpx.ReadTimeout(f"its answer was not whole after {within_s:g} seconds")
        pause_s = _retry_after_s(answer.headers.get("retry-after", "")) if answer.status_code in _BUSY else math.inf
        if time.monotonic() + pause_s >= end:
            return httpx.Response(answer.status_code, content=b"".join(pieces))
        time.sleep(pause_s)


def at_once(
    ask: Callable[[Asked], Answer], about: Sequence[Asked], most: int, check: Callable[[], None] = lambda: None
) -> list[Answer]:
    """Ask about several things at once, and return the answers in the order of what was asked.

    A server may be slow for as long as a request has time. So its threads are none that an executor would wait for, and
    a program that is to end does: what is under way is then given up, and the rest is never asked.

    Args:
        ask: makes a request.
        about: what to ask about.
        most: requests at once.
        check: called between looks; raises to give up.

    Raises:
        Exception: what `ask` or `check` raised first.
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
    """Read for how many seconds a server is busy: it says so, or gives a date. Infinite where it says neither."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        return max(float(text), _LEAST_PAUSE_S)
    try:
        until = parsedate_to_datetime(text)
    except ValueError:
        return math.inf
    if until.tzinfo is None:  # of "-0000": UTC, from a place that is not told
        until = until.replace(tzinfo=UTC)
    return max((until - datetime.now(UTC)).total_seconds(), _LEAST_PAUSE_S)
