"""Feedback on a model call, from spans: the errors of its tools, a later failure, the best other answer."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from lightning_spans.chat.body import tool_calls
from lightning_trainer.kits.judging.transcript import shorten
from lightning_trainer.rl.rewards.callers import callers
from lightning_trainer.rl.scores import reward_of_failures, total

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Node, Trace
    from lightning_spans.schema.transitions import Transition
    from lightning_trainer.rl.batch.calls import CountedCall
    from lightning_trainer.rl.rollouts import Failed, Outcome

CallKey: TypeAlias = tuple[str, str, int]  # attempt, span, choice


def key_of(call: Transition) -> CallKey:
    """Return the key that identifies a call within a batch."""
    return call.attempt_id, call.span_id, call.choice


def feedback(
    calls: Sequence[CountedCall],
    traces: Iterable[Trace],
    earned: Mapping[str, float],
    *,
    told: Sequence[str],
    most: int,
) -> dict[CallKey, str]:
    """Return the feedback on calls; a call without feedback is left out.

    Args:
        calls: every call of the attempts that count.
        traces: of these attempts.
        earned: total reward of each attempt, by its id.
        told: kinds of feedback, of `SelfOptions.told`.
        most: maximum characters of one tool's error, or of one answer.
    """
    by_attempt = {trace.attempt_id: _Errors(trace) for trace in traces}
    better = _better(calls, earned) if "best" in told else {}
    found: dict[CallKey, str] = {}
    for call in (each.transition for each in calls):
        errors = by_attempt.get(call.attempt_id)
        failed = errors.own(call) if errors is not None and "errors" in told else []
        if not failed and errors is not None and "later" in told:
            failed = errors.later(call)
        parts = [f"The tool {node.span.name} failed: {shorten(str(node.error), most)}" for node in failed]
        if key_of(call) in better:
            parts.append(f"An answer that did better:\n{shorten(better[key_of(call)], most)}")
        if parts:
            found[key_of(call)] = "\n\n".join(parts)
    return found


def earnings(outcomes: Sequence[Outcome], failed: Failed) -> dict[str, float]:
    """Return the total reward of each attempt that counts, without the rewards of automatic rules.

    Args:
        outcomes: of a step.
        failed: the reward of a rollout that failed because of the policy.
    """
    crashed, found = reward_of_failures(outcomes, failed), {}
    for outcome in outcomes:
        attempt = outcome.counts(failed)
        if attempt is not None:
            found[attempt.attempt_id] = crashed if attempt is outcome.crash else total(outcome.rewards)
    return found


class _Errors:
    """The failed tools of an attempt, and their callers."""

    def __init__(self, trace: Trace) -> None:
        self._failed = [node for node in trace.tools if node.error is not None]
        self._callers = callers(trace) if self._failed else {}

    def own(self, call: Transition) -> list[Node]:
        """Return the failed tools that a call asked for, in the order of their start."""
        return [node for node in self._failed if self._is_own(node, call)]

    def later(self, call: Transition) -> list[Node]:
        """Return the first other tool that failed after a call was answered, as a list."""
        end = call.ended_ns
        after = (n for n in self._failed if end is not None and n.span.start_ns >= end and not self._is_own(n, call))
        return [node for node in [next(after, None)] if node is not None]

    def _is_own(self, node: Node, call: Transition) -> bool:
        caller = self._callers.get(node)
        return caller is not None and caller.node.span.span_id == call.span_id and caller.choice in (None, call.choice)


def _better(calls: Sequence[CountedCall], earned: Mapping[str, float]) -> dict[CallKey, str]:
    """Return for each call the matching answer of the best rollout of its group, if that one earned more.

    Calls match by their number among their agent's calls. Of rollouts with the same reward, the first counts.
    """
    answers: defaultdict[str, dict[tuple[str | None, int, int], Transition]] = defaultdict(dict)
    best: dict[str, str] = {}
    for call in sorted(calls, key=lambda each: (each.transition.turn, each.transition.choice)):
        own, its = answers[call.transition.attempt_id], call.transition
        number = sum(path == its.path and choice == its.choice for path, _, choice in own)
        own[its.path, number, its.choice] = its
    for call in calls:
        attempt, leader = call.transition.attempt_id, best.get(call.group_id)
        if attempt in earned and (leader is None or earned[attempt] > earned[leader]):
            best[call.group_id] = attempt
    found: dict[CallKey, str] = {}
    for group, attempt in ((call.group_id, call.transition.attempt_id) for call in calls):
        leader = best.get(group)
        if leader is None or earned.get(attempt, earned[leader]) >= earned[leader]:
            continue
        for place, its in answers[attempt].items():
            text = answer_text(answers[leader][place]) if place in answers[leader] else ""
            found |= {key_of(its): text} if text else {}
    return found


def answer_text(call: Transition) -> str:
    """Return an answer as text: its content and its tool calls, without its reasoning."""
    content = call.message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}] if isinstance(content, str) else []
    for item in call.message.get("output") or []:
        parts = [*parts, *(item.get("content") or [])] if isinstance(item, Mapping) else parts
    texts = [str(part["text"]) for part in parts if isinstance(part, Mapping) and part.get("text")]
    asked = [f"{each.name}({_arguments(each.arguments)})" for each in tool_calls(call.message)]
    return "\n".join([*texts, *asked])


def _arguments(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
