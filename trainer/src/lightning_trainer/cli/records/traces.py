"""`lightning-rl traces`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lightning_spans.errors import ConfigError
from lightning_spans.schema.agents import name_of, selects
from lightning_spans.schema.spans import CHAT, EXECUTE_TOOL, TOOL_ARGUMENTS, TOOL_RESULT
from lightning_trainer.flags.common import config_options, given_flags, print_json, reading, rewards_option, screen
from lightning_trainer.flags.fields import field_option
from lightning_trainer.flags.files import (
    agent_flag,
    json_flag,
    key_file_option,
    origin_option,
    rollouts_option,
    store_option,
    traces_option,
)
from lightning_trainer.lineage.permits import Permits, tenants_of
from lightning_trainer.options.permits import PermitOptions, take_permits
from lightning_trainer.options.selection import SelectionOptions
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.terminal import printable, some

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from lightning_spans.adapter.trace import Node, Trace
    from lightning_spans.schema.attempts import AttemptRecord
    from lightning_spans.schema.rewards import Reward
    from lightning_spans.store import Store

NEWEST = 10  # traces that are shown as trees
SHORT = 100  # most characters of a text in a line of the tree
GIVEN = ("run", "score", "emit_reward")  # sources of rewards from the user's own program


@click.command(name="traces")
@rollouts_option("Only this rollout")
@traces_option("Only this trace, which has no rollout")
@origin_option
@click.option(
    "--to-tasks",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write each trace as a task to this file, one JSON object per line.",
)
@click.option(
    "--task-field", default="question", show_default=True, help="Field of the task that gets the user's text."
)
@json_flag("Print one span per line as JSON.")
@click.option(
    "--limit",
    type=click.IntRange(1),
    help="Number of newest traces. [default: 10; with --json and --to-tasks: all]",
)
@agent_flag("Only traces in which this agent called a model.", dest="agents", multiple=True)
@field_option(SelectionOptions, "min_reward", text="Only traces with at least this reward.")
@click.option("--max-reward", type=float, help="Only traces with at most this reward.")
@click.option("--errors", is_flag=True, help="Only traces with an error.")
@click.option("--text", metavar="TEXT", help="Only traces with this text in a prompt or an answer.")
@click.option("--full", is_flag=True, help="Show prompts and answers in full.")
@config_options(PermitOptions)
@rewards_option
@store_option
@key_file_option
def command(
    *,
    rollouts: Sequence[str],
    traces: Sequence[str],
    origin: str | None,
    to_tasks: Path | None,
    task_field: str,
    as_json: bool,
    limit: int | None,
    agents: Sequence[str],
    min_reward: float | None,
    max_reward: float | None,
    errors: bool,
    text: str | None,
    full: bool,
    automatic: tuple[str, ...],
    store: str,
    key_file: Path | None,
    **permit_flags: Any,
) -> None:
    """Show traces: agents, model calls with their tokens, tools, rewards.

    With --json each line is a span with operation, agent, trace_id, span_id, parent_id, rollout_id, attempt_id,
    start_ns, end_ns, status, attributes, and for model calls call_id, response_id, prompt_token_ids,
    response_token_ids, logprobs, policy_version. The line of a span includes the rewards of that span. The first line
    of a trace also has the rewards of the whole attempt. Each reward has source, agent and value.
    """
    from lightning_spans.store.traces import each_trace, newest_traces
    from lightning_trainer.rl.rewards.judge import read_rules
    from lightning_trainer.rl.rewards.shown import with_automatic

    permits = take_permits(permit_flags)
    if to_tasks is None and permits != Permits():
        raise ConfigError("traces: --assume-consent, --tenant and --mix-tenants are for --to-tasks.")
    wanted = TraceFilter(tuple(agents), min_reward, max_reward, errors, text)
    rules = read_rules(given_flags({"rewards": automatic}).get("rewards", {}))
    seen: set[str] = set()
    with reading(store, key_file) as source:
        _refuse_unknown(source, rollouts, traces)
        named = bool(rollouts or traces)
        whole = limit is None and (as_json or to_tasks is not None)
        newest_only = not (named or whole)
        found = (
            newest_traces(source, origin=origin)
            if newest_only
            else each_trace(source, rollout_ids=rollouts or None, trace_ids=traces or None, origin=origin)
        )
        found = _note_agents(found, seen) if agents else found
        judged = (one for trace in found for one in with_automatic([trace], rules))
        chosen: Iterator[Trace] = (trace for trace in judged if wanted.takes(trace))
        newest = chosen if newest_only or whole else reversed(list(chosen))
        if limit is not None and (as_json or to_tasks is not None):
            chosen = reversed(list(islice(newest, limit)))
        if to_tasks is not None:
            _write_tasks(to_tasks, chosen, task_field, permits)
        elif as_json:
            _print_lines(chosen)
        else:
            _print_newest(source, newest, limit or NEWEST, seen, whole=full or named)


@dataclass(frozen=True, slots=True)
class TraceFilter:
    """Which traces to show."""

    agents: tuple[str, ...]
    min_reward: float | None
    max_reward: float | None
    errors: bool
    text: str | None

    def takes(self, trace: Trace) -> bool:
        """Whether a trace meets every condition that is set, and is shown."""
        from lightning_trainer.rl.scores import total

        if self.agents and not any(selects(self.agents, path) for path in trace.agent_paths):
            return False
        if self.min_reward is not None or self.max_reward is not None:
            earned = total(trace.rewards) if trace.rewards else None
            low, high = self.min_reward, self.max_reward
            if earned is None or (low is not None and earned < low) or (high is not None and earned > high):
                return False
        if self.errors and not any(node.error is not None for node in trace.nodes):
            return False
        return self.text is None or any(
            self.text in line for node in trace.chats for line in _question_and_answer(node)
        )


def _refuse_unknown(store: Store, rollouts: Sequence[str], traces: Sequence[str]) -> None:
    """Reject rollouts and traces that the store does not have.

    Raises:
        ConfigError: names them.
    """
    from lightning_spans.schema.calls import Call
    from lightning_spans.schema.spans import Span
    from lightning_spans.store.protocol import Where

    known = {rollout.rollout_id for rollout in store.rollouts(rollout_ids=list(rollouts))} if rollouts else set()
    lost = [f"rollout {name}" for name in rollouts if name not in known]
    for name in traces:
        where = Where(trace_ids=[name])
        if not any(store.page(kind, where, limit=1).records for kind in (Span, Call)):
            lost.append(f"trace {name}")
    if lost:
        raise ConfigError(f"there is no {', '.join(lost)} in this store. `lightning-rl traces` shows their ids.")


def _note_agents(traces: Iterable[Trace], seen: set[str]) -> Iterator[Trace]:
    """Yield the traces, and note the agents that called a model in them."""
    for trace in traces:
        seen.update(name_of(path) for path in trace.agent_paths)
        yield trace


def _print_lines(traces: Iterable[Trace]) -> None:
    for trace in traces:
        for line in _json_lines(trace):
            print_json(line)


def _print_newest(store: Store, traces: Iterator[Trace], limit: int, seen: set[str], *, whole: bool) -> None:
    newest = list(islice(traces, limit))[::-1]
    ids = [trace.attempt_id for trace in newest if trace.attempt_id is not None]
    _print_trees(newest, {one.attempt_id: one for one in store.attempts(attempt_ids=ids)}, whole=whole)
    if next(traces, None) is not None:
        click.echo("Earlier traces are not shown; --limit shows more.", err=True)
    if not newest:
        there = f" Agents seen: {some(sorted(seen))}." if seen else ""
        click.echo(printable(f"no traces in this store, or none that meets the conditions.{there}"), err=True)


def _write_tasks(path: Path, traces: Iterable[Trace], field: str, permits: Permits) -> None:
    from lightning_trainer.run.data import check_storable
    from lightning_trainer.run.live_tasks import tasks_of

    read, written, refused = 0, 0, 0
    left_out: Counter[str] = Counter()
    tenants: set[str] = set()
    part = path.with_name(f"{path.name}.part")  # an existing file is only replaced by a complete one
    try:
        with part.open("w", encoding="utf-8") as file:
            for trace in traces:
                if (reason := permits.reason_against(trace)) is not None:
                    left_out[reason] += 1
                    continue
                read += 1
                tenants |= tenants_of(trace)
                for task in tasks_of([trace], field=field):
                    try:
                        check_storable(task)
                    except ValueError:
                        refused += 1
                        continue
                    written += 1
                    file.write(json.dumps(task) + "\n")
        permits.check_tenants(tenants)
        if written:
            part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}.") from None
    finally:
        part.unlink(missing_ok=True)
    for text, count in left_out.most_common():
        click.echo(f"{amount(count, 'trace')} left out: {text}", err=True)
    why = "can't be stored as tasks: an unpaired surrogate, NaN, or an integer beyond 64 bits."
    if not read and left_out:
        raise ConfigError(f"there is no task to write: {amount(left_out.total(), 'trace')} may not be used.")
    if not written and refused:
        raise ConfigError(f"there is no task to write: all {refused} traces with a model call {why}")
    if not written:
        raise ConfigError("no trace here has the input of a model call, so there is no task to write.")
    click.echo(f"{amount(written, 'task')} in {path}; {read - written - refused} traces have no model call.", err=True)
    if refused:
        click.echo(f"{refused} {why}", err=True)


def _print_trees(traces: Iterable[Trace], attempts: dict[str, AttemptRecord], *, whole: bool) -> None:
    from rich.tree import Tree

    for trace in traces:
        tree = Tree(_title(trace, attempts.get(trace.attempt_id or ""), whole=whole))
        _grow(tree, trace, _by_node(trace), whole=whole)
        if trace.attempt_id is not None:  # otherwise there was no gateway that could have recorded its calls
            for reason, count in Counter(lost.reason for lost in trace.unjoined).items():
                tree.add(f"[yellow]{amount(count, 'call')}: {reason}[/yellow]")
        screen().print(tree)


def _by_node(trace: Trace) -> dict[str | None, list[Reward]]:
    """Group rewards by their span; None: those of the whole attempt, or of a span that is missing."""
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


def _grow(tree: Tree, trace: Trace, rewards: dict[str | None, list[Reward]], *, whole: bool) -> None:
    """Add every node below its parent. Uses a stack instead of recursion, because agents nest deeply."""
    stack: list[tuple[Tree, Node]] = [(tree, node) for node in reversed(trace.roots)]
    while stack:
        parent, node = stack.pop()
        line = _line(node)
        for reward in rewards.get(node.span.span_id, []):
            line.append(f"  {reward.source} {reward.value:+.3g}", style="cyan")
        branch = parent.add(line)
        for said in _question_and_answer(node) if node.span.operation == CHAT else ():
            branch.add(_words(said, whole=whole))
        stack += [(branch, child) for child in reversed(node.children)]


def _question_and_answer(node: Node) -> list[str]:
    """Return a model's last input and its answer, each with its sign in front."""
    from lightning_trainer.run.live_tasks import answer_text, last_message

    question, reply = last_message(node), answer_text(node)
    return [text for text in (f"< {question}" if question else "", f"> {reply}" if reply else "") if text]


def _words(text: str, *, whole: bool) -> Text:
    from rich.text import Text

    shown = printable(text if whole else " ".join(text.split()), lines=whole)
    return Text(shown if whole or len(shown) <= SHORT else f"{shown[:SHORT]}...", style="dim")


def _title(trace: Trace, attempt: AttemptRecord | None, *, whole: bool) -> Text:
    from rich.text import Text

    title = Text(f"attempt {trace.attempt_id}" if trace.attempt_id else ", ".join(_ids_of(trace)), style="bold")
    title.append(f" of rollout {trace.rollout_id}" if trace.attempt_id else "  outside a runner")
    if attempt is not None:
        title.append(f"  {attempt.status}", style="green" if attempt.status == "succeeded" else "red")
    for reward in _by_node(trace).get(None, []):
        source = "" if reward.source in GIVEN else f" ({reward.source})"
        title.append(f"  {reward.agent or 'reward'} {reward.value:g}{source}", style="cyan")
    if attempt is not None and attempt.error:
        title.append(f"\n{attempt.error if whole else attempt.error.splitlines()[-1][:SHORT]}", style="red")
    title.plain = printable(title.plain, lines=True)
    return title


def _ids_of(trace: Trace) -> list[str]:
    """Return the ids of what was recorded outside a runner, each with the name of the option that takes it."""
    calls = [node.call for node in trace if node.call is not None and node.call.trace_id is None]
    traces = {node.span.trace_id for node in trace if node.call not in calls}
    return [f"trace {name}" for name in sorted(traces)] + [f"call {call.call_id}" for call in calls]


def _line(node: Node) -> Text:
    from rich.text import Text

    span = node.span
    name = span.name.removeprefix(f"{span.operation} ")  # OpenTelemetry's span names begin with the operation
    line = Text(f"{span.operation} ", style="dim").append(name, style="bold")
    if span.agent and span.agent != name:
        line.append(f"  {span.agent}", style="magenta")
    line.append(f"  {(span.end_ns - span.start_ns) / 1e6:.0f} ms", style="dim")
    if span.operation == CHAT:
        line.append(_tokens(node), style="cyan")
    if span.operation == EXECUTE_TOOL:
        given, got = span.attributes.get(TOOL_ARGUMENTS, ""), span.attributes.get(TOOL_RESULT, "")
        line.append(f"  {str(given)[:SHORT]} -> {str(got)[:SHORT]}".rstrip())
    if node.error is not None:
        line.append(f"  error{f': {node.error.splitlines()[0][:SHORT]}' if node.error else ''}", style="red")
    line.plain = printable(line.plain)
    return line


def _tokens(node: Node) -> str:
    answer = node.answer
    if answer.prompt_token_ids is None or not answer.choices:
        return "  no tokens recorded"
    drawn = " + ".join(str(len(choice.token_ids or ())) for choice in answer.choices)
    version = "" if node.policy_version is None else f", weights {node.policy_version}"
    return f"  {len(answer.prompt_token_ids)} -> {drawn} tokens{version}"
