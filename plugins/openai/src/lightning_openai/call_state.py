"""The states of one model call: where it was sent, and how much of its answer was read."""

from __future__ import annotations

import enum
from typing import Final


class CallDestination(enum.Enum):
    """Where a call is sent."""

    PROGRAM = "the endpoint of the program"
    GATEWAY = "the gateway"
    RETURNED = "the program's own endpoint, as the gateway of the replay decided"
    REPLACED = "nowhere: another call replaced it"


class AnswerState:
    """How much of a call's answer was read, and the states that can follow.

    The states are attributes, because a stream passes through two of them for each item.

    Attributes:
        name: shown in logs.
        requested: state after the agent requested the next item of an event stream.
        received: state after that item arrived.
        ended: state after the last byte of the body.
        is_streamed: whether the body arrives while the agent reads it.
        is_waiting: whether the agent waits for the next item, so that the outcome of that wait decides the answer's.
        is_complete: whether the body was read to its end.
    """

    __slots__ = ("ended", "is_complete", "is_streamed", "is_waiting", "name", "received", "requested")

    def __init__(
        self, name: str, *, is_streamed: bool = False, is_waiting: bool = False, is_complete: bool = False
    ) -> None:
        self.name = name
        self.is_streamed, self.is_waiting, self.is_complete = is_streamed, is_waiting, is_complete
        self.requested = self.received = self.ended = self  # unless stated otherwise below

    def __repr__(self) -> str:
        return self.name


SENT: Final = AnswerState("sent")
WHOLE: Final = AnswerState("whole", is_complete=True)
OPEN: Final = AnswerState("open", is_streamed=True)
WAITING: Final = AnswerState("waiting", is_streamed=True, is_waiting=True)
LAST: Final = AnswerState("last", is_streamed=True, is_waiting=True, is_complete=True)
READ: Final = AnswerState("read", is_streamed=True, is_complete=True)

OPEN.requested, OPEN.ended = WAITING, READ
WAITING.received, WAITING.ended = OPEN, LAST
LAST.received = READ
READ.requested = LAST
