"""Requests of a replay, and the decision for each model call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lightning_trainer.gateway.replay.record import RecordedCall
from lightning_trainer.gateway.replay.requests import RequestContent


@dataclass(frozen=True, slots=True)
class FromRecord:
    """Answer from the record.

    Attributes:
        call: the recorded call.
        coupled: whether it comes after the forked one.
    """

    call: RecordedCall
    coupled: bool


@dataclass(frozen=True, slots=True)
class DrawnAnew:
    """Sample the call again.

    Attributes:
        fork: the recorded call that it replaces; None: it comes later, and is not in the record.
        seed: for sampling; None: as without a replay.
        model: the policy that answers; None: the agent's.
        say: text to return instead.
    """

    fork: RecordedCall | None = None
    seed: int | None = None
    model: str | None = None
    say: str | None = None


@dataclass(frozen=True, slots=True)
class Own:
    """Leave the call to the program's own endpoint."""

    fork: RecordedCall | None = None


Decision: TypeAlias = FromRecord | DrawnAnew | Own


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """A model call that arrived.

    Attributes:
        agent: the calling agent; None if nothing names it.
        chat: as a chat completion; None if it cannot be one.
        raw: as it arrived.
        span: trace and span of the caller; the same for a retry of the same call. None if it names none.
        sampled: whether the server has a policy for it.
    """

    agent: str | None
    chat: RequestContent | None
    raw: RequestContent
    span: tuple[str, str] | None
    sampled: bool

    @property
    def best(self) -> RequestContent:
        """The format in which most of the record is."""
        return self.chat if self.chat is not None else self.raw
