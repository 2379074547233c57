"""Selection of the candidate lines: by reward, by group, without duplicates, and held out by task."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from lightning_trainer.kits.export.candidates import LineCandidate
from lightning_trainer.kits.export.wanted import ExportSelection, UnexportedReason

# A prompt with which more than this share of the tasks begins, such as a router's or a planner's constant prompt, does
# not identify a task.
_COMMON: Final = 0.1


@dataclass(frozen=True, slots=True)
class ChosenLines:
    """Lines to write: training lines and held-out lines."""

    training: list[LineCandidate]
    held_out: list[LineCandidate]


def by_reward(
    candidates: Iterable[LineCandidate], wanted: ExportSelection, left_out: Counter[str]
) -> list[LineCandidate]:
    """Keep lines with enough reward, and the best attempts of each group and agent.

    For pairs, the minimum reward is that of the better answer: see `pairs`.
    """
    kept = list(candidates)
    if wanted.min_reward is not None and wanted.format != "dpo":
        least = wanted.min_reward
        kept = _keep(kept, left_out, lambda each: _too_low(each, least))
    if wanted.best is not None:
        kept = _keep(kept, left_out, lambda each: UnexportedReason.NO_REWARD if each.reward is None else None)
        best = _best(kept, wanted.best)
        kept = _keep(
            kept,
            left_out,
            lambda each: None if each.attempt in best[each.group, each.agent] else UnexportedReason.NOT_BEST,
        )
    return kept


def _too_low(candidate: LineCandidate, least: float) -> str | None:
    if candidate.reward is None:
        return UnexportedReason.NO_REWARD
    return UnexportedReason.LOW_REWARD if candidate.reward < least else None


def _best(candidates: Sequence[LineCandidate], count: int) -> Mapping[tuple[str, str | None], frozenset[str]]:
    earned: defaultdict[tuple[str, str | None], dict[str, float]] = defaultdict(dict)
    for each in candidates:
        earned[each.group, each.agent].setdefault(each.attempt, each.reward or 0.0)
    return {
        key: frozenset(sorted(attempts, key=lambda attempt: -attempts[attempt])[:count])  # of equal ones the first
        for key, attempts in earned.items()
    }


def once(candidates: Sequence[LineCandidate], left_out: Counter[str]) -> list[LineCandidate]:
    """Keep of equal lines the one with the highest reward, and of these the first."""
    best: dict[str, LineCandidate] = {}
    for each in candidates:
        known = best.get(each.content)
        if known is None or (each.reward or 0.0) > (known.reward or 0.0):
            best[each.content] = each
    return _keep(candidates, left_out, lambda each: None if best[each.content] is each else UnexportedReason.TWICE)


class PlayedTasks(Protocol):
    """The fields of an attempt that identify its task. `LineCandidate` and `StoredEpisode` have them."""

    @property
    def group(self) -> str:
        """Attempts that are compared."""

    @property
    def task(self) -> str | None:
        """Digest of the task; None if it is unknown."""

    @property
    def opening(self) -> str | None:
        """Digest of the request of its first call."""

    @property
    def validation(self) -> bool:
        """Whether it was run to validate."""


def split(
    candidates: Sequence[LineCandidate],
    wanted: ExportSelection,
    left_out: Counter[str],
    played: Sequence[PlayedTasks] | None = None,
) -> ChosenLines:
    """Hold out all lines of some tasks: no task and no prompt is in both parts.

    The choice depends on the tasks alone, so it stays the same when other tasks are added to the store, and with other
    options. A task of any validation is held out, whatever its result.

    Args:
        candidates: the lines.
        wanted: options, such as the share.
        left_out: counts the calls of lines that are in neither part.
        played: all attempts, including those without a line; None: those of the lines.
    """
    if not wanted.held_out:
        kept = candidates
        if not wanted.validation:
            kept = _keep(kept, left_out, lambda each: UnexportedReason.VALIDATION if each.validation else None)
        return ChosenLines(list(kept), [])
    played = candidates if played is None else played
    names = _tasks(played)
    validated = {names[each.group] for each in played if each.validation}
    out = [names[each.group] in validated or _draw(names[each.group]) < wanted.held_out for each in candidates]
    training = [each for each, is_out in zip(candidates, out, strict=True) if not is_out]
    asked = {each.prompt for each in training}
    held_out = [each for each, is_out in zip(candidates, out, strict=True) if is_out]
    held_out = _keep(
        held_out, left_out, lambda each: UnexportedReason.SEEN_IN_TRAINING if each.prompt in asked else None
    )
    return ChosenLines(training, held_out)


def _tasks(played: Sequence[PlayedTasks]) -> dict[str, str]:
    """Return the task name of each group: the same for the same task, the same group, and the same first prompt.

    A prompt with which a tenth of the tasks begins joins nothing, unless nothing else identifies the task.
    """
    begun: defaultdict[str, set[str]] = defaultdict(set)
    for each in played:
        if each.opening is not None and each.task is not None:
            begun[each.opening].add(each.task)
    tasks = {each.task for each in played if each.task is not None}
    common = {opening for opening, its in begun.items() if len(its) > max(2, _COMMON * len(tasks))}
    joined = _UnionFind()
    for each in played:
        keys = [f"group {each.group}"]
        keys += [] if each.task is None else [f"task {each.task}"]
        keys += [] if each.opening is None or each.opening in common else [f"opening {each.opening}"]
        for key in keys[1:]:
            joined.join(keys[0], key)
    return {each.group: joined.name(f"group {each.group}") for each in played}


class _UnionFind:
    """Sets of equivalent keys, each named by the smallest key that identifies the task."""

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
        # Tasks and openings are digests of requests; a group's name is from one run only, so it is the last choice.
        roots = sorted({self.name(one), self.name(other)}, key=lambda key: (key.startswith("group"), key))
        self._parent[roots[-1]] = roots[0]


def _draw(name: str) -> float:
    """Return a number from 0 to 1 that is computed from a name."""
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
