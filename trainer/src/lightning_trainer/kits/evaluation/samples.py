"""Samples: the result of one execution on one task, saved as one line per sample next to the store."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from lightning_spans.schema.agents import earns, label
from lightning_spans.store.traces import traces_of
from lightning_trainer.report.answers import SHORT, answers_in
from lightning_trainer.rl.endings import Ending
from lightning_trainer.rl.rollouts import Failed, Outcome
from lightning_trainer.rl.scores import lowest_of, total
from lightning_trainer.rl.usage import tokens_of

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace
    from lightning_spans.schema.attempts import AttemptRecord
    from lightning_spans.schema.rewards import Reward
    from lightning_spans.store import Store

Status: TypeAlias = Literal["succeeded", "crashed", "failed"]
_AT_ONCE: Final = 64  # traces in memory
_NS: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """An agent's activity in one sample.

    Attributes:
        calls: model calls, including failed ones.
        failed_calls: model calls that failed.
        elsewhere: model calls answered by another model than the measured one.
        prompt_tokens: as the engine or the model server counted them.
        response_tokens: likewise.
        tool_calls: tools that ran.
        tool_errors: tools that failed.
    """

    calls: int = 0
    failed_calls: int = 0
    elsewhere: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    tool_calls: int = 0
    tool_errors: int = 0

    @property
    def answers(self) -> int:
        """Calls that were answered."""
        return self.calls - self.failed_calls

    def __add__(self, other: Usage) -> Usage:
        """Return the sum of both."""
        mine, its = asdict(self), asdict(other)
        return Usage(**{name: mine[name] + its[name] for name in mine})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One execution on one task.

    Attributes:
        task: index of the task in the data, from 0.
        sample: index among the samples of the task, from 0.
        rollout_id: in the store.
        attempt_id: the attempt that counts; None if none began.
        status: ``succeeded``; ``crashed``: failed because of a model's answer; ``failed``: anything else, such as a
            model server that does not answer.
        ending: how the attempt that counts ended, see `rl.endings`; None if unknown.
        reward: of the whole attempt; None unless it succeeded.
        shared: rewards of the attempt that name no agent; None if there are none.
        rewards: by agent, named as in `usage`, if rewards were given by agent; those that match no agent keep the given
            name.
        usage: by agent; the key "" is for calls and tools without an agent.
        answers: by agent, how often it gave each short answer; see `report.answers`.
        seconds: of the attempt.
        error: why it failed; None if it succeeded at once.
    """

    task: int
    sample: int
    rollout_id: str
    attempt_id: str | None
    status: Status
    ending: str | None = None
    reward: float | None = None
    shared: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    usage: Mapping[str, Usage] = field(default_factory=dict)
    answers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None

    @property
    def is_late(self) -> bool:
        """Whether the sample was too slow."""
        return self.ending is not None and Ending.from_slug(self.ending).is_late

    @property
    def lowest(self) -> float | None:
        """The lowest reward of any agent, or the attempt's, see `rl.scores.lowest`; None unless it succeeded."""
        if self.reward is None:
            return None
        return min(self.reward, lowest_of(self.shared or 0.0, self.rewards.values()))

    def to_json(self) -> dict[str, Any]:
        """Return the sample as a line of the file."""
        return asdict(self)

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Sample:
        """Read a line of the file."""
        usage = {name: Usage(**counts) for name, counts in line["usage"].items()}
        shared = None
        if "shared" not in line and line["reward"] is not None:  # from an earlier version
            own = list(line["rewards"].values())
            shared = line["reward"] - sum(own) / len(own) if own else line["reward"]
        return cls(**{"shared": shared, **line, "usage": usage})


def read_samples(
    store: Store,
    places: Mapping[str, tuple[int, int]],
    outcomes: Sequence[Outcome],
    agents: Sequence[str] | None = None,
    *,
    failed: Failed,
) -> list[Sample]:
    """Return one sample per rollout.

    Args:
        store: has their traces.
        places: task and sample of each rollout, by its id.
        outcomes: of the rollouts.
        agents: selected names and globs: agents selected by their path are named by it.
        failed: how crashes count; with ``exclude``, a success counts after a crash, see `Outcome.counts`.
    """
    if failed == "exclude":
        outcomes = [outcome if outcome.attempt is None else replace(outcome, crash=None) for outcome in outcomes]
    heard = dict(_agent_facts(store, [a.attempt_id for a in map(_counted_attempt, outcomes) if a is not None], agents))
    return [_sample(outcome, places[outcome.rollout.rollout_id], heard) for outcome in outcomes]


def _counted_attempt(outcome: Outcome) -> AttemptRecord | None:
    """Return the attempt that counts: the first crash, otherwise the success, otherwise the last."""
    return outcome.crash or outcome.attempt or (outcome.attempts[-1] if outcome.attempts else None)


@dataclass(frozen=True, slots=True)
class _AgentFacts:
    """The agents of an attempt: the usage and short answers of each, and the name of each path."""

    usage: Mapping[str, Usage] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    answers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def _sample(outcome: Outcome, place: tuple[int, int], by_attempt: Mapping[str, _AgentFacts]) -> Sample:
    attempt = _counted_attempt(outcome)
    heard = _AgentFacts() if attempt is None else by_attempt.get(attempt.attempt_id, _AgentFacts())
    good = outcome.attempt is not None and outcome.crash is None and outcome.unjudged is None
    status: Status = "crashed" if outcome.crash is not None else "succeeded" if good else "failed"
    ended_ns = None if attempt is None else attempt.ended_ns
    return Sample(
        task=place[0],
        sample=place[1],
        rollout_id=outcome.rollout.rollout_id,
        attempt_id=None if attempt is None else attempt.attempt_id,
        status=status,
        ending=None if outcome.ending is None else outcome.ending.slug,
        reward=total(outcome.rewards) if good else None,
        shared=_shared_reward(outcome.rewards) if good else None,
        rewards=_by_label(outcome.rewards, heard.labels) if good else {},
        usage=heard.usage,
        answers=heard.answers,
        seconds=round((ended_ns - attempt.started_ns) / _NS, 3) if attempt and ended_ns else 0.0,
        error=outcome.error,
    )


def _shared_reward(rewards: Sequence[Reward]) -> float | None:
    values = [reward.value for reward in rewards if reward.agent is None]
    return sum(values) if values else None


def _by_label(rewards: Sequence[Reward], labels: Mapping[str, str]) -> dict[str, float]:
    """Sum the rewards of each agent by its name; those that match no agent keep the given name."""
    totals: defaultdict[str, float] = defaultdict(float)
    for reward in rewards:
        if reward.agent is not None:
            reached = {name for path, name in labels.items() if earns(reward.agent, path)}
            for name in reached or {reward.agent}:
                totals[name] += reward.value
    return dict(totals)


def _agent_facts(
    store: Store, attempt_ids: Sequence[str], agents: Sequence[str] | None
) -> Iterator[tuple[str, _AgentFacts]]:
    for first in range(0, len(attempt_ids), _AT_ONCE):
        for trace in traces_of(store, attempt_ids=attempt_ids[first : first + _AT_ONCE]):
            if trace.attempt_id is not None:
                paths = {node.path for node in (*trace.chats, *trace.tools) if node.path}
                labels = {path: label(path, agents) for path in paths}
                yield trace.attempt_id, _AgentFacts(usage_of(trace, agents), labels, _short_answers(trace, agents))


def _short_answers(trace: Trace, agents: Sequence[str] | None) -> dict[str, dict[str, int]]:
    # Plain dictionaries: Python 3.11's `asdict` makes a Counter of a Counter's items.
    found = answers_in(trace, agents).items()
    return {agent: dict(Counter(each.text for each in its if len(each.text) <= SHORT)) for agent, its in found}


def usage_of(trace: Trace, agents: Sequence[str] | None = None) -> dict[str, Usage]:
    """Return the usage of each agent in an attempt; those selected by their path are named by it."""
    found: defaultdict[str, Usage] = defaultdict(Usage)
    for node in trace.chats:
        prompt, response = tokens_of(node)
        found[label(node.path or "", agents)] += Usage(
            calls=1,
            failed_calls=int(node.error is not None),
            elsewhere=int(node.call is None),
            prompt_tokens=prompt,
            response_tokens=response,
        )
    for node in trace.tools:
        found[label(node.path or "", agents)] += Usage(tool_calls=1, tool_errors=int(node.span.status == "error"))
    return dict(found)
