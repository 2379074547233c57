"""The vLLM servers of an engine: ours (`kind.OwnServer`), or others' (`running.RunningServers`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from lightning_trainer.engines.vllm.pulse import Pulse


class Servers(Protocol):
    """The vLLM servers of an engine: a process of ours, or servers of others.

    Attributes:
        key: their bearer key.
        pulse: measures for how long they have sent nothing while they work on requests.
    """

    key: str | None
    pulse: Pulse

    @property
    def urls(self) -> Sequence[str]:
        """Base URLs, each with its ``/v1``."""
        ...

    async def ready(self) -> None:
        """Wait until the servers answer.

        Raises:
            EngineError: they have ended permanently.
        """
        ...

    def wait(self) -> None:
        """Wait until the servers answer, like `ready`."""
        ...

    def suspect(self) -> None:
        """Report that a request to the servers failed."""
        ...

    def ends(self, urls: Sequence[str]) -> bool:
        """Return whether a request to these URLs failed because the server has ended; ours is then started again."""
        ...

    async def ended(self, urls: Sequence[str]) -> bool:
        """Return whether a request failed because the server has ended, like `ends`."""
        ...

    def settled(self) -> None:
        """Report that the servers took new weights, so that earlier crashes no longer count."""
        ...

    @property
    def sleeps(self) -> bool:
        """Whether the servers sleep during updates."""
        ...

    def held(self) -> AbstractContextManager[None]:
        """Wait until the servers answer, and restart none within the block, if they sleep."""
        ...

    def asleep(self) -> AbstractContextManager[None]:
        """Let the servers sleep within the block, if they do."""
        ...

    def check(self) -> None:
        """Raise the error that has ended the servers permanently.

        Raises:
            EngineError: they have ended.
        """
        ...

    def close(self) -> None:
        """Stop what was started."""
        ...
