"""Options of a command: its work folder, its sandbox, and the command that gives its reward."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import PurePath
from typing import Any, Final, Literal

from lightning_spans.errors import ConfigError

FROM_DESCRIPTOR: Final = "fd"  # `reward_from`: a file descriptor whose number is in LIGHTNING_REWARD_FD

BUBBLEWRAP: Final = "bwrap"
SandboxProgram = Literal["bwrap", "docker", "podman"]  # programs that open a sandbox


def is_inside(path: str) -> bool:
    """Whether a path that is relative to a folder leads to something in it. Links are not looked at."""
    normal = PurePath(os.path.normpath(path))
    return "\0" not in path and not normal.is_absolute() and normal.parts[:1] not in ((), ("..",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Options of a command's work.

    Attributes:
        workdir: each attempt works in a clone or a copy of this folder; None: all work where the runner was started.
        workdir_size: maximum size of such a folder, such as ``2GiB``.
        restore: globs of files there that are restored before the reward.
        reward_command: program and arguments that give the reward, run where the command worked; None: no such program.
        reward_timeout_s: seconds after which the reward is 0.
        reward_from: where a command writes its reward: ``fd``, or a file; None: on the last line that it prints.
        reward_range: least and greatest reward that a command may give, separated by a comma.
        sandbox: program that opens a sandbox for each command; None: no sandbox.
        sandbox_image: container image that docker or podman start.
        sandbox_read: files and folders of this machine that the sandbox may also read.
        sandbox_env: names, or globs, of environment variables that the sandbox also gets.
    """

    workdir: str | None = None
    workdir_size: str = "2GiB"
    restore: Sequence[str] = ()
    reward_command: str | None = None
    reward_timeout_s: float = 120.0
    reward_from: str | None = None
    reward_range: str = "0,1"
    sandbox: SandboxProgram | None = None
    sandbox_image: str | None = None
    sandbox_read: Sequence[str] = ()
    sandbox_env: Sequence[str] = ()

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and greatest reward.

        Raises:
            ConfigError: `reward_range` is not a range.
        """
        try:
            low, high = map(float, self.reward_range.split(","))
        except ValueError:
            low, high = math.nan, math.nan
        if low >= high:
            raise ConfigError(
                f"reward_range {self.reward_range!r}: the minimum {low:g} is not below the maximum {high:g}. Give the"
                " minimum first, as in 0,10."
            )
        if math.isnan(low) or math.isnan(high):
            raise ConfigError(f"reward_range {self.reward_range!r}: write it as LOW,HIGH, such as 0,1 or -1,1.")
        return low, high

    def declared(self, *, command: str | None, reward: str | None) -> tuple[float, float] | None:
        """Return the range of all rewards.

        None if it is infinite, or if no command gives them, because others are not limited.
        """
        if command is None or reward is not None or not all(map(math.isfinite, self.bounds)):
            return None
        return self.bounds

    @classmethod
    def declared_in(cls, options: Mapping[str, Any]) -> tuple[float, float] | None:
        """Return the same from a run's stored options; None also if they are invalid."""
        try:
            return cls.of(options).declared(command=options.get("command"), reward=options.get("reward"))
        except (ConfigError, TypeError, AttributeError):
            return None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Work:
        """Return the work options among a run's options."""
        given: dict[str, Any] = {
            each.name: options[each.name] for each in fields(cls) if options.get(each.name) is not None
        }
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}  # from JSON
        return cls(**{**given, **lists})

    def check(self, *, command: str | None, reward: str | None) -> None:
        """Check that these options are compatible.

        Args:
            command: the agent, if it is a command.
            reward: the other source of the reward.

        Raises:
            ConfigError: they are not.
        """
        _ = self.bounds
        by_command = command is not None and reward is None
        problems = {
            "reward_from needs a command's rewards. Give --command, or leave reward_from out.": (
                self.reward_from is not None and not by_command
            ),
            "reward_from names a path that is not in the workdir. Give a path in it, such as reward.json.": (
                None not in (self.workdir, self.reward_from)
                and "{" not in str(self.reward_from)
                and not is_inside(str(self.reward_from))
            ),
            "workdir needs an agent that is a command. Give --command, or leave workdir out.": (
                self.workdir is not None and command is None
            ),
            "reward_command needs an agent that is a command. Give --command, or --reward module:function.": (
                self.reward_command is not None and command is None
            ),
            "reward and reward_command both set the reward. Give one of them.": (
                self.reward_command is not None and reward is not None
            ),
            "restore resets files of a workdir before the reward_command runs. Give both, or leave restore out.": (
                bool(self.restore) and None in (self.workdir, self.reward_command)
            ),
            "sandbox needs a command with a work folder, because the command sees nothing else. Give --command and"
            " --workdir, or leave sandbox out.": (self.sandbox is not None and None in (command, self.workdir)),
            "sandbox docker and podman start a container. Name its image with --sandbox-image.": (
                self.sandbox not in (None, BUBBLEWRAP) and self.sandbox_image is None
            ),
            "sandbox_image needs docker or podman. Choose one of them with --sandbox, or leave it out.": (
                self.sandbox_image is not None and self.sandbox in (None, BUBBLEWRAP)
            ),
            "sandbox_read and sandbox_env need a sandbox. Give --sandbox, or leave them out.": (
                self.sandbox is None and bool(self.sandbox_read or self.sandbox_env)
            ),
        }
        for message, wrong in problems.items():
            if wrong:
                raise ConfigError(message)
