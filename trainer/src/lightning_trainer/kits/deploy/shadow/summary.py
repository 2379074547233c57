"""The summary of a shadow: the results of a candidate's copies, read from their records."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import SHADOW
from lightning_spans.store import Store
from lightning_spans.store.deployments import Deployment
from lightning_spans.store.protocol import Where, each
from lightning_trainer.intervals import estimate_difference, estimate_mean
from lightning_trainer.kits.deploy.routing import MARK
from lightning_trainer.kits.deploy.transitions import is_tried, named_in

_BOTH: Final = ("candidate", "stable")
_EQUAL: Final = {"candidate": 0.5, "stable": 0.5}  # equal answers, which are not sent to a judge


def describe_shadow(store: Store, history: Sequence[Deployment]) -> dict[str, Any] | None:
    """Return the results of the current candidate's copies as JSON; None if it has not been in a shadow."""
    named = named_in(history)
    if named is None or not is_tried(history[-1]):
        return None
    shadows = [one for one in history if one.stage == "shadow" and one.number > named.number]
    if not shadows:
        return None
    numbers = {one.number for one in shadows}
    calls = [call for call in each(store, Call, Where(origin=SHADOW)) if _belongs(call, named.agent, numbers)]
    return summarize(calls, shadows)


def _belongs(call: Call, agent: str, numbers: set[int]) -> bool:
    mark = call.sampling.get(SHADOW)
    return isinstance(mark, Mapping) and mark["agent"] == agent and call.sampling.get(MARK) in numbers


def summarize(calls: Sequence[Call], shadows: Sequence[Deployment]) -> dict[str, Any]:
    """Summarise copies. Every conversation has the same weight, because its calls are not independent.

    Args:
        calls: the copies.
        shadows: the candidate's shadows, oldest first, not empty: the newest has other rules or another judge if they
            were changed.
    """
    marks = [call.sampling[SHADOW] for call in calls]
    details = {one.number: one.details[SHADOW] for one in shadows}
    compared = [(call.sampling[SHADOW], details[call.sampling[MARK]]) for call in calls]
    answered = [mark for mark, call in zip(marks, calls, strict=True) if call.error is None]
    by_kind = {kind: [mark for mark in marks if mark["kind"] == kind] for kind in ("text", "tool call")}
    return {
        "share": shadows[-1].share,
        "copies": len(calls),
        "conversations": len({mark["conversation"] for mark in marks}),
        "dropped": sum(mark["dropped"] for mark in marks),
        "off_path": sum(mark["off path"] for mark in marks),
        "failed": len(calls) - len(answered),
        "agreement": {
            "all": _mean(marks, _agrees),
            "text": _mean(by_kind["text"], _agrees),
            "tool_call": _mean(by_kind["tool call"], _agrees),
        },
        "judge": _judge_preference([mark for mark, its in compared if its["judge"] is not None]),
        "rules": _rules([(mark, its["rules"]) for mark, its in compared]),
        "tokens": {name: _tokens(answered, name) for name in _BOTH},
        "seconds": {name: _seconds(answered, name) for name in _BOTH},
    }


def _by_conversation(marks: Iterable[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]) -> list[float]:
    values: defaultdict[str, list[float]] = defaultdict(list)
    for mark in marks:
        values[mark["conversation"]].append(value(mark))
    return [statistics.fmean(each) for each in values.values()]


def _mean(marks: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float]) -> dict[str, Any]:
    return {**estimate_mean(_by_conversation(marks, value)).to_json(), "n": len(marks)}


def _agrees(mark: Mapping[str, Any]) -> float:
    return float(mark["agrees"])


def _judge_preference(marks: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return by how much the judge prefers the candidate in copies of shadows with a judge; None if none was called."""
    asked = [mark for mark in marks if "judge" in mark]
    if not asked:
        return None
    failed = [mark["judge"]["error"] for mark in asked if "error" in mark["judge"]]
    scored = [mark for mark in marks if mark["agrees"] or ("judge" in mark and "error" not in mark["judge"])]
    candidate, stable = (
        _by_conversation(scored, lambda mark, name=name: mark.get("judge", _EQUAL)[name])  # type: ignore[misc]
        for name in _BOTH
    )
    found = estimate_difference(candidate, stable, (0.0, 1.0))
    return {
        "difference": found.mean,
        "low": found.low,
        "high": found.high,
        "n": len(scored),
        "failed": len(failed),
        "error": failed[-1] if failed else None,
    }


def _rules(marks: Sequence[tuple[Mapping[str, Any], Sequence[str]]]) -> dict[str, dict[str, float]]:
    """Return each policy's share of answers that break a rule, by rule, among those that were measured under it.

    Args:
        marks: with the rules of their shadow.
    """
    measured = Counter(rule for _, rules in marks for rule in rules)
    broken = {name: Counter(rule for mark, _ in marks for rule in mark[name]["rules"]) for name in _BOTH}
    names = sorted(broken["candidate"] | broken["stable"])
    return {rule: {name: broken[name][rule] / measured[rule] for name in _BOTH} for rule in names}


def _tokens(marks: Sequence[Mapping[str, Any]], name: str) -> dict[str, float | None]:
    """Return the mean number of tokens per call, over the calls with a known number."""
    found = {}
    for kind in ("prompt_tokens", "completion_tokens"):
        counts = [mark[name][kind] for mark in marks if mark[name][kind] is not None]
        found[kind] = statistics.fmean(counts) if counts else None
    return found


def _seconds(marks: Sequence[Mapping[str, Any]], name: str) -> dict[str, float | None]:
    seconds = [mark[name]["seconds"] for mark in marks]
    if not seconds:
        return {"mean": None, "p95": None}
    return {"mean": statistics.fmean(seconds), "p95": float(np.quantile(seconds, 0.95))}
