"""Where a command works in each attempt, and which other command gives its reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lightning_spans.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Options of a command's work.

    Attributes:
        workdir: each attempt works in a clone or a copy of this folder; None: all where the runner was started.
        workdir_size: most that such a folder may take, such as ``2GiB``.
        restore: globs of files there that are put back as they were before the reward.
        reward_command: program and arguments that give the reward, run where the command worked; None: none does.
        reward_timeout_s: after which it has earned 0.
    """

    workdir: str | None = None
    workdir_size: str = "2GiB"
    restore: Sequence[str] = ()
    reward_command: str | None = None
    reward_timeout_s: float = 120.0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Work:
        """Return those that stand among a run's options."""
        return cls(**{each.name: options[each.name] for each in fields(cls) if options.get(each.name) is not None})

    def check(self, *, command: str | None, reward: str | None) -> None:
        """See that these options belong together.

        Args:
            command: the agent, where it is a command.
            reward: who else gives the reward.

        Raises:
            ConfigError: they do not.
        """
        problems = {
            "workdir is of agents that are a command. Give --command, or leave workdir out.": (
                self.workdir is not None and command is None
            ),
            "reward_command is of agents that are a command. Give --command, or --reward module:function.": (
                self.reward_command is not None and command is None
            ),
            "reward and reward_command are two rewards. Give one of them.": (
                self.reward_command is not None and reward is not None
            ),
            "restore puts files of a workdir back before the reward_command. Give both, or leave restore out.": (
                bool(self.restore) and None in (self.workdir, self.reward_command)
            ),
        }
        for message, wrong in problems.items():
            if wrong:
                raise ConfigError(message)
