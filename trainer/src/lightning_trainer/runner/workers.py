"""The fleet's interface to a worker, wherever it runs: a process of this machine, or an actor of a Ray cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from lightning_trainer.runner.protocol import Message


@dataclass(frozen=True, slots=True)
class Blocking:
    """An attempt that blocks its worker's event loop.

    Attributes:
        number: number of the message that started it; None if it is unknown which attempt it is.
        seconds: how long so far.
        where: file, line and function at which the loop is blocked.
    """

    number: int | None
    seconds: float
    where: str


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker ended.

    Attributes:
        how: in words, such as ``signal SIGSEGV``.
        outside: whether the cause was outside the worker: none of its attempts can be to blame.
        killed: whether it was killed, by the system or a user: it is unknown what is to blame.
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
        """Name in messages: the number of a process."""
        ...

    @property
    def log(self) -> str:
        """Where the agent's output can be read."""
        ...

    def send(self, message: Message) -> None:
        """Send a message; a worker that has ended does not get it, which `receive` reports."""
        ...

    async def receive(self) -> Message | None:
        """Return the next message; None if the worker has ended."""
        ...

    async def ended(self) -> Death:
        """Return how a worker ended; waits a few seconds at most."""
        ...

    async def stop(self) -> None:
        """Let the worker deliver its spans and end, within a few seconds."""
        ...

    def kill(self) -> None:
        """Kill the worker at once."""
        ...


Start: TypeAlias = Callable[[int], Awaitable[Worker]]
"""Starts the worker of this number, and waits until it has imported the agent.

Raises LightningError when the agent can't be imported, and OSError when the system has no room for a process.
"""
