"""Tool calls that models have asked for, until the tools are called: whose they are, and their ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple


class ToolRequest(NamedTuple):
    """A tool call that a model asked for.

    Attributes:
        call_id: the model's name for it.
        name: of the tool.
        arguments: as the framework has them: JSON text, or read.
        agent: whose model it was, where that is needed to tell.
    """

    call_id: str | None
    name: str
    arguments: str | Mapping[str, Any]
    agent: str | None = None


def take(
    requests: list[ToolRequest], fits: Callable[[ToolRequest], bool], rather: Callable[[ToolRequest], bool]
) -> ToolRequest | None:
    """Take out the request that a tool's call is made for; None when there is none.

    Args:
        requests: what waits, oldest first.
        fits: whether it can be this one.
        rather: which to prefer of those that fit.
    """
    for request in sorted(filter(fits, list(requests)), key=rather, reverse=True):  # stable: the oldest of equals
        with suppress(ValueError):  # taken by a tool that began at the same time, in another thread
            requests.remove(request)
            return request
    return None
