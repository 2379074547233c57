"""Garbage-collected clients: close each in the event loop in which it was used, or not at all.

A garbage-collected `AsyncOpenAI` closes itself in whichever event loop runs in that thread. If programs run in
parallel, each in a thread with its own loop, this closes a connection of another thread's loop from outside. Its file
descriptor may by then be another connection's, which is then no longer read, and whose call waits until it times out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from openai._base_client import AsyncHttpxClientWrapper

_LOOP: Final = "_lightning_loop"  # its id, because a weak reference is already dead when `__del__` runs


def note_loop(client: Any) -> None:
    """Remember that an openai client is used in the running event loop, if that is one of asyncio's."""
    loop = asyncio._get_running_loop() if isinstance(client, AsyncHttpxClientWrapper) else None
    if loop is not None:
        setattr(client, _LOOP, id(loop))


def wrap_del(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Close a garbage-collected client only in its own loop. Other clients' sockets close when they are freed."""

    def collected(client: Any) -> None:
        if getattr(client, _LOOP, None) in {None, id(asyncio._get_running_loop())}:
            original(client)

    return collected
