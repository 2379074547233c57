"""Which of the lines that may be written are: by reward, by group, once each, and held out by task."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from lightning_trainer.kits.export.candidates import LineCandidate
from lightning_trainer.kits.export.wanted import Unexported, Wanted

# What more of the tasks than this begin with says nothing of the task: a router's or a planner's constant prompt.
_COMMON: Final = 0.1


@dataclass(frozen=True, slots=True)
class Chosen:
    """Lines to write: to learn from, and held out."""

    training: list[LineCandidate]
    held_out: list[LineCandidate]


def by_reward(candidates: Iterable[LineCandidate], wanted: Wanted, left_out: Counter[str]) -> list[LineCandidate]:
    """Keep what earned enough, and of each group and agent the best attempts.

    For pairs the least reward is that of the better answer: see `pairs`.
    """
    kept = list(candidates)
    if wanted.min_reward is not None and wanted.format != "dpo":
        least = wanted.min_reward
        kept = _keep(kept, left_out, lambda each: _too_low(each, least))
    if wanted.best is not None:
        kept = _keep(kept, left_out, lambda each: Unexported.NO_REWARD if each.reward is None else None)
        best = _best(kept, wanted.best)
        kept = _keep(
            kept, left_out, lambda each: None if each.attempt in best[each.group, each.agent] else Unexported.NOT_BEST
        )
    return kept


def _too_low(candidate: LineCandidate, least: float) -> str | None:
    if candidate.reward is None:
        return Unexported.NO_REWARD
    return Unexported.LOW_REWARD if candidate.reward < least else None


def _best(candidates: Sequence[LineCandidate], count: int) -> Mapping[tuple[str, str | None], frozenset[str]]:
    earned: defaultdict[tuple[str, str | None], dict[str, float]] = defaultdict(dict)
    for each in candidates:
        earned[each.group, each.agent].setdefault(each.attempt, each.reward or 0.0)
    return {
        key: frozenset(sorted(attempts, key=lambda attempt: -attempts[attempt])[:count])  # of equals the first
        for key, attempts in earned.items()
    }


def once(candidates: Sequence[LineCandidate], left_out: Counter[str]) -> list[LineCandidate]:
    """Keep of equal lines the one that earned most, of these the first."""
    best: dict[str, LineCandidate] = {}
    for each in candidates:
        known = best.get(each.content)
        if known is None or (each.reward or 0.0) > (known.reward or 0.0):
            best[each.content] = each
    return _keep(candidates, left_out, lambda each: None if best[each.content] is each else Unexported.TWICE)


class PlayedTasks(Protocol):
    """An attempt, by what says which task it played. `LineCandidate` and `StoredEpisode` have the fields."""

    @property
    def group(self) -> str:
        """Attempts that are compared."""

    @property
    def task(self) -> str | None:
        """Digest of the task; None where nobody named one."""

    @property
    def opening(self) -> str | None:
        """Digest of what its first call was asked."""

    @property
    def validation(self) -> bool:
        """Whether it was run to validate."""


def split(
    candidates: Sequence[LineCandidate],
    wanted: Wanted,
    left_out: Counter[str],
    played: Sequence[PlayedTasks] | None = None,
) -> Chosen:
    """Hold out the lines of some tasks, whole: no task is in both parts, and no prompt.

    Which ones follows from the tasks alone, and so stays the same while others come to the store, and whatever else is
    asked for. A task that any validation ran is held out, whatever became of that.

    Args:
        candidates: the lines.
        wanted: the share among it.
        left_out: counts the calls of lines that are in neither part.
        played: all attempts, those without a line among them; None: those of the lines.
    """
    if not wanted.held_out:
        kept = candidates
        if not wanted.validation:
            kept = _keep(kept, left_out, lambda each: Unexported.VALIDATION if each.validation else None)
        return Chosen(list(kept), [])
    played = candidates if played is None else played
    names = _tasks(played)
    validated = {names[each.group] for each in played if each.validation}
    out = [names[each.group] in validated or _draw(names[each.group]) < wanted.held_out for each in candidates]
    training = [each for each, is_out in zip(candidates, out, strict=True) if not is_out]
    asked = {each.prompt for each in training}
    held_out = [each for each, is_out in zip(candidates, out, strict=True) if is_out]
    held_out = _keep(held_out, left_out, lambda each: Unexported.SEEN_IN_TRAINING if each.prompt in asked else None)
    return Chosen(training, held_out)


def _tasks(played: Sequence[PlayedTasks]) -> dict[str, str]:
    """Name the task of each group: the same for the same task, the same group, and what begins with the same prompt.

    A prompt with which a tenth of the tasks begins joins nothing, except where nothing else says which task it is.
    """
    begun: defaultdict[str, set[str]] = defaultdict(set)
    for each in played:
        if each.opening is not None and each.task is not None:
            begun[each.opening].add(each.task)
    tasks = {each.task for each in played if each.task is not None}
    common = {opening for opening, its in begun.items() if len(its) > max(2, _COMMON * len(tasks))}
    joined = _Joined()
    for each in played:
        keys = [f"group {each.group}"]
        keys += [] if each.task is None else [f"task {each.task}"]
        keys += [] if each.opening is None or each.opening in common else [f"opening {each.opening}"]
        for key in keys[1:]:
            joined.join(keys[0], key)
    return {each.group: joined.name(f"group {each.group}") for each in played}


class _Joined:
    """Names that stand for the same, each called by the least of those that say what the task is."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def name(self, key: str) -> str:
        root = key
        while self._parent.get(root, root) != root:
            root = self._parent[root]
        while self._parent.get(key, key) != root:
            self._parent[key], key = root, self._parent[key]
        return root

    def join(self, one: str, other: str) -> None:
        # Tasks and openings are digests of what was asked; a group's name is of one run alone, and so the last choice.
        roots = sorted({self.name(one), self.name(other)}, key=lambda key: (key.startswith("group"), key))
        self._parent[roots[-1]] = roots[0]


def _draw(name: str) -> float:
    """Return a number from 0 to 1 that follows from a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]) / 2**56


def _keep(
    candidates: Sequence[LineCandidate], left_out: Counter[str], why_not: Callable[[LineCandidate], str | None]
) -> list[LineCandidate]:
    kept = []
    for each in candidates:
        reason = why_not(each)
        if reason is None:
            kept.append(each)
        else:
            left_out[reason] += each.calls
    return kept
