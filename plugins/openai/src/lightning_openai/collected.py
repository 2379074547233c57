"""Clients that nobody holds any more: each is closed in the event loop that it was used in, or not at all.

An `AsyncOpenAI` that is collected closes itself in whatever event loop runs in that thread. Where programs run at
once, each in a thread with a loop of its own, that closes a connection of another thread's loop from outside of it: the
number of its file may be another connection's by then, which stops being read, and its call waits for its time-out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from openai._base_client import AsyncHttpxClientWrapper

_LOOP: Final = "_lightning_loop"  # its id: a weak reference is dead already when `__del__` runs


def note_loop(client: Any) -> None:
    """Remember that a client of openai's is used in the event loop that runs here, if it is one of asyncio's."""
    loop = asyncio._get_running_loop() if isinstance(client, AsyncHttpxClientWrapper) else None
    if loop is not None:
        setattr(client, _LOOP, id(loop))


def wrap_del(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Close a client that is collected only if this is its own loop; the sockets of others close as they are freed."""

    def collected(client: Any) -> None:
        if getattr(client, _LOOP, None) in {None, id(asyncio._get_running_loop())}:
            original(client)

    return collected
