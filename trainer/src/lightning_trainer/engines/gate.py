"""A gate that holds answers back while the weights of a server change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

from lightning_trainer.engines.contract import EngineError
from lightning_trainer.gateway.engine import engine_wait

_LOOK_S: Final = 0.05
_ENDS_S: Final = 3600.0  # longest wait for answers in progress before weights change


class Gate:
    """Let answers through, or hold them back while a server's weights change."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._inside, self._shut = 0, False

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Count an answer in progress; while the gate is shut, wait before."""
        with engine_wait():
            while not self._enter():  # noqa: ASYNC110 - callers are on several event loops
                await asyncio.sleep(_LOOK_S)
        try:
            yield
        finally:
            with self._state:
                self._inside -= 1
                self._state.notify_all()

    def _enter(self) -> bool:
        with self._state:
            if not self._shut:
                self._inside += 1
            return not self._shut

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Wait until no answer is in progress, and hold new ones back within the block.

        Raises:
            EngineError: answers do not end.
        """
        with self._state:
            self._shut = True
        try:
            with self._state:
                if not self._state.wait_for(lambda: not self._inside, _ENDS_S):
                    raise EngineError(f"answers have been running for {_ENDS_S:g} s. Lower timeout_s.")
            yield
        finally:
            with self._state:
                self._shut = False
