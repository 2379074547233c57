"""An agent's name is a path, outermost first: `billing/extract`. Selection of agents by name or glob.

The innermost name is the agent's own name; the path is its position. A slash within a name is doubled.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from typing import Final

from lightning_spans.errors import UnknownAgentError

_GLOB = frozenset("*?[")
_ANY: Final = "**"  # in a pattern: any number of parts, including none
_ALIKE: Final = 0.8  # of difflib's ratio: one wrong letter of five, or two swapped ones in a longer name


def escape_name(name: str) -> str:
    """Return a name as a part of a path."""
    return name.replace("/", "//")


@functools.lru_cache(1024)
def parts_of(path: str) -> tuple[str, ...]:
    """Return the names in a path, outermost first."""
    return tuple(part.replace("\0", "/") for part in path.replace("//", "\0").split("/"))


def name_of(path: str) -> str:
    """Return the innermost name of a path: the agent's own name."""
    return parts_of(path)[-1] if "/" in path else path


def path_of(agent: str, path: object) -> str:
    """Return an agent's path: the known path if it belongs to the agent, otherwise its name alone.

    An agent that is counted by its path (`label`) is named by it.
    """
    return path if isinstance(path, str) and agent in {name_of(path), path} else escape_name(agent)


def is_glob(pattern: str) -> bool:
    """Whether a pattern may match several agents, and is not an exact name."""
    return bool(_GLOB & set(pattern))


def selects(patterns: Sequence[str], agent: str | None) -> bool:
    """Whether one of the names or globs matches an agent. None, an unknown agent, is never matched.

    A pattern without a slash is compared with the whole innermost name: `writer` never matches `rewriter`. One with
    slashes is compared with the end of the path, part by part, where ``**`` stands for any number of parts: both
    `billing/extract` and `billing/**` match `app/billing/extract`. An exact name matches itself even if it contains
    glob characters.

    Args:
        patterns: names and globs.
        agent: its path.
    """
    if agent is None:
        return False
    name = name_of(agent)
    return any(
        pattern in {name, agent}
        or (is_glob(pattern) and fnmatchcase(name, pattern))
        or ("/" in pattern and _fits((_ANY, *parts_of(pattern)), parts_of(agent)))
        for pattern in patterns
    )


def _fits(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == _ANY:
        return any(_fits(pattern[1:], parts[start:]) for start in range(len(parts) + 1))
    first = bool(parts) and (parts[0] == pattern[0] or fnmatchcase(parts[0], pattern[0]))
    return first and _fits(pattern[1:], parts[1:])


def earns(named: str | None, path: str | None) -> bool:
    """Whether a reward that names an agent, or with None the whole attempt, is for the agent of this path."""
    return named is None or selects((named,), path)


def label(path: str, patterns: Iterable[str] | None) -> str:
    """Return the name under which an agent's calls are counted and compared.

    This is the innermost name, unless the agent is selected by a pattern of its path, which distinguishes it from
    agents of the same name: then it is the path.
    """
    name = name_of(path)
    chosen = any("/" in pattern and pattern != name and selects((pattern,), path) for pattern in patterns or ())
    return path if chosen else name


def labels(paths: Iterable[str]) -> Mapping[str, str]:
    """Return by path the label of each agent in a list: its name, or its path if another has the same name."""
    by_name: defaultdict[str, set[str]] = defaultdict(set)
    for path in paths:
        by_name[name_of(path)].add(path)
    return {path: name if len(found) == 1 else path for name, found in by_name.items() for path in found}


def unheard(patterns: Sequence[str], seen: Iterable[str]) -> list[str]:
    """Return the names and globs that match no agent that was seen."""
    paths = set(seen)
    return [pattern for pattern in patterns if not any(selects([pattern], path) for path in paths)]


def check_known(patterns: Sequence[str], seen: Iterable[str]) -> None:
    """Reject a selection that matches nothing.

    Raises:
        UnknownAgentError: a name or glob matches no agent that was seen; the message lists those that were.
    """
    paths = set(seen)
    names = sorted(labels(paths).values())
    for pattern in unheard(patterns, paths):
        listed = ", ".join(names) if names else "none: no call carried an agent name. Is attach() called?"
        raise UnknownAgentError(f"agent {pattern!r} was never seen. Agents seen: {listed}")


def check_spelling(patterns: Sequence[str], seen: Iterable[str]) -> None:
    """Reject a name that was not seen, if an agent with a similar name is not selected.

    An agent need not call in every rollout: one that was not seen may call later. A misspelt one never will.

    Raises:
        UnknownAgentError: a name is misspelt; the message suggests the right one.
    """
    paths = set(seen)
    names = sorted(labels(paths).values())
    left = sorted({name_of(path) for path in paths if not selects(patterns, path)})
    for pattern in unheard(patterns, paths):
        for name in left:
            if not is_glob(pattern) and _alike(pattern, name):
                raise UnknownAgentError(
                    f"agent {pattern!r} was never seen, but {name!r} was. Did you mean that one? Agents seen: "
                    f"{', '.join(names)}"
                )


def _alike(one: str, other: str) -> bool:
    """Whether one name is a misspelling of the other: no other number, and no name within a name as in `rewriter`."""
    left, right = one.casefold(), other.casefold()
    if [c for c in left if c.isdigit()] != [c for c in right if c.isdigit()]:
        return False
    return left == right or (abs(len(left) - len(right)) <= 1 and SequenceMatcher(None, left, right).ratio() >= _ALIKE)
