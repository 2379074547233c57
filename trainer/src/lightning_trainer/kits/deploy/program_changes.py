"""Describes program changes in the recorded calls of a deployment, and rejects a promotion if there are any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning_spans.schema.agents import name_of, selects
from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import CHAT, INVOKE_AGENT, SHADOW, Span
from lightning_spans.store import Store
from lightning_spans.store.deployments import Deployment
from lightning_spans.store.protocol import PAGE, Where, each
from lightning_trainer.kits.deploy.program_watch import WINDOW, ProgramWatch, evaluated_program, named_row
from lightning_trainer.kits.deploy.routing import MARK, talk_of
from lightning_trainer.kits.deploy.transitions import is_tried
from lightning_trainer.session.fingerprint import ProgramFingerprint

_MOST: Final = 5000  # calls to read for a promoted policy
_TRACES: Final = 500  # newest traces that are searched for agents
_AT_ONCE: Final = 100


@dataclass(frozen=True, slots=True)
class _ProgramCall:
    """The compared parts of a call. Its request is kept only while its trace may turn out to be the program's."""

    path: str
    conversation: str
    trace_id: str | None
    request: Mapping[str, Any]


def describe_program(store: Store, history: Sequence[Deployment]) -> dict[str, Any] | None:
    """Return how the deployed program differs from the evaluated one, as JSON; None if no evaluation is known."""
    evaluated = evaluated_program(history)
    if evaluated is None:
        return None
    watch, talks, traces = ProgramWatch(evaluated), set[str](), dict[str, None]()
    others: list[_ProgramCall] = []
    for call, is_own in _read_calls(store, history):
        if is_own:
            talks.add(call.conversation)
            if call.trace_id is not None:
                traces[call.trace_id] = None
            watch.add(call.path, call.conversation, call.request)
        elif call.trace_id is not None:
            others.append(call)
    for call in others:
        if call.trace_id in traces:
            watch.add(call.path, str(call.trace_id), call.request)
    missing = _missing_agents(store, evaluated, list(traces)[:_TRACES])
    return {"conversations": len(talks), "needed": WINDOW, "changes": [*watch.changes, *missing]}


def describe_changes(found: Mapping[str, Any] | None) -> str | None:
    """Return a message about the changes that `describe_program` found; None if there are none."""
    if found is None or not found["changes"]:
        return None
    return (
        f"the program has changed since the candidate was evaluated. {'; '.join(found['changes'])}. Evaluate it again,"
        " and name the candidate with the new --evaluation"
    )


def _read_calls(store: Store, history: Sequence[Deployment]) -> Iterator[tuple[_ProgramCall, bool]]:
    """Yield the calls since the policy was named or promoted, newest first, and whether the agent itself made them."""
    current, named = history[-1], named_row(history)
    since = named if is_tried(current) and named is not None else current
    older = 0
    for number, call in enumerate(each(store, Call, newest_first=True)):
        older = older + 1 if call.end_ns < since.at_ns else 0
        if older > PAGE or (not is_tried(current) and number >= _MOST):
            return
        if call.agent is None or call.origin == SHADOW or call.end_ns < since.at_ns:
            continue
        mark = call.sampling.get(MARK)
        is_own = isinstance(mark, int) and mark >= since.number and selects((current.agent,), call.agent)
        yield _ProgramCall(call.agent, talk_of(call), call.trace_id, call.request), is_own


def _missing_agents(store: Store, evaluated: ProgramFingerprint, traces: Sequence[str]) -> list[str]:
    """Return messages about agents that called a model in every evaluated rollout but in no trace of some window.

    Only the spans of an attached program show all agents; traces without spans are ignored.
    """
    heard: defaultdict[str, set[str]] = defaultdict(set)
    roots: defaultdict[str, list[Span]] = defaultdict(list)
    for first in range(0, len(traces), _AT_ONCE):
        for span in each(store, Span, Where(trace_ids=traces[first : first + _AT_ONCE])):
            if span.operation == CHAT and span.agent is not None:
                heard[span.trace_id].add(name_of(span.agent))
            if span.parent_id is None:
                roots[span.trace_id].append(span)
    missing = []
    for path in sorted(evaluated.always, key=name_of):
        seen = [heard[trace] for trace in traces if trace in heard and _shows(roots[trace], path)]
        windows = [set().union(*seen[at : at + WINDOW]) for at in range(0, len(seen) - WINDOW + 1, WINDOW)]
        if any(name_of(path) not in window for window in windows):
            missing.append(f"agent {path} worked in every evaluated rollout, and not in {WINDOW} live traces in a row")
    return missing


def _shows(roots: Sequence[Span], path: str) -> bool:
    """Whether a trace with these roots would contain an agent's calls.

    In plain code each agent may begin a trace of its own, which contains nothing of the agents before and after it.
    """
    if len(roots) != 1 or roots[0].operation != INVOKE_AGENT or roots[0].agent is None:
        return True
    return selects((f"{roots[0].agent}/**",), path)
