"""A sandbox for the commands of an attempt: the agent's, and the one that computes the reward."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Final, NamedTuple

from lightning_spans.schema.attempts import Attempt
from lightning_trainer.runner.environment import without_keys
from lightning_trainer.runner.sandbox.door import Door, inside
from lightning_trainer.runner.sandbox.launch import SandboxPlan, bubblewrap, container
from lightning_trainer.runner.sandbox.mounts import expand_paths, shared_objects
from lightning_trainer.work import BUBBLEWRAP, Work

# What a program needs to communicate; for bubblewrap also PATH, because its programs are this machine's.
_PASSED: Final = (
    "LANG", "LANGUAGE", "LC_*", "TZ", "TERM", "COLORTERM", "NO_COLOR", "FORCE_COLOR", "PYTHONUNBUFFERED",
    "OTEL_SDK_DISABLED", "LIGHTNING_BOUNDS", "LIGHTNING_REDACT",
)  # fmt: skip
_END_S: Final = 20.0


class StartedCommand(NamedTuple):
    """How a command is started in a sandbox, and asked to end.

    Attributes:
        words: program and arguments.
        environment: all its variables.
        ask_to_end: asks all that runs in the sandbox to end; False if nothing runs there yet.
    """

    words: list[str]
    environment: dict[str, str]
    ask_to_end: Callable[[], bool]


class Sandbox:
    """The place where the commands of one attempt run. They see a work folder and the system's programs.

    The only address that they reach is the gateway.

    Args:
        work: its options.
        folder: the attempt's work folder, in which no agent has worked yet.
        most_bytes: size of its /tmp.

    Attributes:
        opened: whether the sandbox of the last command was opened; otherwise that command did not run.
    """

    opened = False

    def __init__(self, work: Work, folder: Path, most_bytes: int) -> None:
        self._work, self._folder, self._most_bytes = work, folder, most_bytes
        self._readable = [*expand_paths(work.sandbox_read), *shared_objects(folder)]

    @staticmethod
    def view(attempt: Attempt) -> Attempt:
        """Return an attempt as its commands see it: the gateway is on a port of the sandbox."""
        return replace(attempt, endpoint=inside(attempt.endpoint))

    @asynccontextmanager
    async def started(
        self, words: Sequence[str], given: Mapping[str, str], descriptors: Sequence[int], endpoint: str | None
    ) -> AsyncIterator[StartedCommand]:
        """Open the way out; yield what starts the command in the sandbox.

        Args:
            words: program and arguments.
            given: variables that it gets.
            descriptors: file descriptors that it inherits, under the same numbers.
            endpoint: the only address that it reaches; None: none.
        """
        name = f"lightning-{os.getpid()}-{secrets.token_hex(8)}"
        async with Door(endpoint, descriptors, self._folder.parent) as door:
            try:
                yield StartedCommand(*self._launch(words, given, door, name), door.ask_to_end)
            finally:
                self.opened = door.accepted
                await asyncio.to_thread(self._end, name)

    def _launch(
        self, words: Sequence[str], given: Mapping[str, str], door: Door, name: str
    ) -> tuple[list[str], dict[str, str]]:
        plan = SandboxPlan(
            words=words,
            environment={**self._environment, **given},
            folder=self._folder,
            readable=self._readable,
            door=door.folder,
            arguments=door.arguments,
            most_bytes=self._most_bytes,
            image=self._work.sandbox_image or "",
            name=name,
        )
        program = self._work.sandbox or ""
        return bubblewrap(plan) if program == BUBBLEWRAP else container(program, plan)

    @cached_property
    def _environment(self) -> dict[str, str]:
        path = ("PATH",) if self._work.sandbox == BUBBLEWRAP else ()
        wanted = (*_PASSED, *path, *self._work.sandbox_env)
        environment = without_keys(os.environ)
        return {name: value for name, value in environment.items() if any(fnmatchcase(name, each) for each in wanted)}

    def _end(self, name: str) -> None:
        """Remove a container that outlived its client, for example because the client was killed."""
        if self._work.sandbox != BUBBLEWRAP:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(  # noqa: S603 - the user chose the program
                    [self._work.sandbox or "", "rm", "--force", name],
                    capture_output=True,
                    check=False,
                    timeout=_END_S,
                )
