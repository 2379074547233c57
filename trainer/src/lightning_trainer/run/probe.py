"""A few rollouts with the policy that a run would start from, and one update that is not kept, to forecast a run.

One task comes first, and as many more as fit into a time limit: a slow program does not run for minutes before anybody
sees a number.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightning_spans.errors import AgentFailedError
from lightning_spans.schema.agents import label, selects
from lightning_spans.store.traces import traces_of
from lightning_trainer.judges import RolloutJudge, open_judge, read_judge
from lightning_trainer.report.agents import explain_no_calls
from lightning_trainer.report.failures import last_error, where_calls_go
from lightning_trainer.report.forecast import MeasuredUpdate, Probe, TaskTrial
from lightning_trainer.report.progress import Progress
from lightning_trainer.report.speed.memory import process_peak
from lightning_trainer.report.step_notes import unrewarded_agents
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.algorithms.grpo import GRPO
from lightning_trainer.rl.rewards import installed, read_rules
from lightning_trainer.rl.rollouts import Outcome, plan
from lightning_trainer.rl.scores import constant_rewards, reward_of_failures, score, total
from lightning_trainer.rl.usage import tokens_of
from lightning_trainer.runner.logs import temporary_folder
from lightning_trainer.runner.target import Job
from lightning_trainer.session.answers import AnswerSource
from lightning_trainer.session.sampling import sampling_of
from lightning_trainer.session.session import STORE_NAME, open_database, open_runner, serve

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace
    from lightning_spans.schema.attempts import Rollout
    from lightning_trainer.backend_protocol import Learner
    from lightning_trainer.config.train import TrainConfig
    from lightning_trainer.rl.rows import Row
    from lightning_trainer.run.data import Task
    from lightning_trainer.session.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProbeResult:
    """Rollouts that were run, with the seconds that they and the judge took, and their batch.

    Attributes:
        teaching: groups in which a selected agent did better in one rollout than in another.
        unrewarded: names of selected agents that got no reward.
    """

    outcomes: Sequence[Outcome]
    traces: Sequence[Trace]
    rows: Sequence[Row]
    tokens_in_calls: int
    seconds: float
    phases: Sequence[tuple[int, float]]
    teaching: frozenset[str]
    unrewarded: Sequence[str]


def probe(
    config: TrainConfig,
    tasks: Sequence[Task],
    places: Sequence[int],
    make: Callable[[TrainConfig], Learner],
    progress: Progress,
    *,
    update: bool,
    limit_s: float = math.inf,
    name: str = "a",
) -> Probe:
    """Run some tasks, as a step would, in a temporary folder.

    Args:
        config: of the run.
        tasks: all of them.
        places: positions of those to try.
        make: loads the policy.
        progress: callback for progress events.
        update: whether one update is measured too.
        limit_s: seconds for rollouts; the first task is run in any case.
        name: of the batch, from which sampling seeds follow: with that of a step, its first rollouts are sampled.

    Raises:
        AgentFailedError: no rollout succeeded, or no model call was seen.
        LightningError: see `train`; or the judge gave no verdict.
    """
    began = time.monotonic()
    judging = read_judge(config.reward, config.judge)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder("lightning-try-"))
        runner = stack.enter_context(
            open_runner(
                Job.of(config),
                workers=config.worker_count(),
                concurrency=config.concurrency,
                progress=progress,
                logs=folder / "logs",
            )
        )
        rules = read_rules(config.rewards, credit=config.credit, gamma=config.gamma)
        stack.enter_context(installed(rules))
        store = stack.enter_context(open_database(str(folder / STORE_NAME)))
        judge = stack.enter_context(open_judge(judging, store, seed=config.seed, cache=None))
        progress.phase(f"loading {config.model}")
        learner = stack.enter_context(closing(make(config)))
        answers = AnswerSource.of(learner.engines, config.policies)
        session = stack.enter_context(
            serve(store, runner, answers, sampling_of(config), timeouts=config.timeouts, failed=config.failed)
        )
        loaded = time.monotonic() - began
        ran = _run(config, [tasks[place] for place in places], session, judge, progress, limit_s=limit_s, name=name)
        learned = _learn(learner, ran.rows, progress, limit_s) if update else ((), 0.0)
        return _make_probe(
            config, places[: len(ran.outcomes) // config.group_size], ran, load_seconds=loaded, learned=learned
        )


def more_tasks(done: int, left: int, seconds: float, limit_s: float) -> int:
    """Return how many more tasks fit into a limit, after `done` tasks took `seconds`."""
    if limit_s == math.inf:
        return left
    if done == 0:
        return min(1, left)
    return max(0, min(left, math.floor((limit_s - seconds) * done / max(seconds, 1e-9))))


def _outcomes(
    rollouts: Sequence[Rollout], size: int, session: Session, progress: Progress, limit_s: float
) -> tuple[list[Outcome], list[tuple[int, float]]]:
    """Run groups until the limit; return the outcomes of those that ran, and how many ran together, with seconds."""
    outcomes, phases = list[Outcome](), list[tuple[int, float]]()
    while True:
        done, whole = len(outcomes), len(rollouts)
        taken_s = sum(seconds for _, seconds in phases)
        count = size * more_tasks(done // size, (whole - done) // size, taken_s, limit_s)
        if not count:
            return outcomes, phases
        what = "rollouts" if count == whole else "more rollouts" if done else "rollouts of the first task"
        began = time.monotonic()
        outcomes += session.run(rollouts[done : done + count], progress, what)
        phases.append((count, time.monotonic() - began))


def _run(
    config: TrainConfig,
    tasks: Sequence[Task],
    session: Session,
    judge: RolloutJudge | None,
    progress: Progress,
    *,
    limit_s: float,
    name: str,
) -> _ProbeResult:
    rollouts = plan(
        tasks,
        name=f"try-{uuid.uuid4().hex[:8]}:{name}",
        size=config.group_size,
        mode="train",
        max_attempts=config.max_attempts,
        timeout_s=config.timeout_s,
    )
    store = session.store
    outcomes, phases = _outcomes(rollouts, config.group_size, session, progress, limit_s)
    seconds = sum(seconds for _, seconds in phases)
    traces = traces_of(store, rollout_ids=[outcome.rollout.rollout_id for outcome in outcomes])
    _refuse(outcomes, traces, config.agents)
    session.runner.check()
    if not any(trace.chats for trace in traces):
        raise AgentFailedError(explain_no_calls(len(outcomes), session.runner.attached, config.command))
    if judge is not None:
        progress.phase("judging rollouts")
        began = time.monotonic()
        outcomes = judge.judge(outcomes)
        seconds += time.monotonic() - began
    tried = config.model_copy(update={"credit": "identical", "algorithm": "grpo"}) if config.uses_forks else config
    algorithm = algorithm_by_name(tried.algorithm)  # nothing is forked here: all calls learn instead
    batch = algorithm.batch(tried, outcomes, lambda ids: traces_of(store, attempt_ids=ids), (), penalty=None)
    groups = batch if algorithm.grouped else GRPO.batch(tried, outcomes, lambda ids: traces_of(store, attempt_ids=ids))
    compared = {call.group_id for call in groups.calls if call.left_out is None}
    return _ProbeResult(
        outcomes=outcomes,
        traces=traces,
        rows=batch.rows,
        tokens_in_calls=batch.account.tokens_in_calls,
        seconds=seconds,
        phases=phases,
        teaching=frozenset(compared - groups.flat_groups),
        unrewarded=unrewarded_agents(groups.calls),
    )


def _learn(
    learner: Learner, rows: Sequence[Row], progress: Progress, limit_s: float
) -> tuple[Sequence[MeasuredUpdate], float]:
    """Return two measured updates, and peak bytes on the GPU; no updates if there are no rows.

    The first update, which allocates the optimiser, is not measured. All are discarded, so rows of groups without a
    signal are learned from as well, to measure the time.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group_id, []).append(_with_gradient(row))
    if not groups:
        return [], 0.0
    few, *others = groups.values() if len(groups) > 1 else _halves(*groups.values())
    progress.phase(f"measuring updates on {len(few)} rows and more, which are then discarded")
    learner.update(few)
    updates, memory, whole = list[MeasuredUpdate](), 0.0, Counter(row.group_id for row in rows)
    for _ in range(2):
        done = updates[-1].seconds if updates else 0.0
        many = others[: more_tasks(1, len(others), done, limit_s)] if updates else []
        chosen, began = [*few, *(row for group in many for row in group)], time.monotonic()
        told = learner.update(chosen)
        seconds, memory = time.monotonic() - began, told.get("gpu_memory_bytes", 0.0)
        tokens = int(told.get("packed_tokens") or sum(len(row.tokens) for row in chosen))
        updates.append(MeasuredUpdate(round(sum(1 / whole[row.group_id] for row in chosen), 6), tokens, seconds))
    return updates, memory


def _halves(rows: list[Row]) -> list[list[Row]]:
    return [half for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]) if half]


def _with_gradient(row: Row) -> Row:
    return row if row.has_gradient else replace(row, advantages=row.mask.astype(float))


def _make_probe(
    config: TrainConfig,
    places: Sequence[int],
    ran: _ProbeResult,
    *,
    load_seconds: float,
    learned: tuple[Sequence[MeasuredUpdate], float],
) -> Probe:
    paths = [node.path for trace in ran.traces for node in trace.chats]
    calls = Counter("(no name)" if path is None else label(path, config.agents) for path in paths)
    used = [tokens_of(node) for trace in ran.traces for node in trace.chats]
    chosen = config.agents or ("*",)
    named = {label(path, chosen) for path in paths if path is not None and selects(chosen, path)}
    trained = sorted(named.difference(ran.unrewarded))
    return Probe(
        tried=_tried_tasks(ran, places, config),
        rollouts=len(ran.outcomes),
        rollout_seconds=ran.seconds,
        phases=ran.phases,
        updates=learned[0],
        tokens_prompt=sum(prompt for prompt, _ in used),
        tokens_generated=sum(answer for _, answer in used),
        tokens_in_rows=sum(len(row.tokens) for row in ran.rows),
        tokens_in_calls=ran.tokens_in_calls,
        calls=dict(sorted(calls.items())),
        earned=score(ran.outcomes, config.failed).by_agent,
        trained=trained,
        unrewarded=ran.unrewarded,
        constant=constant_rewards(ran.outcomes, trained),
        load_seconds=load_seconds,
        memory=process_peak(),
        gpu_memory=int(learned[1]),
    )


def _refuse(outcomes: Sequence[Outcome], traces: Sequence[Trace], chosen: Sequence[str] | None) -> None:
    if all(outcome.attempt is None and outcome.crash is None for outcome in outcomes):
        text = outcomes[-1].error or ""
        paths = {path for trace in traces for path in trace.agent_paths}
        others = set() if chosen is None else {label(path, chosen) for path in paths if not selects(chosen, path)}
        said = f"{last_error(text, 15)}\n{where_calls_go(text, agents=others)}".rstrip()
        raise AgentFailedError(f"all {len(outcomes)} rollouts failed. The last error:\n{said}")


def _tried_tasks(ran: _ProbeResult, places: Sequence[int], config: TrainConfig) -> list[TaskTrial]:
    crashed = reward_of_failures(ran.outcomes, config.failed)
    found = []
    for number, place in enumerate(places):
        own = ran.outcomes[number * config.group_size : (number + 1) * config.group_size]
        counted = [(outcome, outcome.counts(config.failed)) for outcome in own]
        rewards = [
            crashed if attempt is outcome.crash else total(outcome.rewards)
            for outcome, attempt in counted
            if attempt is not None and (attempt is outcome.crash or outcome.rewards)
        ]
        teaches = own[0].rollout.group_id in ran.teaching
        failed = sum(o.attempt is None for o in own)
        found.append(TaskTrial(place=place, rewards=tuple(rewards), contrast=teaches, failed=failed))
    return found
