"""Every error a user can meet. Each message says what to do next."""

from __future__ import annotations

from typing import ClassVar


class LightningError(Exception):
    """Base of all errors raised on purpose; the command line prints it on one screen.

    Attributes:
        exit_status: of the command line: 2 for a wrong request, 3 if the agent failed, 4 if there is nothing to learn.
    """

    exit_status: ClassVar[int] = 2


class AgentFailedError(LightningError):
    """The user's agent failed on every task, or made no recorded model call; the message contains its last error."""

    exit_status = 3


class NothingToLearnError(LightningError):
    """The run cannot teach anything as it is; the message says why and what to change."""

    exit_status = 4


class ConfigError(LightningError):
    """An option, file or environment variable is wrong, or two of them contradict each other."""


class AttachError(LightningError):
    """`attach()` cannot bind: the framework's package or our plugin is missing, or options differ from a live one."""


class UnknownAgentError(LightningError):
    """An agent was selected by a name that no call carried; the message lists the names that were seen."""


class DataError(LightningError):
    """A task file is missing, empty or malformed; the message contains the line number."""


class StoreError(LightningError):
    """The store cannot be opened, read or written."""


class StoreGoneError(StoreError):
    """The store's file no longer exists. Nothing is written to it until it is opened again."""


class QueueFullError(StoreError):
    """The queue of records to write is full; send them again later."""


class RefusedError(StoreError):
    """The store refuses an invalid record or request; a retry would not help."""


class UnauthorizedError(RefusedError):
    """The server rejects the key: it is too old, revoked, or another server's."""


class LeaseLostError(StoreError):
    """The attempt's lease was taken over (its fencing number is old), so its late result is refused."""


class RewardError(LightningError):
    """A reward is None, not a number, or not finite."""

    exit_status = 3


class ReplayEndedError(LightningError):
    """A replay cannot continue: a tool call of the program is not in the record, or is refused there."""

    exit_status = 3


class RecordedToolError(LightningError):
    """A tool failed in the record of a replay, with an exception class that this program does not have."""

    exit_status = 3
