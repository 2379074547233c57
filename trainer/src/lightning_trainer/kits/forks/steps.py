"""The forks of a step: which calls of its rollouts are sampled again, and the results."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from lightning_spans.errors import AgentFailedError, ConfigError
from lightning_spans.schema.agents import selects
from lightning_spans.schema.replays import Replay
from lightning_trainer.gateway.replay.sessions import why_ended
from lightning_trainer.kits.forks.planning import RecordedAttempt, plan, recorded
from lightning_trainer.policies import BASE
from lightning_trainer.rl.batch.attempts import transitions_by_attempt
from lightning_trainer.rl.credit.shapley import coalitions, orders, shares, task_means
from lightning_trainer.rl.fork_points import Candidate, candidates, choose
from lightning_trainer.rl.rows import why_untrainable
from lightning_trainer.rl.usage import is_replayed, tokens_of

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Node, Trace
    from lightning_spans.schema.attempts import Rollout
    from lightning_spans.schema.transitions import Transition
    from lightning_spans.store import Store
    from lightning_trainer.callbacks import StepRollouts
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.batch.attempts import Traces
    from lightning_trainer.rl.credit.played import PlayedAttempt
    from lightning_trainer.rl.rollouts import Outcome

# in the state that a run keeps: by agent, the deviation of the rewards of alternatives to its calls
SPREAD: Final = "spread"


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """Forks to run.

    Attributes:
        rollouts: of all forks.
        records: the attempt of each call that is sampled again, or of each rollout whose coalitions are run.
        by_coalitions: whether these are coalitions.
        refused: calls or attempts that cannot be forked, by reason.
    """

    rollouts: tuple[Rollout, ...] = ()
    records: tuple[str, ...] = ()
    by_coalitions: bool = False
    refused: Mapping[str, int] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        """What is run, for the progress display."""
        count = len(self.records)
        return f"coalitions of {count} rollouts" if self.by_coalitions else f"alternatives of {count} calls"


def plan_forks(config: TrainConfig, store: Store, rollouts: StepRollouts) -> ForkPlan:
    """Plan the forks of a step within its budget; the same for the same seed and rollouts.

    Args:
        config: of the run.
        store: contains the rollouts.
        rollouts: of the step.
    """
    if config.by_coalitions:
        return _coalitions(config, store, rollouts)
    return _alternatives(config, store, rollouts)


def _alternatives(config: TrainConfig, store: Store, rollouts: StepRollouts) -> ForkPlan:
    groups = _groups(rollouts.outcomes)
    by_attempt = {
        trace.attempt_id: transitions
        for trace in rollouts.traces(list(groups))
        for transitions, _ in transitions_by_attempt([trace]).values()
    }
    found = candidates([by_attempt.get(name, []) for name in groups], lambda call: not _learns(config, call))
    numbers = random.Random(f"{config.seed}/{rollouts.step}/forks")
    made: list[Rollout] = []
    records: list[str] = []
    refused: Counter[str] = Counter()
    read: dict[str, RecordedAttempt] = {}
    # A call that cannot be forked is replaced by the next, unless the weights are for a fixed number of calls.
    count = config.fork_count // config.alternatives if config.fork_at == "entropy" else len(found)
    for point in choose(found, count, config.fork_at, numbers, spread=rollouts.kept.get(SPREAD)):
        left = config.fork_count - len(made)
        if left < config.alternatives:
            break
        try:
            if point.record not in read:
                read[point.record] = recorded(store, attempt_id=point.record)
            made += plan(
                read[point.record],
                name=rollouts.name,
                replay=replay_of(config, point),
                times=config.alternatives,
                group_id=groups[point.record],
                timeout_s=config.timeout_s,
            )
            records.append(point.record)
        except ConfigError as error:
            refused[str(error)] += 1
    return ForkPlan(tuple(made), tuple(records), refused=dict(refused))


def replay_of(config: TrainConfig, point: Candidate) -> Replay:
    """Return the replay that samples a call again in a run."""
    return _with_tools(config, Replay(attempt_id=point.record, call=point.call, weight=point.weight))


def _with_tools(config: TrainConfig, asked: Replay) -> Replay:
    tools = config.fork_tools
    return replace(
        asked,
        tools=tools.get("*", "replay"),
        run_tools=tuple(name for name, what in tools.items() if what == "run" and name != "*"),
        refuse_tools=tuple(name for name, what in tools.items() if what == "refuse" and name != "*"),
    )


def _coalitions(config: TrainConfig, store: Store, rollouts: StepRollouts) -> ForkPlan:
    """Plan the coalitions of as many rollouts as the budget allows."""
    numbers = random.Random(f"{config.seed}/{rollouts.step}/coalitions")
    groups = _groups(rollouts.outcomes)
    found = transitions_by_attempt(rollouts.traces(list(groups)), config.agents)
    refused: Counter[str] = Counter()
    made: list[Rollout] = []
    records: list[str] = []
    for attempt in numbers.sample(list(groups), len(groups)):
        team = {str(t.agent) for t in found.get(attempt, ([], []))[0] if _learns(config, t)}
        try:
            its = _coalitions_of(
                config, store, attempt, sorted(team), numbers, name=rollouts.name, group=groups[attempt]
            )
        except ConfigError as error:
            refused[str(error)] += 1
            continue
        if len(made) + len(its) > config.fork_count:
            break
        made += its
        records.append(attempt)
    return ForkPlan(tuple(made), tuple(records), by_coalitions=True, refused=dict(refused))


def _coalitions_of(
    config: TrainConfig,
    store: Store,
    attempt_id: str,
    team: Sequence[str],
    numbers: random.Random,
    *,
    name: str,
    group: str,
) -> list[Rollout]:
    """Return the runs of one rollout's coalitions.

    Raises:
        ConfigError: it cannot be run again, or has no team of at least two agents.
    """
    if len(team) < 2:
        raise ConfigError(
            f"{'only ' + team[0] if team else 'none'} of the agents to be trained made a call: there is no team"
        )
    drawn = {some: None for order in orders(team, config.orders, numbers) for some in coalitions(order)[:-1]}
    read = recorded(store, attempt_id=attempt_id)
    made: list[Rollout] = []
    for number, some in enumerate(drawn):
        # One `draw` for all of them: the base model gives the same answer to the same request.
        without = tuple(agent for agent in team if agent not in some)
        asked = Replay(attempt_id=attempt_id, beyond="sample", fresh=without, model=BASE)
        made += plan(
            read,
            name=name,
            replay=_with_tools(config, asked),
            group_id=group,
            timeout_s=config.timeout_s,
            place=f"coalition{number}",
        )
    return made


def _groups(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return the group of each attempt that succeeded."""
    return {o.attempt.attempt_id: o.rollout.group_id for o in outcomes if o.attempt is not None and o.crash is None}


def _learns(config: TrainConfig, call: Transition) -> bool:
    return selects(config.agents or ("*",), call.path) and why_untrainable(call) is None


@dataclass(frozen=True, slots=True)
class ForkResults:
    """The results of a step's forks.

    Attributes:
        ended: forks that differed from their record, by reason.
        metrics: their number, and the cost of all forks, as numbers by name.
        what: description of what was run.
    """

    ended: Mapping[str, int]
    metrics: Mapping[str, float]
    what: str

    @property
    def line(self) -> str:
        """The cost of the forks as one line of text."""
        m = self.metrics
        return (
            f"{m['forks']:.0f} forks, {self.what}: {m['fork_calls_drawn']:.0f} model calls made"
            f" ({m['fork_tokens_prompt']:.0f} tokens read, {m['fork_tokens_generated']:.0f} drawn) and"
            f" {m['fork_calls_replayed']:.0f} given from the record ({m['fork_tokens_saved']:.0f} tokens saved); what"
            f" follows where they left it is {m['fork_continuations']:.1f} rollouts long"
        )


def count_forks(plan: ForkPlan, outcomes: Sequence[Outcome], traces: Traces) -> ForkResults:
    """Count forks and their cost.

    Args:
        plan: what was to be run.
        outcomes: of its rollouts.
        traces: reads the traces of attempts.
    """
    its = {trace.attempt_id: trace for trace in traces([*_attempts(outcomes), *{*plan.records}])}
    calls = [_calls(its.get(name)) for name in _attempts(outcomes)]
    why = [
        why_ended(o.attempts[-1], [node.call for node in own if node.call is not None])
        for o, own in zip(_begun_outcomes(outcomes), calls, strict=True)
    ]
    ended = Counter(reason for reason in why if reason is not None)
    failed = sum(o.attempt is None and reason is None for o, reason in zip(_begun_outcomes(outcomes), why, strict=True))
    drawn = [node for own in calls for node in own if not is_replayed(node)]
    given = [node for own in calls for node in own if is_replayed(node)]
    rest = sum(_rest(own, its.get(_record(o))) for o, own in zip(_begun_outcomes(outcomes), calls, strict=True))
    metrics = {
        "forks": len(plan.rollouts),
        "fork_points": len(plan.records),
        "forks_ended": sum(ended.values()),
        "forks_failed": failed,
        "forks_refused": sum(plan.refused.values()),
        "fork_calls_drawn": len(drawn),
        "fork_calls_replayed": len(given),
        "fork_tokens_prompt": sum(tokens_of(node)[0] for node in drawn),
        "fork_tokens_generated": sum(tokens_of(node)[1] for node in drawn),
        "fork_tokens_replayed": sum(tokens_of(node)[1] for node in given),
        "fork_tokens_saved": sum(sum(tokens_of(node)) for node in given),
        "fork_continuations": rest,
    }
    return ForkResults(dict(ended), {name: float(value) for name, value in metrics.items()}, plan.phase)


def agent_shares(played: Sequence[PlayedAttempt]) -> dict[str, float]:
    """Return, by metric name, the mean that each agent added over a step's tasks, and its standard error."""
    found = shares(task_means(played))
    values = {f"shapley/{agent}": share.value for agent, share in found.items()}
    errors = {f"shapley_error/{agent}": s.error for agent, s in found.items() if math.isfinite(s.error)}
    return {**values, **errors}


def refuse_ended(plan: ForkPlan, found: ForkResults) -> None:
    """Reject a program if none of its forks reached their call.

    Raises:
        AgentFailedError: the message says what differs, or why nothing could be forked.
    """
    reasons = Counter(found.ended) or Counter(plan.refused)
    if not plan.rollouts or sum(found.ended.values()) == len(plan.rollouts):
        why = "\n".join(f"  {count}: {reason}" for reason, count in reasons.most_common(3))
        one, back = ("rollout", "run again") if plan.by_coalitions else ("call", "brought back to its call")
        what = f"not one of {len(plan.rollouts)} forks" if plan.rollouts else f"not one {one}"
        raise AgentFailedError(
            f"{what} could be {back}, so there is nothing to compare with:\n{why}\n"
            "See with `lightning-rl fork --dry-run` where the program differs from one run to the next."
        )


def _begun_outcomes(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.attempts]


def _attempts(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the attempt of each fork that began: each has one try."""
    return [outcome.attempts[-1].attempt_id for outcome in _begun_outcomes(outcomes)]


def _calls(trace: Trace | None) -> list[Node]:
    """Return the calls that reached the gateway."""
    return [] if trace is None else [node for node in trace.chats if node.call is not None]


def _record(outcome: Outcome) -> str:
    return "" if outcome.rollout.replay is None else outcome.rollout.replay.attempt_id


def _rest(calls: Sequence[Node], record: Trace | None) -> float:
    """Return the number of a fork's calls from the first sampled one on, relative to its record's calls."""
    place = next((n for n, node in enumerate(calls) if not is_replayed(node)), len(calls))
    return 0.0 if record is None else (len(calls) - place) / max(1, len(record.chats))
