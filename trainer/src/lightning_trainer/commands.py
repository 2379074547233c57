"""The entry that a kit or a plugin registers for each of its commands of `lightning-rl`."""

from __future__ import annotations

from typing import NamedTuple


class Listed(NamedTuple):
    """A command that is imported when it is called, so that `lightning-rl --help` stays fast.

    Attributes:
        module: the module that defines it, as `command`.
        help: its line in the list of commands.
        after: the command that it follows in the list; empty for the end.
    """

    module: str
    help: str
    after: str = ""
