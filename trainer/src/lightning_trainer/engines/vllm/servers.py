"""Where vLLM answers: a process of ours (`kind.OwnServer`), or servers of somebody else's (`kind.Elsewhere`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol


class Servers(Protocol):
    """Where vLLM answers: a process of ours, or servers of somebody else's."""

    key: str | None

    @property
    def urls(self) -> Sequence[str]:
        """Base URLs, each with its ``/v1``."""
        ...

    async def ready(self) -> None:
        """Wait until they answer.

        Raises:
            EngineError: they never will.
        """
        ...

    def wait(self) -> None:
        """Wait until they answer, as `ready` does."""
        ...

    def suspect(self) -> None:
        """Say that a request to them failed."""
        ...

    def settled(self) -> None:
        """Say that they took new weights, so that earlier crashes no longer count."""
        ...

    @property
    def sleeps(self) -> bool:
        """Whether they sleep in updates."""
        ...

    def asleep(self) -> AbstractContextManager[None]:
        """Let them sleep inside the block, if they do."""
        ...

    def check(self) -> None:
        """Raise what has ended them for good.

        Raises:
            EngineError: they have ended.
        """
        ...

    def close(self) -> None:
        """End what was started."""
        ...
