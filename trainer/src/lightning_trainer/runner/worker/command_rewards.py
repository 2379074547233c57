"""The reward of a command: first from its exit status, then from its output, or from a file or pipe for the reward."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError, RewardError
from lightning_spans.schema.json import dumps
from lightning_trainer.runner.worker.command import ProcessEnd, fill_fields, result_of
from lightning_trainer.runner.worker.trees import read_file, remove_file
from lightning_trainer.work import FROM_DESCRIPTOR, Work, is_inside

VARIABLE: Final = "LIGHTNING_REWARD_FD"  # the descriptor's number, with `reward_from = fd`
_KEY: Final = "reward"
_MOST_BYTES: Final = 65_536  # of a reward in a file; the capacity of a pipe


class RewardRefusedError(Exception):
    """A command gave a reward outside the range, or none although it had to write one: its attempt has failed."""


@dataclass
class RewardChannel:
    """Where a command writes its reward; a context, because a descriptor is open for one command only.

    Attributes:
        work: the options that say where.
        folder: the command's working folder; None: the current one.
        task: its fields may be used in a path.
    """

    work: Work
    folder: Path | None
    task: Mapping[str, str]
    _ends: tuple[int, int] | None = field(default=None, init=False)

    def __enter__(self) -> RewardChannel:
        """Open the descriptor, or delete the file of an earlier program.

        Raises:
            ConfigError: the file is not in the working folder.
            RewardRefusedError: it cannot be deleted.
        """
        if self.work.reward_from == FROM_DESCRIPTOR:
            self._ends = os.pipe()
            os.set_blocking(self._ends[0], False)
        elif (where := self._place()) is not None:
            try:
                remove_file(*where)
            except OSError as error:
                raise RewardRefusedError(
                    f"{self.work.reward_from!r} (--reward-from) can't be deleted before the command starts:"
                    f" {error.strerror}. Leave no folder there."
                ) from None
        return self

    def __exit__(self, *exc: object) -> None:
        for end in self._ends or ():
            os.close(end)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The file descriptors that the command inherits."""
        return () if self._ends is None else self._ends[1:]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that name the descriptor for the command."""
        return {} if self._ends is None else {VARIABLE: str(self._ends[1])}

    def read(self, ended: ProcessEnd) -> Any:
        """Return the reward of a command that ended with status 0; None if it gave none.

        Raises:
            RewardRefusedError: it is outside the range, or it had to be written and was not.
        """
        if self.work.reward_from is None:
            said = result_of(ended.output)
            found = said[_KEY] if isinstance(said, Mapping) and set(said) == {_KEY} else None
        else:
            found = result_of(self._text())
            found = found[_KEY] if isinstance(found, Mapping) and set(found) == {_KEY} else found
            if found is None:
                raise RewardRefusedError(
                    f"the command wrote no reward to {self.work.reward_from!r} (--reward-from). Links and pipes are not"
                    " read: let it write a file."
                )
        return None if found is None else self._check_bounds(found)

    def _text(self) -> str:
        content: bytes | None = None
        if self._ends is not None:
            with contextlib.suppress(OSError):  # nothing was written
                content = os.read(self._ends[0], _MOST_BYTES)
        elif (where := self._place()) is not None:
            content = read_file(*where, _MOST_BYTES)
        return (content or b"").decode(errors="replace")

    def _place(self) -> tuple[Path, str] | None:
        """Return a folder, and the path in it of the file with the reward; None if it is not in a file.

        Raises:
            ConfigError: the file is not in the work folder.
        """
        where = self.work.reward_from
        if where is None or where == FROM_DESCRIPTOR:
            return None
        path = fill_fields(where, self.task)
        if self.folder is None:
            whole = Path.cwd() / path
            return whole.parent.resolve(), whole.name
        if not is_inside(path):
            raise ConfigError(
                f"a task's field makes --reward-from {where!r} {path!r}, which is not in the work folder. Use a field"
                " that is the name of a file."
            )
        return self.folder, os.path.normpath(path)

    def _check_bounds(self, reward: Any) -> Any:
        low, high = self.work.bounds
        numbers = list(reward.values()) if isinstance(reward, Mapping) else [reward]
        for number in numbers or [None]:
            if not _is_number(number):
                raise RewardRefusedError(
                    f"the command gave {_describe_value(number)} as its reward. A reward is a number within"
                    f" --reward-range {self.work.reward_range}, or an object with a number for each agent: print"
                    ' {"reward": 0.5} or {"reward": {"NAME": 0.5}}.'
                )
            if not low <= number <= high:
                raise RewardRefusedError(
                    f"the command gave the reward {str(number)[:40]!r}, which is not within --reward-range"
                    f" {self.work.reward_range}. Give a number within it, or set another range."
                )
        return reward


def reward_of_agent(channel: RewardChannel, ended: ProcessEnd, *, needs_reward: bool) -> Any:
    """Return the reward that an agent's command gave itself.

    Raises:
        RewardError: it gave none, and one is required.
        RewardRefusedError: see `RewardChannel.read`.
    """
    reward = channel.read(ended)
    if reward is None and needs_reward:
        last = repr((ended.output.strip() or "nothing")[-80:])
        raise RewardError(
            f"the command printed {last} at its end, which is not accepted as a reward: a model could have written it."
            ' Print {"reward": 0.5} as the last line, or {"reward": {"NAME": 0.5}} by agent; or give --reward-from,'
            " --reward-command or --reward."
        )
    return reward


def reward_of(channel: RewardChannel, ended: ProcessEnd) -> Any:
    """Return the reward of a reward command that ended: 0 if its exit status is not 0, otherwise what it gave, or 1.

    Raises:
        RewardRefusedError: see `RewardChannel.read`.
    """
    if ended.status != 0:
        return 0.0
    reward = channel.read(ended)
    if reward is None and _is_number(result_of(ended.output)):
        last = str(result_of(ended.output))[:40]
        sys.stderr.write(
            f"the reward command's last line is the number {last}, which is not a reward: its exit status 0 earned 1."
            f' Print {{"reward": {last}}} if it is meant to be the reward.\n'
        )
    return 1.0 if reward is None else reward


def _describe_value(value: object) -> str:
    """Return a value that is not a number, as JSON with a description of its kind."""
    kinds = {bool: "true or false", str: "text", list: "a list", dict: "an object", type(None): "nothing"}
    kind = kinds.get(type(value), "a number that is not finite")
    return f"{dumps(value).decode()[:40]} ({kind})" if type(value) in kinds else f"{str(value)[:40]} ({kind})"


def _is_number(value: object) -> bool:
    with contextlib.suppress(OverflowError):  # an integer beyond all floats
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return False
