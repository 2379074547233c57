"""Which of the lines that may be written are: by reward, by group, once each, and held out by task."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_trainer.export import wanted as reasons
from lightning_trainer.export.candidates import Candidate
from lightning_trainer.export.wanted import Wanted

# What more of the tasks than this begin with says nothing of the task: a router's or a planner's constant prompt.
_COMMON: Final = 0.1


@dataclass(frozen=True, slots=True)
class Chosen:
    """Lines to write: to learn from, and held out."""

    training: list[Candidate]
    held_out: list[Candidate]


def by_reward(candidates: Iterable[Candidate], wanted: Wanted, left_out: Counter[str]) -> list[Candidate]:
    """Keep what earned enough, and of each group and agent the best attempts.

    For pairs the least reward is that of the better answer: see `pairs`.
    """
    kept = list(candidates)
    if wanted.min_reward is not None and wanted.format != "dpo":
        least = wanted.min_reward
        kept = _keep(kept, left_out, lambda each: _too_low(each, least))
    if wanted.best is not None:
        kept = _keep(kept, left_out, lambda each: reasons.NO_REWARD if each.reward is None else None)
        best = _best(kept, wanted.best)
        kept = _keep(
            kept, left_out, lambda each: None if each.attempt in best[each.group, each.agent] else reasons.NOT_BEST
        )
    return kept


def _too_low(candidate: Candidate, least: float) -> str | None:
    if candidate.reward is None:
        return reasons.NO_REWARD
    return reasons.LOW_REWARD if candidate.reward < least else None


def _best(candidates: Sequence[Candidate], count: int) -> Mapping[tuple[str, str | None], frozenset[str]]:
    earned: defaultdict[tuple[str, str | None], dict[str, float]] = defaultdict(dict)
    for each in candidates:
        earned[each.group, each.agent].setdefault(each.attempt, each.reward or 0.0)
    return {
        key: frozenset(sorted(attempts, key=lambda attempt: -attempts[attempt])[:count])  # of equals the first
        for key, attempts in earned.items()
    }


def once(candidates: Sequence[Candidate], left_out: Counter[str]) -> list[Candidate]:
    """Keep of equal lines the one that earned most, of these the first."""
    best: dict[str, Candidate] = {}
    for each in candidates:
        known = best.get(each.content)
        if known is None or (each.reward or 0.0) > (known.reward or 0.0):
            best[each.content] = each
    return _keep(candidates, left_out, lambda each: None if best[each.content] is each else reasons.TWICE)


def split(candidates: Sequence[Candidate], wanted: Wanted, left_out: Counter[str]) -> Chosen:
    """Hold out the lines of some tasks, whole: no task is in both parts, and no prompt.

    Which ones follows from the tasks alone, and so stays the same while others come to the store. A task that any
    validation ran is held out.
    """
    if not wanted.held_out:
        kept = candidates
        if not wanted.validation:
            kept = _keep(kept, left_out, lambda each: reasons.VALIDATION if each.validation else None)
        return Chosen(list(kept), [])
    names = _tasks(candidates)
    validated = {name for each, name in zip(candidates, names, strict=True) if each.validation}
    out = [name in validated or _draw(name) < wanted.held_out for name in names]
    training = [each for each, is_out in zip(candidates, out, strict=True) if not is_out]
    asked = {each.prompt for each in training}
    held_out = [each for each, is_out in zip(candidates, out, strict=True) if is_out]
    held_out = _keep(held_out, left_out, lambda each: reasons.SEEN_IN_TRAINING if each.prompt in asked else None)
    return Chosen(training, held_out)


def _tasks(candidates: Sequence[Candidate]) -> list[str]:
    """Name the task of each: the same name for the same task, the same group, and what begins with the same prompt.

    A prompt with which a tenth of the tasks begins joins nothing, except where nothing else says which task it is.
    """
    begun: defaultdict[str, set[str]] = defaultdict(set)
    for each in candidates:
        if each.opening is not None and each.task is not None:
            begun[each.opening].add(each.task)
    tasks = {each.task for each in candidates if each.task is not None}
    common = {opening for opening, its in begun.items() if len(its) > max(2, _COMMON * len(tasks))}
    joined = _Joined()
    for each in candidates:
        keys = [f"group {each.group}"]
        keys += [] if each.task is None else [f"task {each.task}"]
        keys += [] if each.opening is None or each.opening in common else [f"opening {each.opening}"]
        for key in keys[1:]:
            joined.join(keys[0], key)
    return [joined.name(f"group {each.group}") for each in candidates]


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
    candidates: Sequence[Candidate], left_out: Counter[str], why_not: Callable[[Candidate], str | None]
) -> list[Candidate]:
    kept = []
    for each in candidates:
        reason = why_not(each)
        if reason is None:
            kept.append(each)
        else:
            left_out[reason] += each.calls
    return kept
