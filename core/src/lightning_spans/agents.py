"""Selection of agents by name: exact, or an explicit glob."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from lightning_spans.errors import UnknownAgentError

_GLOB = frozenset("*?[")


def selects(patterns: Sequence[str], agent: str | None) -> bool:
    """Whether one of the names or globs matches the whole name. None, an unknown agent, is never selected.

    An exact name matches itself even when it holds glob characters; `writer` never matches `rewriter`.
    """
    return agent is not None and any(
        agent == pattern or (_GLOB & set(pattern) and fnmatchcase(agent, pattern)) for pattern in patterns
    )


def check_known(patterns: Sequence[str], seen: Iterable[str]) -> None:
    """Refuse a selection that matches nothing.

    Raises:
        UnknownAgentError: a name or glob matches no agent that was seen; the message lists those that were.
    """
    names = sorted(set(seen))
    for pattern in patterns:
        if not any(selects([pattern], name) for name in names):
            listed = ", ".join(names) if names else "none: no call carried an agent name. Is attach() called?"
            raise UnknownAgentError(f"agent {pattern!r} was never seen. Agents seen: {listed}")
