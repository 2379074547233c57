"""Do for many callers at once what each asks for alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, Generic, TypeVar

A = TypeVar("A")
B = TypeVar("B")

_LEAD: Final = object()


class Together(Generic[A, B]):
    """Whoever comes while nobody is at work does it at once; those who come meanwhile are done together by one of them.

    So one caller alone never waits for company, and a hundred at a time cost a few trips.

    Args:
        do_all: does several items, and gives for each, in order, an answer or the error to raise for it.
        most: items in one go.
    """

    def __init__(self, do_all: Callable[[Sequence[A]], Sequence[B | Exception]], *, most: int = 256) -> None:
        self._do_all = do_all
        self._most = most
        self._lock = threading.Lock()
        self._waiting: list[tuple[A, Future[Any]]] = []
        self._busy = False

    def do(self, item: A) -> B:
        """Do one item, in company if there is some.

        Raises:
            Exception: what `do_all` gave for this item, or raised.
        """
        mine: Future[Any] = Future()
        with self._lock:
            self._waiting.append((item, mine))
            leads, self._busy = not self._busy, True
        if leads or mine.result() is _LEAD:
            mine = self._lead()
        answer: B = mine.result()
        return answer

    def _lead(self) -> Future[Any]:
        """Do what waits, oneself first; then let the next one do what came meanwhile. Gives one's own answer."""
        with self._lock:
            batch, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
        try:
            answers: Sequence[B | Exception] = self._do_all([item for item, _ in batch])
        except Exception as error:  # noqa: BLE001 - each caller gets it
            answers = [error] * len(batch)
        with self._lock:
            following = self._waiting[0][1] if self._waiting else None
            self._busy = following is not None
        if following is not None:
            following.set_result(_LEAD)
        own: Future[Any] = Future()
        for future, answer in zip([own, *(future for _, future in batch[1:])], answers, strict=True):
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        return own
