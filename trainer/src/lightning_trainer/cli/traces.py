"""`lightning-rl traces`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_spans.errors import ConfigError
from lightning_spans.spans import CHAT, EXECUTE_TOOL, TOOL_ARGUMENTS, TOOL_RESULT
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
    from rich.text import Text
    from rich.tree import Tree

    from lightning_spans.rewards import Reward
    from lightning_spans.store import AttemptRecord
    from lightning_spans.trace import Node, Trace

SHORT = 100  # characters of a text that a line of the tree shows
GIVEN = ("run", "score", "emit_reward")  # sources of rewards that the user's own program gave


@click.command(name="traces")
@click.option("--rollout", "rollouts", multiple=True, metavar="ID", help="Only this rollout. May be repeated.")
@click.option("--origin", metavar="LABEL", help="Only what was recorded under this label: live, training, ...")
@click.option(
    "--to-tasks", type=click.Path(path_type=Path), metavar="FILE", help="Write each trace as a task, one JSON a line."
)
@click.option("--task-field", default="question", show_default=True, help="Field of a task that gets what was asked.")
@click.option("--json", "as_json", is_flag=True, help="Print one span a line, as JSON.")
@click.option("--limit", default=10, show_default=True, type=click.IntRange(1), help="Newest traces shown as trees.")
@rewards_option
@store_option
@key_file_option
def command(
    *,
    rollouts: Sequence[str],
    origin: str | None,
    to_tasks: Path | None,
    task_field: str,
    as_json: bool,
    limit: int,
    automatic: tuple[str, ...],
    store: str,
    key_file: Path | None,
) -> None:
    """Show what happened: agents, model calls with their tokens, tools, rewards.

    With --json each line is a span with operation, agent, trace_id, span_id, parent_id, rollout_id, attempt_id,
    start_ns, end_ns, status, attributes, and for model calls response_id, prompt_token_ids, response_token_ids,
    logprobs, policy_version. Where rewards are tied to a span its line has them, and the first line of a trace has
    those of the whole attempt: rewards, with source, agent, value of each.
    """
    from lightning_spans.trace import traces_of
    from lightning_trainer.air.judge import read_rules
    from lightning_trainer.air.shown import with_automatic

    rules = read_rules(given({"rewards": automatic}).get("rewards", {}))
    with reading(store, key_file) as source:
        traces = traces_of(source, rollout_ids=list(rollouts) or None, origin=origin)
        attempts = {} if as_json else {a.attempt_id: a for a in source.attempts(rollout_ids=list(rollouts) or None)}
    traces = with_automatic(traces, rules)
    if to_tasks is not None:
        _write_tasks(to_tasks, traces, task_field)
        return
    if as_json:
        for trace in traces:
            for line in _json_lines(trace):
                print_json(line)
        return
    _print_trees(traces[-limit:], attempts, whole=bool(rollouts))
    if len(traces) > limit:
        click.echo(f"{len(traces) - limit} earlier traces are not shown; --limit shows more.", err=True)
    if not traces:
        click.echo("no traces in this store.", err=True)


def _write_tasks(path: Path, traces: Sequence[Trace], field: str) -> None:
    from lightning_trainer.live_tasks import tasks_of

    tasks = list(tasks_of(traces, field=field))
    if not tasks:
        raise ConfigError("no trace here holds what a model was asked: there is no task to write.")
    try:
        path.write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}.") from None
    click.echo(f"{len(tasks)} tasks in {path}; {len(traces) - len(tasks)} traces asked no model.", err=True)


def _print_trees(traces: Iterable[Trace], attempts: dict[str, AttemptRecord], *, whole: bool) -> None:
    from rich.tree import Tree

    for trace in traces:
        tree = Tree(_title(trace, attempts.get(trace.attempt_id or ""), whole=whole))
        _grow(tree, trace, _by_node(trace))
        for reason, count in Counter(lost.reason for lost in trace.unjoined).items():
            tree.add(f"[yellow]{count} calls: {reason}[/yellow]")
        screen().print(tree)


def _by_node(trace: Trace) -> dict[str | None, list[Reward]]:
    """Sort rewards by the span that they are tied to; None for those of the attempt, or of a span that is not there."""
    spans = {span_id: node.span.span_id for node in trace for span_id in (node.span.span_id, *node.merged)}
    found: dict[str | None, list[Reward]] = {}
    for reward in trace.rewards:
        found.setdefault(spans.get(reward.span_id or ""), []).append(reward)
    return found


def _json_lines(trace: Trace) -> Iterator[dict[str, Any]]:
    rewards = _by_node(trace)
    for place, line in enumerate(trace.to_json_lines()):
        own = [*(rewards.get(None, []) if place == 0 else []), *rewards.get(line["span_id"], [])]
        given = [{"source": reward.source, "agent": reward.agent, "value": reward.value} for reward in own]
        yield {**line, **({"rewards": given} if given else {})}


def _grow(tree: Tree, trace: Trace, rewards: dict[str | None, list[Reward]]) -> None:
    """Hang every node under its parent; a stack, not recursion, because agents nest deeply."""
    stack: list[tuple[Tree, Node]] = [(tree, node) for node in reversed(trace.roots)]
    while stack:
        parent, node = stack.pop()
        line = _line(node)
        for reward in rewards.get(node.span.span_id, []):
            line.append(f"  {reward.source} {reward.value:+.3g}", style="cyan")
        branch = parent.add(line)
        stack += [(branch, child) for child in reversed(node.children)]


def _title(trace: Trace, attempt: AttemptRecord | None, *, whole: bool) -> Text:
    from rich.text import Text

    title = Text(f"attempt {trace.attempt_id}" if trace.attempt_id else "outside a runner", style="bold")
    if attempt is not None:
        title.append(f"  {attempt.status}", style="green" if attempt.status == "succeeded" else "red")
    for reward in _by_node(trace).get(None, []):
        source = "" if reward.source in GIVEN else f" ({reward.source})"
        title.append(f"  {reward.agent or 'reward'} {reward.value:g}{source}", style="cyan")
    if attempt is not None and attempt.error:
        title.append(f"\n{attempt.error if whole else attempt.error.splitlines()[-1][:SHORT]}", style="red")
    title.plain = printable(title.plain, lines=True)
    return title


def _line(node: Node) -> Text:
    from rich.text import Text

    span = node.span
    line = Text(f"{span.operation} ", style="dim").append(span.name, style="bold")
    if span.agent and span.agent != span.name:
        line.append(f"  {span.agent}", style="magenta")
    line.append(f"  {(span.end_ns - span.start_ns) / 1e6:.0f} ms", style="dim")
    if span.operation == CHAT:
        line.append(_tokens(node), style="cyan")
    if span.operation == EXECUTE_TOOL:
        given, got = span.attributes.get(TOOL_ARGUMENTS, ""), span.attributes.get(TOOL_RESULT, "")
        line.append(f"  {str(given)[:SHORT]} -> {str(got)[:SHORT]}")
    if node.error is not None:
        line.append(f"  {node.error.splitlines()[0][:SHORT] if node.error else 'error'}", style="red")
    line.plain = printable(line.plain)
    return line


def _tokens(node: Node) -> str:
    answer = node.answer
    if answer.prompt_token_ids is None or not answer.choices:
        return "  no tokens recorded"
    drawn = " + ".join(str(len(choice.token_ids or ())) for choice in answer.choices)
    version = "" if node.policy_version is None else f", weights {node.policy_version}"
    return f"  {len(answer.prompt_token_ids)} -> {drawn} tokens{version}"
