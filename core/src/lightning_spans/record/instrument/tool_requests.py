"""Tool calls that models have asked for and that have not run yet: their agents and their ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple


class ToolRequest(NamedTuple):
    """A tool call that a model asked for.

    Attributes:
        call_id: the model's id of the call.
        name: of the tool.
        arguments: as the framework has them: JSON text, or parsed.
        agent: whose model asked, if that is needed to tell calls apart.
    """

    call_id: str | None
    name: str
    arguments: str | Mapping[str, Any]
    agent: str | None = None


def take(
    requests: list[ToolRequest], fits: Callable[[ToolRequest], bool], rather: Callable[[ToolRequest], bool]
) -> ToolRequest | None:
    """Take out the request that a tool call answers; None if there is none.

    Args:
        requests: waiting requests, oldest first.
        fits: whether a request can be this call's.
        rather: which to prefer among those.
    """
    for request in sorted(filter(fits, list(requests)), key=rather, reverse=True):  # stable: the oldest among equals
        with suppress(ValueError):  # taken by a tool that began at the same time, in another thread
            requests.remove(request)
            return request
    return None
