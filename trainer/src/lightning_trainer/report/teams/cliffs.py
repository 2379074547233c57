"""Cliffs: policies whose held-out reward has fallen from its best, and the share of agents' prompts that are new."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from lightning_trainer.intervals import Estimate, estimate_difference
from lightning_trainer.report.answers import answers_in
from lightning_trainer.report.log.lines import PROMPTS
from lightning_trainer.rl.scores import BY_TASK

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace

LEAST_FALL: Final = 0.1  # smallest fall, as a share of the best held-out reward
_MOST: Final = 256  # digests kept per agent: the lowest ones, so that two validations keep the same

Lines: TypeAlias = Sequence[Mapping[str, Any]]
Tasks: TypeAlias = Mapping[str, float]  # reward by digest of the task


@dataclass(frozen=True, slots=True)
class Fall:
    """A policy whose held-out reward is below its best.

    Attributes:
        policy: its name.
        best_step: steps taken when the reward was highest.
        best: that reward.
        now: the newest reward.
        difference: between the two, paired by task.
    """

    policy: str
    best_step: int
    best: float
    now: float
    difference: Estimate


def rewarded_names(validations: Lines, policy_of: Mapping[str, str]) -> dict[str, list[str]]:
    """Return for each policy its agents that have their own rewards; [""], the team, if none has.

    Args:
        validations: lines of the log.
        policy_of: the policy of each agent.
    """
    known = validations[-1].get(BY_TASK, {}) if validations else {}
    found: dict[str, list[str]] = {policy: [] for policy in policy_of.values()}
    for agent, policy in policy_of.items():
        found[policy] += [agent] if known.get(agent) else []
    return {policy: names or [""] for policy, names in found.items()}


def best_step_of(validations: Lines, names: Sequence[str]) -> int | None:
    """Return after how many steps the mean held-out reward of these names first reached its highest value."""
    return max(mean_rewards(validations, names), key=lambda point: point[1], default=(None, 0.0))[0]


def mean_rewards(validations: Lines, names: Sequence[str]) -> list[tuple[int, float]]:
    """Return the steps and the mean held-out reward of these names for each validation."""
    return [(step, _mean(tasks)) for step, tasks in _points(validations, names)]


def fall_of(validations: Lines, policy: str, names: Sequence[str]) -> Fall | None:
    """Return how a policy has fallen in the newest validation; None if it has not.

    The interval of the paired difference must be below 0, and the fall must be at least a tenth of the best reward. The
    best of many validations is partly luck, so the interval of the difference from the second best must also be below
    0. With n earlier validations, any of which could have been the best, each interval has the level 1 - 0.05 / n
    (Bonferroni). `bench/run.py alarms` measures how often a healthy run counts as fallen.

    Args:
        validations: lines of the log, on the same tasks.
        policy: its name.
        names: whose rewards are its own; see `rewarded_names`.
    """
    points = _points(validations, names)
    if len(points) < 2:
        return None
    *earlier, (_, now) = points
    ranked = sorted(earlier, key=lambda point: -_mean(point[1]))
    (step, best), changes = ranked[0], [_difference(now, its, comparisons=len(earlier)) for _, its in ranked[:2]]
    if any(each.high is None or each.high >= 0 for each in changes):
        return None
    if (changes[0].mean or 0.0) > -LEAST_FALL * abs(_mean(best)):
        return None
    return Fall(policy, step, _mean(best), _mean(now), changes[0])


def from_best(validations: Lines) -> dict[str, float]:
    """Return how far the newest held-out reward is from the best earlier one, paired by task, with its interval.

    Returns:
        ``from_best``, ``from_best_low`` and ``from_best_high``, and the same for each agent that has its own rewards.
    """
    found: dict[str, float] = {}
    for name in validations[-1].get(BY_TASK, {}):
        *earlier, (_, now) = _points(validations, [name]) or [(0, {})]
        if not earlier:
            continue
        _, best = max(earlier, key=lambda point: _mean(point[1]))
        change, suffix = _difference(now, best), f"/{name}" if name else ""
        values = {"": change.mean, "_low": change.low, "_high": change.high}
        found |= {f"from_best{end}{suffix}": value for end, value in values.items() if value is not None}
    return found


def _points(validations: Lines, names: Sequence[str]) -> list[tuple[int, Tasks]]:
    """Return the steps and the mean reward of these names by task for each validation."""
    found: list[tuple[int, Tasks]] = []
    for line in validations:
        given: defaultdict[str, list[float]] = defaultdict(list)
        for name in names:
            for task, value in line.get(BY_TASK, {}).get(name, {}).items():
                given[task].append(value)
        if given:
            found.append((int(line["step"]), {task: sum(its) / len(its) for task, its in given.items()}))
    return found


def _difference(now: Tasks, other: Tasks, *, comparisons: int = 1) -> Estimate:
    both = [task for task in now if task in other]
    return estimate_difference([now[task] for task in both], [other[task] for task in both], comparisons=comparisons)


def _mean(tasks: Tasks) -> float:
    return sum(tasks.values()) / len(tasks) if tasks else 0.0


def digest_prompts(traces: Iterable[Trace], agents: Sequence[str] | None) -> dict[str, list[str]]:
    """Return digests of each agent's different prompts, the lowest 256 of them."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for trace in traces:
        for agent, answers in answers_in(trace, agents).items():
            found[agent] |= {answer.prompt for answer in answers}
    return {agent: sorted(digests)[:_MOST] for agent, digests in sorted(found.items()) if agent}


def new_prompts(prompts: Mapping[str, Sequence[str]], validations: Lines) -> dict[str, float]:
    """Return ``new_prompts/AGENT``: the share of its held-out prompts that were not in the previous validation.

    Args:
        prompts: of the newest validation; see `digest_prompts`.
        validations: the earlier ones, on the same tasks.
    """
    before = validations[-1].get(PROMPTS, {}) if validations else {}
    found = {}
    for agent, now in prompts.items():
        if not (known := before.get(agent)):
            continue
        highest = known[-1] if len(known) == _MOST else "g"  # above every digest, because all of them were kept
        compared = [digest for digest in now if digest <= highest]
        found[f"new_prompts/{agent}"] = len(set(compared) - set(known)) / len(compared) if compared else 1.0
    return found
