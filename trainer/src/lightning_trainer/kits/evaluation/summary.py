"""The summary of an evaluation: mean reward, pass@k, agents, and the difference from another evaluation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from lightning_trainer.choices import Timeouts
from lightning_trainer.intervals import METHOD, Declared, Estimate, estimate_difference, estimate_mean, reward_bounds
from lightning_trainer.kits.evaluation.passes import pass_all, pass_at
from lightning_trainer.kits.evaluation.samples import Sample, Usage
from lightning_trainer.report.answers import most_frequent
from lightning_trainer.rl.rollouts import Failed
from lightning_trainer.rl.scores import task_digest, trained_names

_MOST_EACH: Final = 64  # values of k that are printed one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Counting:
    """How samples count.

    Attributes:
        failed: the reward of a sample whose program failed because of a model's answer; ``exclude`` leaves it out, and
            ``lowest`` uses 0, or the lowest reward of any agent in all that is compared if that is less.
        success: minimum reward of a success.
        timeouts: whether samples that were too slow count as failed because of a model's answer, or are left out.
        agents: names and globs of the agents whose rewards count, if rewards were given by agent; None: all.
        declared: range of the rewards.
    """

    failed: Failed = "lowest"
    success: float = 1.0
    timeouts: Timeouts = "count"
    agents: tuple[str, ...] | None = None
    declared: Declared = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSummary:
    """Summary of one agent.

    Attributes:
        reward: mean over tasks of its reward: its own if the program gives rewards by agent, otherwise the attempt's,
            of the samples in which it made calls.
        usage: over all samples.
        by_task: mean of each task's samples, by the task's index.
        declared: range of the rewards.
    """

    reward: Estimate
    usage: Usage
    by_task: Mapping[int, float]
    declared: Declared = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary of an evaluation.

    Attributes:
        reward: mean over tasks of the mean of each task's samples.
        tasks: number of tasks of which at least one sample counts.
        samples: number of samples per task.
        counted: number of samples that count.
        crashed: number of samples whose program failed because of a model's answer.
        timed_out: number of samples that were too slow after a model had answered, whether they count or not.
        left_out: number of samples that failed for another reason, and do not count.
        left_out_by: their number by ending, see `rl.endings`.
        pass_at: probability that at least one of k samples succeeds, by k.
        pass_all: probability that k samples all succeed, by k.
        most_frequent: by agent, its most frequent short answer and the share of its answers that this is.
        by_agent: by the agent's name; calls without an agent are under "".
        sample_seconds: mean duration of a sample.
        failed_reward: the reward that a crash counts as; None if crashes are left out.
        by_task: mean of each task's samples, by the task's index.
        declared: range of the rewards.
    """

    reward: Estimate
    tasks: int
    samples: int
    counted: int
    crashed: int
    timed_out: int
    left_out: int
    left_out_by: Mapping[str, int]
    pass_at: Mapping[int, float]
    pass_all: Mapping[int, float]
    most_frequent: Mapping[str, tuple[str, float]]
    by_agent: Mapping[str, AgentSummary]
    sample_seconds: float
    failed_reward: float | None
    by_task: Mapping[int, float]
    declared: Declared = None

    @property
    def usage(self) -> Usage:
        """The usage of all agents together."""
        return sum((agent.usage for agent in self.by_agent.values()), Usage())

    def to_json(self) -> dict[str, Any]:
        """Return what `lightning-rl eval --json` prints about it."""
        return {
            **self.reward.to_json(),
            "interval": METHOD,
            "tasks": self.tasks,
            "samples": self.samples,
            "pass_at": self.pass_at.get(self.samples),
            "pass_all": self.pass_all.get(self.samples),
            "pass_at_each": {str(k): value for k, value in self.pass_at.items()},
            "pass_all_each": {str(k): value for k, value in self.pass_all.items()},
            "by_agent": {
                name: {**agent.reward.to_json(), **asdict(agent.usage)} for name, agent in self.by_agent.items()
            },
            "most_frequent": {name: list(found) for name, found in self.most_frequent.items()},
            **asdict(self.usage),
            "counted": self.counted,
            "failed": self.crashed + self.left_out,
            "crashed": self.crashed,
            "timed_out": self.timed_out,
            "left_out": self.left_out,
            "left_out_by": dict(self.left_out_by),
            "failed_reward": self.failed_reward,
            "sample_seconds": round(self.sample_seconds, 3),
        }


def summarise(samples: Sequence[Sample], counting: Counting) -> Summary:
    """Return the summary of an evaluation's samples."""
    crash = _crash_reward(samples, counting)
    chosen = trained_names({name for sample in samples for name in sample.rewards}, counting.agents)
    by_task: defaultdict[int, list[float]] = defaultdict(list)
    good: Counter[int] = Counter()
    for sample in samples:
        if (value := _counted_reward(sample, crash, chosen)) is not None:
            by_task[sample.task].append(value)
            good[sample.task] += sample.status != "crashed" and value >= counting.success
    drawn = max((sample.sample for sample in samples), default=-1) + 1
    crashed = sum(sample.status == "crashed" for sample in samples)
    each = {
        k: [(len(values), good[task]) for task, values in by_task.items() if len(values) >= k] for k in _places(drawn)
    }
    means = {task: sum(values) / len(values) for task, values in sorted(by_task.items())}
    return Summary(
        reward=_estimate(by_task, counting.declared),
        tasks=len(means),
        samples=drawn,
        counted=sum(map(len, by_task.values())),
        crashed=crashed,
        timed_out=sum(sample.is_late for sample in samples),
        left_out_by=dict(Counter(s.ending for s in samples if s.status == "failed" and s.ending is not None)),
        left_out=len(samples) - sum(map(len, by_task.values())) - (crashed if crash is None else 0),
        pass_at={k: _mean([pass_at(n, c, k) for n, c in its]) for k, its in each.items() if its},
        pass_all={k: _mean([pass_all(n, c, k) for n, c in its]) for k, its in each.items() if its},
        most_frequent=_most_frequent(samples),
        by_agent=_by_agent(samples, crash, counting.declared),
        sample_seconds=_mean([sample.seconds for sample in samples]) if samples else 0.0,
        failed_reward=crash,
        by_task=means,
        declared=counting.declared,
    )


def join_equal_tasks(samples: Sequence[Sample], tasks: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """Return the samples with equal tasks as one: that of the first of them, because their samples are alike."""
    first: dict[str, int] = {}
    places = [first.setdefault(task_digest(task), place) for place, task in enumerate(tasks)]
    return [replace(sample, task=places[sample.task]) for sample in samples]


def summarise_each(sides: Iterable[Sequence[Sample]], counting: Counting) -> list[Summary]:
    """Return the summaries of several evaluations to compare, with the same reward for crashes."""
    sides = list(sides)
    crash = _crash_reward([sample for side in sides for sample in side], counting)
    alike = replace(counting, failed="exclude" if crash is None else crash)
    return [summarise(side, alike) for side in sides]


def difference(
    this: Summary | AgentSummary, other: Summary | AgentSummary, *, comparisons: int = 1
) -> tuple[Estimate, int]:
    """Return how much more reward this evaluation has than another of the same tasks, and on how many tasks.

    Paired: the difference of the two means of each task. Its mean and interval are over the tasks that count in both.

    Args:
        this: the summary to compare.
        other: the baseline.
        comparisons: see `estimate_difference`.
    """
    both = [task for task in this.by_task if task in other.by_task]
    pairs = [this.by_task[task] for task in both], [other.by_task[task] for task in both]
    return estimate_difference(*pairs, this.declared, comparisons=comparisons), len(both)


def differences_by_agent(this: Summary, other: Summary) -> dict[str, tuple[Estimate, int]]:
    """Return the `difference` of each agent that has rewards in both."""
    found = {
        name: difference(agent, other.by_agent[name]) for name, agent in this.by_agent.items() if name in other.by_agent
    }
    return {name: (estimate, tasks) for name, (estimate, tasks) in found.items() if tasks}


def _counted_reward(sample: Sample, crash: float | None, chosen: frozenset[str] | None) -> float | None:
    """Return the reward with which a sample counts; None if it is left out.

    Args:
        sample: the sample.
        crash: reward of a crash; None leaves it out.
        chosen: agents whose rewards count, see `trained_names`.
    """
    if sample.status == "crashed":
        return crash
    if sample.reward is None or chosen is None:
        return sample.reward
    own = [value for name, value in sample.rewards.items() if name in chosen]
    if not own:
        return sample.shared if sample.rewards else sample.reward
    return _mean(own) + (sample.shared or 0.0)


def _crash_reward(samples: Sequence[Sample], counting: Counting) -> float | None:
    if counting.failed == "exclude":
        return None
    if counting.failed == "lowest":
        return min([0.0, *(sample.lowest for sample in samples if sample.lowest is not None)])
    return float(counting.failed)


def reward_floor(samples: Sequence[Sample], counting: Counting) -> float:
    """Return the lowest reward with which a successful sample counts, or 0 if that is less."""
    chosen = trained_names({name for sample in samples for name in sample.rewards}, counting.agents)
    values = [_counted_reward(sample, None, chosen) for sample in samples]
    return min([0.0, *(value for value in values if value is not None)])


def _places(drawn: int) -> list[int]:
    """Return the values of k to report: all, or powers of two and the last if there are many."""
    if drawn <= _MOST_EACH:
        return list(range(1, drawn + 1))
    return sorted({*(2**power for power in range(drawn.bit_length())), drawn})


def _by_agent(samples: Sequence[Sample], crash: float | None, declared: Declared) -> dict[str, AgentSummary]:
    own = {name for sample in samples for name in sample.rewards}
    names = {*own, *(name for sample in samples for name in sample.usage)}
    earned: defaultdict[str, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    usage: defaultdict[str, Usage] = defaultdict(Usage)
    for sample in samples:
        for name, its in sample.usage.items():
            usage[name] += its
        for name in own or names:  # if some agents have their own rewards, those of the others are unknown
            if name and (value := _agent_reward(sample, name, bool(own), crash)) is not None:
                earned[name][sample.task].append(value)
    return {
        name: AgentSummary(
            reward=_estimate(earned[name], declared),
            declared=declared,
            usage=usage[name],
            by_task={task: _mean(values) for task, values in sorted(earned[name].items())},
        )
        for name in sorted(names)
    }


def _most_frequent(samples: Sequence[Sample]) -> dict[str, tuple[str, float]]:
    texts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    answers: Counter[str] = Counter()
    for sample in samples:
        for name, counts in sample.answers.items():
            texts[name].update(counts)
        for name, usage in sample.usage.items():
            answers[name] += usage.answers
    return most_frequent(texts, answers)


def _estimate(by_task: Mapping[int, Sequence[float]], declared: Declared) -> Estimate:
    bounds = reward_bounds((value for values in by_task.values() for value in values), declared)
    return estimate_mean([_mean(values) for _, values in sorted(by_task.items())], bounds)


def _agent_reward(sample: Sample, name: str, own: bool, crash: float | None) -> float | None:
    """Return an agent's reward in a sample; None if it has none, or the sample does not count."""
    spoke = name in sample.usage
    if sample.status == "crashed":
        return crash if spoke else None
    if own:
        return sample.rewards.get(name)
    return sample.reward if spoke else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
