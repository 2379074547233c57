"""Every error a user can meet. Each message says what to do next."""

from __future__ import annotations

from typing import ClassVar


class LightningError(Exception):
    """Base of all errors raised on purpose; the command line prints it on one screen.

    Attributes:
        exit_status: of the command line: 2 where what was asked is wrong, 3 where the agent failed, 4 where there is
            nothing to learn.
    """

    exit_status: ClassVar[int] = 2


class AgentFailedError(LightningError):
    """The user's agent failed on every task, or made no model call that was seen; the message has its last error."""

    exit_status = 3


class NothingToLearnError(LightningError):
    """The run can't teach anything as it is; the message says why and what to change."""

    exit_status = 4


class ConfigError(LightningError):
    """An option, file or environment variable is wrong, or two of them contradict each other."""


class AttachError(LightningError):
    """`attach()` can't bind: the framework's package or our plugin is missing, or options differ from a live one."""


class UnknownAgentError(LightningError):
    """An agent was selected by a name that no call carried; the message lists the names that were seen."""


class DataError(LightningError):
    """A task file is missing, empty or malformed; the message has the line number."""


class StoreError(LightningError):
    """The store can't be opened, read or written."""


class StoreGoneError(StoreError):
    """The store's file is not there any more. Nothing is written to it until it is opened again."""


class QueueFullError(StoreError):
    """The queue of records to write is full; send them again later."""


class RefusedError(StoreError):
    """The store refuses a record or a request that is wrong; a retry would not help."""


class UnauthorizedError(RefusedError):
    """The server does not take the key: it is too old, revoked, or another server's."""


class LeaseLostError(StoreError):
    """The attempt's lease was taken over (its fencing number is old), so its late result is refused."""


class RewardError(LightningError):
    """A reward is None, not a number, or not finite."""

    exit_status = 3


class ReplayEndedError(LightningError):
    """A replay can't continue: a tool call of the program is not in the record, or is refused there."""

    exit_status = 3


class RecordedToolError(LightningError):
    """A tool failed in the record of a replay, with an exception of a class that this program does not have."""

    exit_status = 3
