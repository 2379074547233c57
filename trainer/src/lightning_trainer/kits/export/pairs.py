"""Preference pairs: two answers to one prompt in one group, one with a higher reward."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from lightning_trainer.kits.export.candidates import LineCandidate
from lightning_trainer.kits.export.files import Line, LineSpool
from lightning_trainer.kits.export.wanted import ExportSelection, UnexportedReason

Pair = tuple[LineCandidate, LineCandidate]  # the better, the worse
_FROM = (
    "reward", "rollout_id", "attempt_id", "span_ids", "call_ids", "trace_id", "reward_ids", "policy", "policy_version",
)  # fmt: skip


def pairs(candidates: Sequence[LineCandidate], wanted: ExportSelection, left_out: Counter[str]) -> list[Pair]:
    """Make pairs of an agent's calls with equal requests in one group. Calls in no pair are counted.

    Only these can be compared: if two attempts sent different requests, it is unknown which answer made the difference.
    A pair that exists already, from another group, is left out.
    """
    asked: defaultdict[tuple[str, str | None, str], list[LineCandidate]] = defaultdict(list)
    for each in candidates:
        if each.reward is None:
            left_out[UnexportedReason.NO_REWARD] += each.calls
        else:
            asked[each.group, each.agent, each.prompt].append(each)
    found: dict[tuple[str, str], Pair] = {}
    for own in asked.values():
        made, reason = _pairs(own, wanted)
        used = {each.place for pair in made for each in pair}
        if unused := sum(each.place not in used for each in own):
            left_out[reason] += unused
        for pair in made:
            if found.setdefault((pair[0].content, pair[1].content), pair) is not pair:
                left_out[UnexportedReason.TWICE] += 1
    return list(found.values())


def _pairs(own: list[LineCandidate], wanted: ExportSelection) -> tuple[list[Pair], str]:
    """Return the pairs of answers to one prompt, and the reason why the others are in no pair."""
    if len(own) == 1:
        return [], UnexportedReason.ALONE
    ranked = sorted(own, key=lambda each: -(each.reward or 0.0))
    best, worst = ranked[0].reward or 0.0, ranked[-1].reward or 0.0
    if best == worst or not _far_enough(best, worst, wanted):
        return [], UnexportedReason.TIED if best == worst else UnexportedReason.CLOSE
    if wanted.min_reward is not None and best < wanted.min_reward:
        return [], UnexportedReason.LOW_REWARD
    possible = [(a, b) for a in ranked for b in reversed(ranked) if _is_pair(a, b, wanted)]
    if not possible:
        return [], UnexportedReason.SAME_ANSWER
    if wanted.all_pairs:
        return possible, UnexportedReason.CLOSE if wanted.margin else UnexportedReason.TIED
    return possible[:1], UnexportedReason.NOT_PAIRED


def _far_enough(high: float, low: float, wanted: ExportSelection) -> bool:
    """Whether two rewards differ by the margin, although 0.3 - 0.1 is a little less than 0.2 in binary."""
    return high - low >= wanted.margin or math.isclose(high - low, wanted.margin, rel_tol=1e-9)


def _is_pair(better: LineCandidate, worse: LineCandidate, wanted: ExportSelection) -> bool:
    high, low = better.reward or 0.0, worse.reward or 0.0
    enough = wanted.min_reward is None or high >= wanted.min_reward
    return enough and high > low and _far_enough(high, low, wanted) and better.content != worse.content


def lines_of(found: Sequence[Pair], spool: LineSpool) -> Iterator[Line]:
    """Return pairs as lines: prompt, chosen and rejected as messages, and their tokens if both were recorded."""
    for better, worse in found:
        chosen, rejected = spool.get(better.place), spool.get(worse.place)
        line = {
            "prompt": chosen["prompt"],
            "chosen": chosen["answer"],
            "rejected": rejected["answer"],
            "tools": chosen["tools"],
            "agent": chosen["agent"],
            "rewards": [chosen["reward"], rejected["reward"]],
            "group_id": chosen["group_id"],
            "task_id": chosen["task_id"],
            "origin": chosen["origin"],
            **({"tenant": chosen["tenant"]} if "tenant" in chosen else {}),
            "chosen_from": {name: chosen[name] for name in _FROM},
            "rejected_from": {name: rejected[name] for name in _FROM},
        }
        if chosen.get("prompt_ids") and chosen["prompt_ids"] == rejected.get("prompt_ids"):
            ids = {"chosen_ids": chosen["answer_ids"], "rejected_ids": rejected["answer_ids"]}
            line |= {"prompt_ids": chosen["prompt_ids"], **ids}
        yield line
