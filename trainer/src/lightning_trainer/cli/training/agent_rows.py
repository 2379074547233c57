"""The output of `lightning-rl agents`: one row per agent, and why it would be trained or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import click

from lightning_spans.adapter.nodes import MissingHalf
from lightning_spans.schema.spans import CHAT, REROUTED
from lightning_trainer.flags.common import print_json, screen
from lightning_trainer.reasons.amounts import amount
from lightning_trainer.report.terminal import decimal, printable, tokens

if TYPE_CHECKING:
    from lightning_spans.adapter.nodes import Node
    from lightning_spans.adapter.trace import Joins, Trace
    from lightning_trainer.report.agents import AgentRow

_ONLY_CALLS: Final = (
    "Only model calls were recorded: each is a trace of its own, and tools are not visible. If a framework makes the"
    " calls, attach its plugin, or write one (docs/how-to/adding-a-framework.md)."
)


def print_rows(rows: Sequence[AgentRow], *, as_json: bool) -> None:
    """Print the agents as a table, or as one JSON object each."""
    if as_json:
        for row in rows:
            print_json(row.to_json())
    else:
        _print_table(rows)


def print_joins(traces: Sequence[Trace], *, as_json: bool) -> None:
    """Print how rewards and calls were joined.

    Calls that an agent's own endpoint answered are counted separately: the gateway has no record to join them with.
    """
    from lightning_spans.adapter.trace import count_joins
    from lightning_trainer.report.agents import misspelt_rewards

    if (warning := misspelt_rewards(traces)) is not None:
        click.echo(printable(warning), err=True)
    joins = count_joins(traces)
    outside = Counter(
        node.span.agent or "(no name)" for trace in traces for node in trace.chats if _is_outside_gateway(node)
    )
    at_gateway = sum(node.call is not None for trace in traces for node in trace.chats)
    if joins.joined or 0 < at_gateway < joins.calls:
        for line in _without(joins, outside.total()).lines():
            click.echo(line, err=as_json)
        for agent, count in sorted(outside.items()):
            calls = f"{amount(count, 'call')} of {agent}"
            click.echo(printable(f"{calls} went to its own endpoint, where no tokens are recorded"), err=as_json)
    else:
        where = (
            "by the gateway alone: the program is not attached."
            if at_gateway
            else "at their own endpoint: tokens are recorded while training."
        )
        click.echo(f"{amount(joins.calls, 'model call')} recorded, {where}", err=True)
    if joins.calls and all(node.span.operation == CHAT for trace in traces for node in trace):
        click.echo(_ONLY_CALLS, err=True)


def _is_outside_gateway(node: Node) -> bool:
    """Whether the agent's own endpoint answered the call. Rerouted and failed ones should have a record."""
    return node.call is None and not node.span.attributes.get(REROUTED) and node.span.status != "error"


def _without(joins: Joins, outside: int) -> Joins:
    """Return the counts without so many calls that the gateway was not to record."""
    unjoined = Counter(joins.unjoined) - Counter({MissingHalf.NOT_SEEN: outside})
    return replace(joins, calls=joins.calls - outside, unjoined=dict(unjoined))


def _print_table(rows: Sequence[AgentRow]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("agent", "trained", "calls", "tokens in", "out", "tools", "errors", "reward", "n")
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            Text(printable(row.agent)) if row.agent else Text("(no name)", style="dim"),
            Text("yes", style="green") if row.trained else Text("no", style="red"),
            f"{row.calls}",
            tokens(row.prompt_tokens),
            tokens(row.response_tokens),
            f"{row.tool_calls}",
            f"{row.failed_calls + row.tool_errors}",
            "-" if row.reward is None else decimal(row.reward),
            f"{row.rewarded}",
        )
    screen().print(table)
    for row in rows:
        for title, counts in (("asked for tools", row.tools_asked), ("left out of its requests", row.left_out)):
            if counts:
                told = ", ".join(f"{name} {number}" for name, number in counts.items())
                click.echo(printable(f"{row.agent or '(no name)'} {title}: {told}"))
    for row in rows:
        verdict = "would be trained" if row.trained else "would not be trained"
        told = f"{row.why}{_same(row)}{_errors(row)}{_sources(row)}{_places(row)}"
        click.echo(printable(f"{row.agent or '(no name)'} {verdict}: {told}"))


def _places(row: AgentRow) -> str:
    """Return the agent's paths if there are several, because each can be selected separately."""
    return (
        f"; its paths are {', '.join(row.paths)}: name one of these to select only that one"
        if len(row.paths) > 1
        else ""
    )


def _sources(row: AgentRow) -> str:
    """Return the sources of its reward if there are several."""
    parts = [f"{value:+.3f} {source}" for source, value in row.reward_sources.items()]
    return f"; reward {' '.join(parts)}" if len(parts) > 1 else ""


def _same(row: AgentRow) -> str:
    if not row.constant or row.reward is None:
        return ""
    return f"; it earned {decimal(row.reward)} in all {row.rewarded} rollouts: no signal so far"


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
