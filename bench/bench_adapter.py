"""From the records of an attempt to transitions: the tree, the join of spans and calls, the adapter."""

from __future__ import annotations

import random
from collections.abc import Callable

from figures import Figure, choose_size, measure_in_rounds
from records import agent_span, call_of, chat_span

from lightning_spans.adapter.adapt import adapt
from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import Span

SIZES = choose_size((10, 100, 1_000, 10_000), (10, 100))
OTHERS = {  # agent-lightning 0.3, µs a call
    "nested_spans": {10: "142", 100: "215", 1_000: "1,659"},
    "flat": {10: "161", 100: "404", 1_000: "5,023"},
}


def nested_spans(size: int) -> list[Span]:
    """Every agent is called by the one before, as deep as there are calls."""
    spans: list[Span] = []
    parent_id = None
    for number in range(size):
        agent = agent_span(number, parent_id=parent_id)
        spans += [agent, chat_span(number, parent_id=agent.span_id)]
        parent_id = agent.span_id
    return spans


def flat(size: int) -> list[Span]:
    """One agent makes all calls."""
    root = agent_span(0)
    return [root, *(chat_span(number, parent_id=root.span_id) for number in range(size))]


def measure() -> list[Figure]:
    return [of_size(shape, size) for shape in (nested_spans, flat) for size in SIZES]


def of_size(shape: Callable[[int], list[Span]], size: int) -> Figure:
    spans = shape(size)
    calls = [call_of(span) for span in spans if span.operation == "chat"]
    random.Random(0).shuffle(spans)
    repeats = max(1, 2_000 // size)

    def case() -> None:
        for _ in range(repeats):
            run(spans, calls)

    seconds = measure_in_rounds({"adapt": case}, rounds=7)["adapt"] / repeats
    others = OTHERS[shape.__name__].get(size)
    return Figure(
        what=f"{shape.__name__}, {size:,} calls",
        value=len(spans) / seconds,
        unit="spans/s",
        goal=50_000,
        more_is_better=True,
        others=f"{others} µs a call (agent-lightning 0.3)" if others else "",
        note=f"{1e6 * seconds / size:.1f} µs CPU a call, joined to its {size:,} recorded calls",
    )


def run(spans: list[Span], calls: list[Call]) -> None:
    transitions = adapt(Trace.build(spans, calls))
    if len(transitions) != len(calls) or any(transition.tokens is None for transition in transitions):
        raise RuntimeError("calls were lost, or not joined to their tokens")
