"""A process that is killed while it changes folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest


class Killed(BaseException):
    """The process was killed."""


@contextmanager
def killed_after(calls: int) -> Iterator[list[str]]:
    """Let the block create, rename and remove only so many files and folders; then it ends.

    Yields:
        The names of the calls that came too late.
    """
    made, late = list[str](), list[str]()

    def counting(name: str) -> Any:
        real = getattr(os, name)

        def call(*args: Any, **named: Any) -> Any:
            (made if len(made) < calls else late).append(name)
            if late:
                raise Killed
            return real(*args, **named)

        return call

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        for name in ("mkdir", "rename", "replace", "symlink", "unlink", "rmdir"):
            patch.setattr(os, name, counting(name))
        yield late
