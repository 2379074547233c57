"""A trial of an agent on a few tasks, for `lightning-rl agents`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from lightning_spans.errors import AgentFailedError, RewardError
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.failures import last_error, where_calls_go
from lightning_trainer.report.terminal import printable

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace
    from lightning_trainer.rl.rollouts import Outcome
    from lightning_trainer.run.data import Task
    from lightning_trainer.runner.target import Job
    from lightning_trainer.session.answers import Subject
    from lightning_trainer.session.sampling import SamplingOptions

_AT_ONCE: Final = 4  # concurrent tasks in each worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A program with its tasks, and the model that answers its calls."""

    job: Job
    tasks: Sequence[Task]
    timeout_s: float
    subject: Subject
    sampling: SamplingOptions


def run_trial(trial: Trial, store: str) -> tuple[list[Trace], str | None]:
    """Run each task once.

    Returns:
        The traces, and what is wrong with a reward; None if nothing is.
    """
    import uuid

    from lightning_spans.record.unrecorded import lines
    from lightning_spans.store.traces import traces_of
    from lightning_trainer.config.workers import worker_count
    from lightning_trainer.report.agents import explain_no_calls, no_gateway_saw
    from lightning_trainer.report.progress import ProgressDisplay
    from lightning_trainer.rl.rollouts import plan
    from lightning_trainer.runner.logs import temporary_folder
    from lightning_trainer.session.answers import open_answers
    from lightning_trainer.session.session import open_session

    job, tasks = trial.job, trial.tasks
    name = f"agents-{uuid.uuid4().hex[:8]}:a"
    rollouts = plan(tasks, name=name, size=1, mode="agents", max_attempts=1, timeout_s=trial.timeout_s)
    with ExitStack() as stack:
        progress = stack.enter_context(ProgressDisplay(f"running {job.target or job.command} on {len(tasks)} tasks"))
        logs = stack.enter_context(temporary_folder("lightning-logs-"))
        session = stack.enter_context(
            open_session(
                job,
                store,
                open_answers(trial.subject),
                trial.sampling,
                workers=worker_count(None, len(tasks), 1),
                concurrency=_AT_ONCE,
                progress=progress,
                logs=logs,
            )
        )
        at_home, runner = session.answers.model is None, session.runner
        reward_error = None
        try:
            _tell(session.run(rollouts, progress, "tasks"), logs, at_home=at_home)
        except RewardError as error:  # reported after the traces
            reward_error = str(error)
        traces = traces_of(session.store, rollout_ids=[rollout.rollout_id for rollout in rollouts])
        missed = lines(runner.unrecorded)
        if not any(trace.chats for trace in traces):
            if reward_error is not None:
                raise RewardError(reward_error)
            if job.command is not None and at_home:
                raise AgentFailedError(no_gateway_saw(job.command, len(rollouts)))
            told = explain_no_calls(len(rollouts), runner.attached, job.command)
            raise AgentFailedError("\n".join([told, *missed]))
        for line in missed:
            click.echo(f"WARNING: {printable(line)}", err=True)
        return traces, reward_error


def _tell(outcomes: Sequence[Outcome], logs: Path, *, at_home: bool) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(errors) == len(outcomes):
        where = where_calls_go(errors[-1])
        if where and at_home:
            where += "If you have no endpoint, use a local model: --model smollm2-135m, or the folder of your own.\n"
        raise AgentFailedError(
            f"all {amount(len(outcomes), 'task')} failed. The last error:\n{last_error(errors[-1])}\n"
            f"{where}{_end_of_output(logs)}".rstrip()
        )
    tell_errors(errors, len(outcomes), "tasks")


def _end_of_output(logs: Path, most: int = 6) -> str:
    """Return the end of the program's output, because the folder is deleted and nothing else keeps it."""
    texts = (path.read_text(encoding="utf-8", errors="replace").rstrip() for path in sorted(logs.glob("*.log")))
    said = next((text for text in texts if text), "")
    return f"The program printed at last:\n{last_error(said, most)}" if said else ""


def tell_errors(errors: Sequence[str], count: int, what: str) -> None:
    """Print how many of these failed, and the last error; nothing if none did."""
    if errors:
        last = printable(last_error(errors[-1]), lines=True)
        click.echo(f"{len(errors)} of {count} {what} failed. The last error:\n{last}", err=True)
