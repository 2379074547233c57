"""Every error a user can meet. Each message says what to do next."""

from __future__ import annotations


class LightningError(Exception):
    """Base of all errors raised on purpose; the command line prints it on one screen and exits with status 2."""


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


class RefusedError(StoreError):
    """The store will not do what it was asked, and would not another time: a record or request is wrong."""


class LeaseLostError(StoreError):
    """The attempt's lease was taken over (its fencing number is old), so its late result is refused."""


class RewardError(LightningError):
    """A reward is None, not a number, or not finite."""
