"""The events of an attempt: its spans in lanes and as a transcript, and several attempts side by side."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from lightning_spans.adapter.nodes import Node
from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import EXECUTE_TOOL, REQUEST, RESPONSE, TOOL_ARGUMENTS, TOOL_RESULT, Json
from lightning_trainer.kits.judging.spans import ASKED, EVALUATE, EXPLANATION, SCORE
from lightning_trainer.kits.view.answers.groups import Facts
from lightning_trainer.kits.view.answers.rollouts import Event, RewardRow
from lightning_trainer.kits.view.names import names_in
from lightning_trainer.kits.view.reading.texts import LIMIT, conversation, messages, plain, view_message
from lightning_trainer.report.step_metrics import tool_name
from lightning_trainer.rl.batch.calls import CountedCall
from lightning_trainer.rl.usage import tokens_of

MOST_EVENTS: Final = 5000  # spans of a trace on one page
_LARGEST: Final = 4 << 20  # characters of a transcript; after these, messages are cut shorter
_SHORT: Final = 400


def events_of(
    trace: Trace, judged: Iterable[CountedCall] = (), chosen: Sequence[str] | None = None, limit: int = LIMIT
) -> list[Event]:
    """Return the spans of a trace in the order of their start, with what is new in each prompt.

    Args:
        trace: an attempt.
        judged: calls with credit and advantage, of this attempt and others.
        chosen: names or globs of the agents that the run trains.
        limit: characters of a message.
    """
    by_span: dict[str, CountedCall] = {}
    for call in judged:
        if call.transition.attempt_id == trace.attempt_id:
            by_span.setdefault(call.transition.span_id, call)
    turns = {node: turn for turn, node in enumerate(trace.chats)}
    rewards, names = rewards_by_node(trace), names_in(trace, chosen)
    first = min((node.span.start_ns for node in trace), default=0)
    depths: dict[Node, int] = {}
    earlier = _PromptTree()
    found: list[Event] = []
    size = 0
    for node in trace.nodes[:MOST_EVENTS]:
        depths[node] = 0 if node.parent is None else depths.get(node.parent, 0) + 1
        event = replace(_event(node, depths[node], first, rewards), agent=names[node])
        shown = limit if size < _LARGEST else _SHORT
        if node in turns:
            event = replace(event, **_of_call(node, turns[node], earlier, shown))
        elif node.span.operation == EXECUTE_TOOL:
            event = replace(
                event,
                said=[plain("arguments", node.span.attributes.get(TOOL_ARGUMENTS), shown)],
                answer=[plain("result", node.span.attributes.get(TOOL_RESULT), shown)],
            )
        elif node.span.operation == EVALUATE:
            event = replace(event, **_of_judge(node, shown))
        size += sum(len(each.text) for each in (*event.said, *event.answer))
        found.append(_with_credit(event, by_span.get(event.span_id)))
    return found


def _event(node: Node, depth: int, first_ns: int, rewards: Mapping[str | None, Sequence[Reward]]) -> Event:
    span = node.span
    values: dict[str, Json] = {
        "span_id": span.span_id,
        "parent_id": node.parent.span.span_id if node.parent is not None else None,
        "operation": span.operation,
        "name": tool_name(node) if span.operation == EXECUTE_TOOL else span.name,
        "start_ms": (span.start_ns - first_ns) / 1e6,
        "ms": (span.end_ns - span.start_ns) / 1e6,
        "depth": depth,
        "agent": None,
        "error": node.error[-_SHORT * 5 :] if node.error is not None else None,
        "rewards": [reward_row(reward) for reward in rewards.get(span.span_id, ())],
    }
    return Event(**values)


def _of_call(node: Node, turn: int, earlier: _PromptTree, limit: int) -> dict[str, Json]:
    asked, answer = messages(node), node.answer
    heard = [_mark(message) for message in asked]
    known = earlier.known(heard)
    prompt, response = tokens_of(node)
    answers = [view_message(choice.message, limit) for choice in answer.choices]
    earlier.add([*heard, *([_mark(answer.choices[0].message)] if answer.choices else [])])
    return {
        "turn": turn,
        "known": known,
        "said": conversation(asked, limit)[known:],
        "answer": answers,
        "prompt_tokens": prompt or None,
        "response_tokens": response or None,
        "version": node.policy_version,
        "model": answer.model,
        "finish": ", ".join(choice.finish_reason or "cut" for choice in answer.choices) or None,
    }


def _of_judge(node: Node, limit: int) -> dict[str, Json]:
    """Return a judge's request and answer for a group, or its verdict on this attempt with the request's traces."""
    values = node.span.attributes
    if REQUEST in values:
        return {
            "said": conversation(messages(node), limit),
            "answer": [plain("assistant", values.get(RESPONSE), limit)],
        }
    verdict = f"score {values.get(SCORE)}\n{values.get(EXPLANATION) or ''}".strip()
    asked = values.get(ASKED)
    return {
        "answer": [plain("verdict", verdict, limit)],
        "asked": [each for each in asked if isinstance(each, str)] if isinstance(asked, list) else [],
    }


class _PromptTree:
    """The prompts of earlier calls, each with its answer: a tree of messages, because most share a beginning."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, str], int] = {}  # by node of the tree and message

    def add(self, marks: Iterable[str]) -> None:
        """Add the messages of a call."""
        at = 0
        for mark in marks:
            at = self._next.setdefault((at, mark), len(self._next) + 1)

    def known(self, marks: Sequence[str]) -> int:
        """Return the number of a prompt's first messages that one earlier call had, including its answer."""
        at = 0
        for count, mark in enumerate(marks):
            if (at, mark) not in self._next:
                return count
            at = self._next[at, mark]
        return len(marks)


def _mark(message: Json) -> str:
    """Return the identity of a message: role and content, not how its client encoded it."""
    if not isinstance(message, Mapping):
        return json.dumps(message, sort_keys=True, default=str)
    read = view_message(message, 1 << 30)
    return json.dumps([read.role, read.text, [(use.name, use.arguments) for use in read.calls]])


def _with_credit(event: Event, call: CountedCall | None) -> Event:
    if call is None:
        return event
    return replace(
        event, credit=number_or_none(call.credit), advantage=number_or_none(call.advantage), left_out=call.left_out
    )


def number_or_none(value: float) -> float | None:
    """Return a number, or None for NaN."""
    return None if math.isnan(value) else value


def rewards_by_node(trace: Trace) -> dict[str | None, list[Reward]]:
    """Return rewards by the span they belong to; None for those of the attempt, or of a missing span."""
    spans = {span_id: node.span.span_id for node in trace for span_id in (node.span.span_id, *node.merged)}
    found: defaultdict[str | None, list[Reward]] = defaultdict(list)
    for reward in trace.rewards:
        found[spans.get(reward.span_id or "")].append(reward)
    return found


def reward_row(reward: Reward) -> RewardRow:
    """Return a reward as pages show it."""
    return RewardRow(value=reward.value, source=reward.source, agent=reward.agent, span_id=reward.span_id)


def facts_of(trace: Trace, *, text: str = "", chosen: Sequence[str] | None = None) -> Facts:
    """Return the counts of a trace, and whether it contains a text."""
    counted = [tokens_of(node) for node in trace.chats]
    tools, names = Counter(tool_name(node) for node in trace.tools), names_in(trace, chosen)
    return Facts(
        rollout_id=trace.rollout_id or "",
        attempt_id=trace.attempt_id or "",
        spans=len(trace),
        calls=len(trace.chats),
        tools=dict(tools),
        tool_errors=sum(node.span.status == "error" for node in trace.tools),
        call_errors=sum(node.error is not None for node in trace.chats),
        agents=dict(Counter(name for node in trace.chats if (name := names[node]) is not None)),
        prompt_tokens=sum(prompt for prompt, _ in counted),
        response_tokens=sum(response for _, response in counted),
        found=bool(text) and _holds(trace, text.casefold()),
    )


def _holds(trace: Trace, text: str) -> bool:
    def spoken(node: Node) -> str:
        parts = [str(node.span.attributes.get(name) or "") for name in (TOOL_ARGUMENTS, TOOL_RESULT)]
        if node.is_chat:
            read = [
                view_message(each, 1 << 30) for each in (*messages(node), *(c.message for c in node.answer.choices))
            ]
            parts += [part for each in read for part in (each.text, each.reasoning, *(u.arguments for u in each.calls))]
        return "\n".join([*parts, node.span.name, node.error or ""])

    return any(text in spoken(node).casefold() for node in trace)


def alike(columns: Sequence[Sequence[Event]]) -> int:
    """Return the number of first calls that several attempts share: the same agent, prompt and answer."""
    calls = [[_signature(event) for event in events if event.turn is not None] for events in columns]
    count = 0
    for each in zip(*calls, strict=False):
        if len(set(each)) > 1:
            break
        count += 1
    return count if len(columns) > 1 else 0


def _signature(event: Event) -> str:
    return json.dumps([event.agent, event.known, [str(s) for s in event.said], [str(s) for s in event.answer]])
