"""Tools and model calls of a step, counted trace by trace: errors, latency, tokens."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from lightning_spans.adapter.nodes import Node
from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.spans import TOOL_ARGUMENTS
from lightning_trainer.kits.judging.spans import EVALUATE
from lightning_trainer.kits.view.answers.calls import CallLink
from lightning_trainer.kits.view.answers.store import Percentiles, ToolRow, ToolsPage, UsageRow
from lightning_trainer.kits.view.names import names_in
from lightning_trainer.kits.view.reading.texts import legible
from lightning_trainer.report.step_metrics import tool_name
from lightning_trainer.rl.usage import tokens_of

_ERROR: Final = 300  # characters of an error in a table
_TEXT: Final = 200


@dataclass(frozen=True, slots=True)
class _Use:
    """A call of a tool or a model, or a whole rollout; `error` is None if nothing failed."""

    ms: float
    error: str | None
    link: CallLink | None = None
    prompt_tokens: int = 0
    response_tokens: int = 0


class UsageCounter:
    """Counts calls of tools and models, trace by trace.

    Args:
        chosen: names or globs of the agents that the run trains.
    """

    def __init__(self, chosen: Sequence[str] | None = None) -> None:
        self._chosen = chosen
        self._tools: defaultdict[tuple[str, str | None], list[_Use]] = defaultdict(list)
        self._calls: defaultdict[str | None, list[_Use]] = defaultdict(list)
        self._rollouts: list[_Use] = []
        self._repeated: Counter[tuple[str, str | None]] = Counter()

    def add(self, trace: Trace) -> None:
        """Count the tool calls and model calls of a trace."""
        seen: Counter[tuple[str, str | None, str]] = Counter()
        names = names_in(trace, self._chosen)
        for node in trace.tools:
            key = (tool_name(node), names[node])
            self._tools[key].append(_tool_use(trace, node))
            seen[*key, str(node.span.attributes.get(TOOL_ARGUMENTS))] += 1
        for (tool, agent, _), times in seen.items():
            self._repeated[tool, agent] += times - 1
        calls = [(names[node], _call_use(trace, node, turn)) for turn, node in enumerate(trace.chats)]
        for agent, use in calls:
            self._calls[agent].append(use)
        self._rollouts.append(_rollout_use(trace, [use for _, use in calls]))

    def page(self) -> ToolsPage:
        """Return a row per tool and agent, the most errors first, and one for the model calls of each agent."""
        rows = [self._tool_row(key, uses) for key, uses in self._tools.items()]
        usage = [_usage_row(agent, uses) for agent, uses in sorted(self._calls.items(), key=lambda its: its[0] or "")]
        whole = [replace(_usage_row(None, self._rollouts), slowest=None)] if usage else []
        return ToolsPage(
            rollouts=len(self._rollouts),
            tools=sorted(rows, key=lambda row: (-row.errors, -row.calls)),
            usage=[*whole, *usage],
        )

    def _tool_row(self, key: tuple[str, str | None], uses: Sequence[_Use]) -> ToolRow:
        failed = [use for use in uses if use.error is not None]
        return ToolRow(
            tool=key[0],
            agent=key[1],
            calls=len(uses),
            errors=len(failed),
            repeated=self._repeated[key],
            ms=_percentiles([use.ms for use in uses]),
            error=failed[0].error[:_ERROR] if failed and failed[0].error is not None else None,
            slowest=_slowest(uses).link,
            failed=failed[0].link if failed else None,
        )


def _usage_row(agent: str | None, uses: Sequence[_Use]) -> UsageRow:
    return UsageRow(
        agent=agent,
        number=len(uses),
        errors=sum(use.error is not None for use in uses),
        ms=_percentiles([use.ms for use in uses]),
        prompt_tokens=_percentiles([use.prompt_tokens for use in uses]),
        response_tokens=_percentiles([use.response_tokens for use in uses]),
        slowest=_slowest(uses).link,
    )


def _percentiles(values: Sequence[float]) -> Percentiles:
    p50, p90, p99 = (float(each) for each in np.percentile(values, (50, 90, 99)))
    return Percentiles(p50=p50, p90=p90, p99=p99, most=max(values))


def _slowest(uses: Sequence[_Use]) -> _Use:
    return max(uses, key=lambda use: use.ms)


def _took_ms(node: Node) -> float:
    return (node.span.end_ns - node.span.start_ns) / 1e6


def _tool_use(trace: Trace, node: Node) -> _Use:
    text = legible(str(node.span.attributes.get(TOOL_ARGUMENTS) or "")[:_TEXT])
    error = (node.error or "") if node.span.status == "error" else None
    return _Use(_took_ms(node), error, _link(trace, node, 0, text))


def _call_use(trace: Trace, node: Node, turn: int) -> _Use:
    return _Use(_took_ms(node), node.error, _link(trace, node, turn, ""), *tokens_of(node))


def _rollout_use(trace: Trace, calls: Sequence[_Use]) -> _Use:
    """Return the sums of a rollout's calls. A judge's later verdict on it is not part of its time."""
    spans = [node.span for node in trace if node.span.operation != EVALUATE]
    ends, starts = [span.end_ns for span in spans], [span.start_ns for span in spans]
    return _Use(
        (max(ends, default=0) - min(starts, default=0)) / 1e6,
        next((use.error for use in calls if use.error is not None), None),
        prompt_tokens=sum(use.prompt_tokens for use in calls),
        response_tokens=sum(use.response_tokens for use in calls),
    )


def _link(trace: Trace, node: Node, turn: int, text: str) -> CallLink:
    return CallLink(
        rollout_id=trace.rollout_id or "",
        attempt_id=trace.attempt_id or "",
        span_id=node.span.span_id,
        agent=node.span.agent,
        turn=turn,
        text=text,
    )
