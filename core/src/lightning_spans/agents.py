"""Selection of agents by name: exact, or an explicit glob."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import Final

from lightning_spans.errors import UnknownAgentError

_GLOB = frozenset("*?[")
_ALIKE: Final = 0.8  # of difflib's ratio: one letter of five wrong, or two of a longer name exchanged


def selects(patterns: Sequence[str], agent: str | None) -> bool:
    """Whether one of the names or globs matches the whole name. None, an unknown agent, is never selected.

    An exact name matches itself even when it holds glob characters; `writer` never matches `rewriter`.
    """
    return agent is not None and any(
        agent == pattern or (_GLOB & set(pattern) and fnmatchcase(agent, pattern)) for pattern in patterns
    )


def unheard(patterns: Sequence[str], seen: Iterable[str]) -> list[str]:
    """Give the names and globs that match no agent that was seen."""
    names = set(seen)
    return [pattern for pattern in patterns if not any(selects([pattern], name) for name in names)]


def check_known(patterns: Sequence[str], seen: Iterable[str]) -> None:
    """Refuse a selection that matches nothing.

    Raises:
        UnknownAgentError: a name or glob matches no agent that was seen; the message lists those that were.
    """
    names = sorted(set(seen))
    for pattern in unheard(patterns, names):
        listed = ", ".join(names) if names else "none: no call carried an agent name. Is attach() called?"
        raise UnknownAgentError(f"agent {pattern!r} was never seen. Agents seen: {listed}")


def check_spelling(patterns: Sequence[str], seen: Iterable[str]) -> None:
    """Refuse a name that was not seen, where an agent that nothing selects has nearly the same.

    An agent need not speak in every rollout: one that was not seen may still come. One that is meant and misspelt
    never will.

    Raises:
        UnknownAgentError: a name is misspelt; the message says what is meant.
    """
    names = sorted(set(seen))
    left = [name for name in names if not selects(patterns, name)]
    for pattern in unheard(patterns, names):
        for name in left:
            if not _GLOB & set(pattern) and _alike(pattern, name):
                raise UnknownAgentError(
                    f"agent {pattern!r} was never seen, but {name!r} was. Is that the one? Agents seen: "
                    f"{', '.join(names)}"
                )


def _alike(one: str, other: str) -> bool:
    """Whether one name is the other, misspelt: not another number, and not a name within a name as in `rewriter`."""
    left, right = one.casefold(), other.casefold()
    if [c for c in left if c.isdigit()] != [c for c in right if c.isdigit()]:
        return False
    return left == right or (abs(len(left) - len(right)) <= 1 and SequenceMatcher(None, left, right).ratio() >= _ALIKE)
