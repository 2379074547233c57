"""What a replay is asked, and what it decides of each model call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lightning_trainer.gateway.replay.record import RecordedCall
from lightning_trainer.gateway.replay.requests import Asked


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
    """Make the call anew.

    Attributes:
        fork: the recorded call in whose place it is; None: it comes after that, and is not in the record.
        seed: of the draw; None: as without a replay.
        model: the policy that answers; None: that of the agent.
        say: text to give instead.
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
    """A model call that came.

    Attributes:
        agent: who calls; None where nothing names it.
        chat: as a chat completion; None where it can't be one.
        raw: as it came.
        span: trace and span of the caller; the same for another try of the same call. None where it names none.
        sampled: whether the server has a policy for it.
    """

    agent: str | None
    chat: Asked | None
    raw: Asked
    span: tuple[str, str] | None
    sampled: bool

    @property
    def best(self) -> Asked:
        """The form that most of the record has."""
        return self.chat if self.chat is not None else self.raw
