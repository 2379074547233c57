"""The entry that a kit or a plugin registers for each of its commands of `lightning-rl`, and the hook of kits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_spans.hooks import hookimpl


class ListedCommand(NamedTuple):
    """A command that is imported when it is called, so that `lightning-rl --help` stays fast.

    Attributes:
        module: the module that defines it, as `command`.
        help: its line in the list of commands.
        after: the command that it follows in the list; empty for the end.
    """

    module: str
    help: str
    after: str = ""


def command_hook(**commands: ListedCommand) -> Callable[..., None]:
    """Return a kit's `lightning_register_commands`, which registers these commands by name."""

    @hookimpl
    def register_commands(register: Callable[[str, Any], None]) -> None:
        for name, listed in commands.items():
            register(name, listed)

    return register_commands
