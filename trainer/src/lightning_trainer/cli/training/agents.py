"""`lightning-rl agents`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_spans.errors import AgentFailedError, LightningError, NothingToLearnError, RewardError
from lightning_spans.schema.agents import check_known
from lightning_trainer.cli.options import (
    given,
    key_file_option,
    name_by_option,
    print_json,
    reading,
    rewards_option,
    screen,
    store_option,
    take_work,
    work_options,
)
from lightning_trainer.cli.training.environments import environment_options, with_environment
from lightning_trainer.report.failures import last_error, where_calls_go
from lightning_trainer.report.terminal import printable

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace
    from lightning_trainer.evaluation.subjects import Answering, Subject
    from lightning_trainer.gateway.settings import Routing
    from lightning_trainer.naming import NameRule
    from lightning_trainer.report.agents import AgentRow
    from lightning_trainer.rl.rollouts import Outcome
    from lightning_trainer.run.data import Task
    from lightning_trainer.runner.target import Job


@click.command(name="agents")
@click.argument("target", required=False)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Tasks: a JSON Lines, JSON, CSV or Parquet file, or a data set's folder.",
)
@environment_options(tasks=False)
@click.option("--tasks", "count", default=4, show_default=True, type=click.IntRange(1), help="Run the first N of them.")
@click.option("--command", "program", help="The agent as a command, instead of TARGET.")
@click.option("--reward", help="Reward function module:function, called as score(task, result).")
@work_options
@name_by_option
@click.option("--agents", "names", metavar="NAME,...", help="The agents that you mean to train.")
@click.option(
    "--model",
    help="What answers those agents (all that have a name, without --agents): a model folder, hub id, run or"
    " checkpoint, as eval takes it. Without it every call stays at its own endpoint.",
)
@click.option(
    "--endpoint",
    metavar="URL",
    help="OpenAI-compatible server that answers them; --model then names what it is asked for. Its key:"
    " LIGHTNING_UPSTREAM_KEY, or OPENAI_API_KEY where it is OPENAI_BASE_URL.",
)
@click.option(
    "--max-tokens", type=click.IntRange(1), help="With --model: most tokens of an answer, where none is asked."
)
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
    model: str | None,
    max_tokens: int | None,
    timeout_s: float,
    as_json: bool,
    automatic: tuple[str, ...],
    store: str,
    key_file: Path | None,
    endpoint: str | None,
    name_by: tuple[str, ...],
    env: str | None,
    env_options: tuple[str, ...],
    **flags: Any,
) -> None:
    """List the agents of the program TARGET (module:function) on a few tasks, or those in a store.

    Model calls go where they always go, or to --model or --endpoint by a gateway here, which sees those of a --command
    too. The traces are kept in the store, so `lightning-rl traces` shows them.

    Exit status: 0 done, 2 an option or a file is wrong, 3 the agent failed, 4 no task got a reward.
    """
    from lightning_trainer.report.agents import overview, unrewarded
    from lightning_trainer.rl.rewards.judge import read_rules
    from lightning_trainer.rl.rewards.shown import with_automatic

    reward_error: str | None = None
    rules = read_rules(given({"rewards": automatic}).get("rewards", {}))
    chosen = tuple(name.strip() for name in names.split(",") if name.strip()) if names else None
    asked = given({"env": env, "env_options": env_options, "target": target, "program": program, "data": data})
    if env is not None or env_options:
        asked = with_environment({**asked, "model": model, "endpoint": endpoint, "env_tasks": count})
        target, data = asked["target"], asked["data"]
    if target or program:
        if data is None:
            raise LightningError("give the tasks to run: --data FILE.")
        from lightning_trainer.naming import parse_rules
        from lightning_trainer.run.data import load_tasks
        from lightning_trainer.runner.target import Job

        look = _Look(
            job=Job(target=target, command=program, reward=reward, needs_reward=False, work=take_work(flags)),
            tasks=load_tasks(data)[:count],
            timeout_s=timeout_s,
            agents=chosen,
            subject=_subject(model, endpoint),
            max_tokens=max_tokens,
            name_by=parse_rules(name_by),
        )
        traces, reward_error = _run(look, store)
    elif model is not None or endpoint is not None:
        raise LightningError("--model answers a program's calls: name the TARGET, and tasks with --data FILE.")
    else:
        from lightning_spans.store.traces import traces_of

        with reading(store, key_file) as source:
            traces = traces_of(source)
            _tell_errors([a.error for a in source.attempts() if a.error], len(traces), "attempts")
    rows = overview(with_automatic(traces, rules), chosen, reward_error=reward_error)
    if not rows:
        raise LightningError("no model call was captured in this store. Run the agent with attach(), or name a TARGET.")
    if chosen is not None:
        paths = {path for trace in traces for path in trace.agent_paths}
        check_known(chosen, {*paths, *(row.agent for row in rows if row.agent is not None)})
    _print_rows(rows, as_json=as_json)
    _print_joins(traces, as_json=as_json)
    if reward_error is not None:
        raise RewardError(reward_error)
    if (advice := unrewarded(traces)) is not None:
        if target or program:
            raise NothingToLearnError(advice)
        click.echo(advice, err=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """What is run, and what answers."""

    job: Job
    tasks: Sequence[Task]
    timeout_s: float
    agents: tuple[str, ...] | None
    subject: Subject
    max_tokens: int | None
    name_by: tuple[NameRule, ...]


def _subject(model: str | None, url: str | None) -> Subject:
    """Say what answers: a server, a model, or, without either, what always does."""
    from lightning_trainer.evaluation.subjects import AsItIs, endpoint, read_subject
    from lightning_trainer.gateway.http.masking import remember

    if url is None:
        return AsItIs() if model is None else read_subject(model)
    key = os.environ.get("LIGHTNING_UPSTREAM_KEY")
    if key is None and url == os.environ.get("OPENAI_BASE_URL"):
        key = os.environ.get("OPENAI_API_KEY")
    remember(key)
    return endpoint(url, model=model, key=key)


def _print_rows(rows: Sequence[AgentRow], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print_json(row.to_json())
    else:
        _print_table(rows)


def _print_joins(traces: Sequence[Trace], *, as_json: bool) -> None:
    """Say what became of rewards and calls; that calls at their own endpoint have no tokens is as it should be."""
    from lightning_spans.adapter.trace import count_joins
    from lightning_trainer.report.agents import misspelt_rewards

    if (warning := misspelt_rewards(traces)) is not None:
        click.echo(printable(warning), err=True)
    joins = count_joins(traces)
    if joins.joined:
        for line in joins.lines():
            click.echo(line, err=as_json)
    else:
        click.echo(
            f"{joins.calls} model calls recorded, at their own endpoint: tokens are recorded while training.", err=True
        )


def _run(look: _Look, store: str) -> tuple[list[Trace], str | None]:
    """Run the tasks, once each.

    Returns:
        Their traces, and what is wrong with a reward.
    """
    import uuid

    from lightning_spans.record.unrecorded import lines
    from lightning_spans.store.traces import traces_of
    from lightning_trainer.config.workers import cores
    from lightning_trainer.evaluation.subjects import answering
    from lightning_trainer.report.agents import no_gateway_saw, nothing_captured
    from lightning_trainer.report.progress import Silent
    from lightning_trainer.rl.rollouts import plan
    from lightning_trainer.run.local import opened, serving
    from lightning_trainer.runner.runner import Runner

    job, tasks = look.job, look.tasks
    name = f"agents-{uuid.uuid4().hex[:8]}:a"
    rollouts = plan(tasks, name=name, size=1, mode="agents", max_attempts=1, timeout_s=look.timeout_s)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lightning-logs-")))
        runner = Runner(job, workers=min(cores(), len(tasks)), concurrency=4, logs=logs)
        stack.callback(runner.stop)
        runner.start()
        kept, answers = stack.enter_context(opened(store)), stack.enter_context(answering(look.subject))
        engines = list(answers.engines) or None
        local = stack.enter_context(
            serving(kept, runner, routing=_routing(look, answers), engine=engines, upstreams=answers.upstreams)
        )
        reward_error = None
        try:
            _tell(local.run(rollouts, Silent(), "tasks"), logs, at_home=answers.model is None)
        except RewardError as error:  # told after what was seen
            reward_error = str(error)
        traces = traces_of(kept, rollout_ids=[rollout.rollout_id for rollout in rollouts])
        missed = lines(runner.unrecorded)
        if not any(trace.chats for trace in traces):
            if reward_error is not None:
                raise RewardError(reward_error)
            if job.command is not None and answers.model is None:
                raise AgentFailedError(no_gateway_saw(job.command, len(rollouts)))
            raise AgentFailedError("\n".join([nothing_captured(len(rollouts), runner.attached), *missed]))
        for line in missed:
            click.echo(f"WARNING: {printable(line)}", err=True)
        return traces, reward_error


def _routing(look: _Look, answers: Answering) -> Routing:
    """Say which calls the model answers: of the agents that are named, else of all that have a name."""
    from lightning_trainer.gateway.settings import Routing
    from lightning_trainer.run.local import unnamed

    if answers.model is None:
        return Routing()
    return Routing(
        agents=tuple(answers.policies.by_agent) or look.agents or ("*",),
        model=answers.model,
        policies=answers.policies,
        seed=0,
        max_tokens=look.max_tokens,
        unnamed=unnamed(look.job.command, look.agents, look.name_by),
        name_by=look.name_by,
    )


def _tell(outcomes: Sequence[Outcome], logs: Path, *, at_home: bool) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(errors) == len(outcomes):
        where = where_calls_go(errors[-1])
        if where and at_home:
            where += "Without one, let a model that is loaded here answer: --model smollm2-135m, or your own.\n"
        raise AgentFailedError(
            f"all {len(outcomes)} tasks failed. The last error:\n{last_error(errors[-1])}\n"
            f"{where}{_said(logs)}".rstrip()
        )
    _tell_errors(errors, len(outcomes), "tasks")


def _said(logs: Path, most: int = 6) -> str:
    """Return the end of what the program printed: the folder goes, and nothing else has it."""
    texts = (path.read_text(encoding="utf-8", errors="replace").rstrip() for path in sorted(logs.glob("*.log")))
    said = next((text for text in texts if text), "")
    return f"The program printed at last:\n{last_error(said, most)}" if said else ""


def _tell_errors(errors: Sequence[str], count: int, what: str) -> None:
    if errors:
        last = printable(last_error(errors[-1]), lines=True)
        click.echo(f"{len(errors)} of {count} {what} failed. The last error:\n{last}", err=True)


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
        for title, counts in (("asked for tools", row.tools_asked), ("left out of its requests", row.left_out)):
            if counts:
                told = ", ".join(f"{name} {number}" for name, number in counts.items())
                click.echo(printable(f"{row.agent or '(no name)'} {title}: {told}"))
    for row in rows:
        verdict = "would be trained" if row.trained else "would not be trained"
        told = f"{row.why}{_errors(row)}{_sources(row)}{_places(row)}"
        click.echo(printable(f"{row.agent or '(no name)'} {verdict}: {told}"))


def _places(row: AgentRow) -> str:
    """Say where it stands, where that is in several places: they can be selected apart."""
    return f"; it is {', '.join(row.paths)}: name one of these to select it alone" if len(row.paths) > 1 else ""


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
