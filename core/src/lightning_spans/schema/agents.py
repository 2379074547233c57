"""An agent's name is a path, outermost first: `billing/extract`. Selection of agents by name or glob.

The innermost name is what the agent is called; the path says where it stands. A slash inside a name is doubled.
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
_ANY: Final = "**"  # in a pattern: any number of parts, none too
_ALIKE: Final = 0.8  # of difflib's ratio: one letter of five wrong, or two of a longer name exchanged


def written(name: str) -> str:
    """Return a name as a part of a path."""
    return name.replace("/", "//")


@functools.lru_cache(1024)
def parts_of(path: str) -> tuple[str, ...]:
    """Return the names in a path, outermost first."""
    return tuple(part.replace("\0", "/") for part in path.replace("//", "\0").split("/"))


def name_of(path: str) -> str:
    """Return the innermost name of a path: what the agent is called."""
    return parts_of(path)[-1] if "/" in path else path


def path_of(agent: str, path: object) -> str:
    """Return where an agent stands: the path that is known for it, if it is one of it, else its name alone.

    An agent that is counted by its path (`label`) is called that.
    """
    return path if isinstance(path, str) and agent in {name_of(path), path} else written(agent)


def is_glob(pattern: str) -> bool:
    """Whether a pattern may mean several agents, and is not an exact name."""
    return bool(_GLOB & set(pattern))


def selects(patterns: Sequence[str], agent: str | None) -> bool:
    """Whether one of the names or globs means an agent. None, an unknown agent, is never meant.

    A pattern without a slash is compared with the whole innermost name: `writer` never matches `rewriter`. One with
    slashes is compared with the end of the path, part by part, where ``**`` stands for any number of parts: both
    `billing/extract` and `billing/**` match `app/billing/extract`. An exact name matches itself even when it holds glob
    characters.

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

    That is the innermost name, except where it is selected by a pattern of its path, which tells it from its namesakes:
    then it is the path.
    """
    name = name_of(path)
    chosen = any("/" in pattern and pattern != name and selects((pattern,), path) for pattern in patterns or ())
    return path if chosen else name


def labels(paths: Iterable[str]) -> Mapping[str, str]:
    """Return by path what to call each agent of a list: its name, or its path where another has the same name."""
    by_name: defaultdict[str, set[str]] = defaultdict(set)
    for path in paths:
        by_name[name_of(path)].add(path)
    return {path: name if len(found) == 1 else path for name, found in by_name.items() for path in found}


def unheard(patterns: Sequence[str], seen: Iterable[str]) -> list[str]:
    """Return the names and globs that match no agent that was seen."""
    paths = set(seen)
    return [pattern for pattern in patterns if not any(selects([pattern], path) for path in paths)]


def check_known(patterns: Sequence[str], seen: Iterable[str]) -> None:
    """Refuse a selection that matches nothing.

    Raises:
        UnknownAgentError: a name or glob matches no agent that was seen; the message lists those that were.
    """
    paths = set(seen)
    names = sorted(labels(paths).values())
    for pattern in unheard(patterns, paths):
        listed = ", ".join(names) if names else "none: no call carried an agent name. Is attach() called?"
        raise UnknownAgentError(f"agent {pattern!r} was never seen. Agents seen: {listed}")


def check_spelling(patterns: Sequence[str], seen: Iterable[str]) -> None:
    """Refuse a name that was not seen, where an agent that nothing selects has nearly the same.

    An agent need not speak in every rollout: one that was not seen may still come. One that is meant and misspelt
    never will.

    Raises:
        UnknownAgentError: a name is misspelt; the message says what is meant.
    """
    paths = set(seen)
    names = sorted(labels(paths).values())
    left = sorted({name_of(path) for path in paths if not selects(patterns, path)})
    for pattern in unheard(patterns, paths):
        for name in left:
            if not is_glob(pattern) and _alike(pattern, name):
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
