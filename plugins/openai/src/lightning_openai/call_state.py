"""The states of one model call: where it was sent, and how far its answer was read."""

from __future__ import annotations

import enum
from typing import Final


class CallDestination(enum.Enum):
    """Where a call goes."""

    PROGRAM = "the endpoint of the program"
    GATEWAY = "the gateway"
    RETURNED = "the endpoint of the program, where a replay's gateway left it"
    REPLACED = "nowhere any more: another call was made in its place"


class AnswerState:
    """How far the answer of a call was read, and the states that follow.

    They are attributes, because a stream passes through two of them for each item.

    Attributes:
        name: what a log shows.
        requested: after the agent requested the next item of an event stream.
        received: after that item came.
        ended: after the last byte of the body.
        is_streamed: whether the body came while the agent read it.
        is_waiting: whether the agent waits for the next item: how that ends says what became of the answer.
        is_complete: whether the body was read to its end.
    """

    __slots__ = ("ended", "is_complete", "is_streamed", "is_waiting", "name", "received", "requested")

    def __init__(
        self, name: str, *, is_streamed: bool = False, is_waiting: bool = False, is_complete: bool = False
    ) -> None:
        self.name = name
        self.is_streamed, self.is_waiting, self.is_complete = is_streamed, is_waiting, is_complete
        self.requested = self.received = self.ended = self  # where nothing below says otherwise

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
