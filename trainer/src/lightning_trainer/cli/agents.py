"""`lightning-rl agents`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lightning_spans.agents import check_known
from lightning_spans.errors import LightningError
from lightning_trainer.cli.options import (
    given,
    key_file_option,
    print_json,
    reading,
    rewards_option,
    screen,
    store_option,
)
from lightning_trainer.printable import printable

if TYPE_CHECKING:
    from lightning_spans.trace import Trace
    from lightning_trainer.data import Task
    from lightning_trainer.overview import AgentRow
    from lightning_trainer.rollouts import Outcome
    from lightning_trainer.target import Job


@click.command(name="agents")
@click.argument("target", required=False)
@click.option("--data", type=click.Path(path_type=Path), help="Tasks: a JSON Lines, JSON or CSV file.")
@click.option("--tasks", "count", default=4, show_default=True, type=click.IntRange(1), help="Run the first N of them.")
@click.option("--command", "program", help="The agent as a command, instead of TARGET.")
@click.option("--reward", help="Reward function module:function, called as score(task, result).")
@click.option("--agents", "names", metavar="NAME,...", help="The agents that you mean to train.")
@click.option("--timeout-s", default=300.0, show_default=True, help="Time limit of a task, in seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object an agent.")
@rewards_option
@store_option
@key_file_option
def command(
    *,
    target: str | None,
    data: Path | None,
    count: int,
    program: str | None,
    reward: str | None,
    names: str | None,
    timeout_s: float,
    as_json: bool,
    automatic: tuple[str, ...],
    store: str,
    key_file: Path | None,
) -> None:
    """List the agents of the program TARGET (module:function) on a few tasks, or those in a store.

    Model calls go where they always go. The traces are kept in the store, so `lightning-rl traces` shows them.
    """
    from lightning_spans.trace import count_joins
    from lightning_trainer.air.judge import read_rules
    from lightning_trainer.air.shown import with_automatic
    from lightning_trainer.overview import overview

    rules = read_rules(given({"rewards": automatic}).get("rewards", {}))
    chosen = tuple(name.strip() for name in names.split(",") if name.strip()) if names else None
    if target or program:
        if data is None:
            raise LightningError("give the tasks to run: --data FILE.")
        from lightning_trainer.data import load_tasks
        from lightning_trainer.target import Job

        job = Job(target=target, command=program, reward=reward, needs_reward=False)
        traces = _run(job, load_tasks(data)[:count], timeout_s, store)
    else:
        from lightning_spans.trace import traces_of

        with reading(store, key_file) as source:
            traces = traces_of(source)
            _tell_errors([a.error for a in source.attempts() if a.error], len(traces), "attempts")
    rows = overview(with_automatic(traces, rules), chosen)
    if not rows:
        raise LightningError("no model call was captured in this store. Run the agent with attach(), or name a TARGET.")
    if chosen is not None:
        check_known(chosen, (row.agent for row in rows if row.agent is not None))
    if as_json:
        for row in rows:
            print_json(row.to_json())
    else:
        _print_table(rows)
    for line in count_joins(traces).lines():
        click.echo(line, err=as_json)


def _run(job: Job, tasks: Sequence[Task], timeout_s: float, store: str) -> list[Trace]:
    """Run the tasks, once each, with no policy: every call stays at its own endpoint."""
    import uuid

    from lightning_spans.trace import traces_of
    from lightning_trainer.config import cores
    from lightning_trainer.local import opened, serving
    from lightning_trainer.overview import nothing_captured
    from lightning_trainer.progress import Silent
    from lightning_trainer.rollouts import plan
    from lightning_trainer.runner import Runner
    from lightning_trainer.server.settings import Routing

    logs = Path(tempfile.mkdtemp(prefix="lightning-logs-"))
    runner = Runner(job, workers=min(cores(), len(tasks)), concurrency=4, logs=logs)
    name = f"agents-{uuid.uuid4().hex[:8]}:a"
    rollouts = plan(tasks, name=name, size=1, mode="agents", max_attempts=1, timeout_s=timeout_s)
    try:
        runner.start()
        with opened(store) as kept, serving(kept, runner, routing=Routing()) as local:
            outcomes = local.run(rollouts, Silent(), "tasks")
            _tell(outcomes, logs)
            traces = traces_of(kept, rollout_ids=[rollout.rollout_id for rollout in rollouts])
            if not any(trace.chats for trace in traces):
                raise LightningError(nothing_captured(len(outcomes), runner.attached))
            return traces
    finally:
        runner.stop()


def _tell(outcomes: Sequence[Outcome], logs: Path) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(errors) == len(outcomes):
        raise LightningError(f"all {len(outcomes)} tasks failed. The last error:\n{_end(errors[-1])}\nLogs: {logs}")
    _tell_errors(errors, len(outcomes), "tasks")


def _tell_errors(errors: Sequence[str], count: int, what: str) -> None:
    if errors:
        last = printable(_end(errors[-1]), lines=True)
        click.echo(f"{len(errors)} of {count} {what} failed. The last error:\n{last}", err=True)


def _end(text: str) -> str:
    return "\n".join(text.splitlines()[-12:])


def _print_table(rows: Sequence[AgentRow]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("agent", "trained", "calls", "tokens in", "out", "tools", "errors", "reward")
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            Text(printable(row.agent)) if row.agent else Text("(no name)", style="dim"),
            Text("yes", style="green") if row.trained else Text("no", style="red"),
            f"{row.calls}",
            f"{row.prompt_tokens}",
            f"{row.response_tokens}",
            f"{row.tool_calls}",
            f"{row.failed_calls + row.tool_errors}",
            "-" if row.reward is None else f"{row.reward:.3f}",
        )
    screen().print(table)
    for row in rows:
        verdict = "would be trained" if row.trained else "would not be trained"
        click.echo(printable(f"{row.agent or '(no name)'} {verdict}: {row.why}{_errors(row)}{_sources(row)}"))


def _sources(row: AgentRow) -> str:
    """Say where its reward came from, where there is more than one source."""
    parts = [f"{value:+.3f} {source}" for source, value in row.reward_sources.items()]
    return f"; reward {' '.join(parts)}" if len(parts) > 1 else ""


def _errors(row: AgentRow) -> str:
    parts = [
        f"{count} of {total} {what}"
        for count, total, what in (
            (row.failed_calls, row.calls, "model calls failed"),
            (row.tool_errors, row.tool_calls, "tool calls failed"),
        )
        if count
    ]
    return f"; {', '.join(parts)}" if parts else ""
