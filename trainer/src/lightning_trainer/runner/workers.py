"""What the fleet needs of a worker, wherever it runs: a process of this machine, or an actor of a Ray cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from lightning_trainer.runner.protocol import Message


@dataclass(frozen=True, slots=True)
class Blocking:
    """An attempt that keeps its worker's event loop from running.

    Attributes:
        number: of the message that started it; None where it is not known which attempt it is.
        seconds: for how long so far.
        where: file, line and function at which the loop stands.
    """

    number: int | None
    seconds: float
    where: str


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker ended.

    Attributes:
        how: in words, such as ``signal SIGSEGV``.
        outside: whether it came from outside the worker: none of its attempts can be to blame.
        killed: whether it was killed, by the system or by somebody: nobody knows who is to blame.
    """

    how: str
    outside: bool = False
    killed: bool = False


class Worker(Protocol):
    """A worker that has imported the agent."""

    attached: tuple[str, ...]
    blocking: Blocking | None

    @property
    def name(self) -> str:
        """What messages call it: the number of a process."""
        ...

    @property
    def log(self) -> str:
        """Where what its agent prints can be read."""
        ...

    def send(self, message: Message) -> None:
        """Send a message; one that has gone does not get it, and `receive` tells."""
        ...

    async def receive(self) -> Message | None:
        """Return the next message; None when it has gone."""
        ...

    async def ended(self) -> Death:
        """Say how one that has gone ended; waits a few seconds at most."""
        ...

    async def stop(self) -> None:
        """Let it deliver its spans and end, within a few seconds."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


Start: TypeAlias = Callable[[int], Awaitable[Worker]]
"""Starts the worker of this number, and waits until it has imported the agent.

Raises LightningError when the agent can't be imported, and OSError when the system has no room for a process.
"""
