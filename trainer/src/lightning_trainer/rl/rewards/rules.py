"""The rules. Each judges one attempt and returns its findings at spans, as numbers from -1 to 1.

The findings of a rule about one agent in one attempt are averaged, so that an agent gets no more for doing more, and
multiplied by the configured weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from lightning_spans.adapter.trace import Node, Trace
from lightning_spans.chat.body import ToolCall, tool_calls, tool_schemas
from lightning_spans.errors import ConfigError
from lightning_spans.schema.spans import TOOL_RESULT, Json
from lightning_trainer.rl.rewards.answered import JudgedCall, judged_calls
from lightning_trainer.rl.rewards.callers import called_tools, request_of
from lightning_trainer.rl.rewards.checking import Checks
from lightning_trainer.rl.usage import tokens_of


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule's finding.

    Attributes:
        value: from -1, bad, to 1, good, before the rule's weight.
        node: the span that it is about, a model call or a tool; None for the whole attempt.
        choice: index of the answer that it is about, of a model call with several; None: all of them.
    """

    value: float
    node: Node | None = None
    choice: int | None = None


# (trace, options by name) -> findings
Rule: TypeAlias = Callable[..., Iterable[Finding]]


def tool_status(trace: Trace) -> list[Finding]:
    """1 for a tool that worked, -1 for one that failed."""
    return [Finding(-1.0 if node.error is not None else 1.0, node) for node in trace.tools]


def tool_arguments(trace: Trace) -> list[Finding]:
    """1 for a tool call whose arguments match the schema that the model was given, otherwise -1.

    Arguments that are not JSON, tools that were not offered, and invalid schemas do not match.
    """
    checks = Checks()
    return [
        _finding(1.0 if _fits(judged.node, call, checks) else -1.0, judged, choice)
        for judged in judged_calls(trace)
        for choice, call in called_tools(judged.node)
    ]


def repeated_calls(trace: Trace) -> Iterator[Finding]:
    """-1 for a tool call that its agent has already made in this attempt with the same arguments, otherwise 0.

    Several answers of one call, or to tries of one call, are independent: they do not repeat each other.
    """
    makers: dict[tuple[str | None, str], JudgedCall] = {}  # the first call that made each
    for judged in judged_calls(trace):
        of_node: set[tuple[str | None, str]] = set()
        for choice in judged.node.answer.choices:
            of_choice: set[tuple[str | None, str]] = set()
            for call in tool_calls(choice.message):
                key = (judged.place.path, call.signature)
                is_made = key in makers and not judged.repeats(makers[key])
                yield _finding(-1.0 if is_made or key in of_choice else 0.0, judged, choice.index)
                of_choice.add(key)
            of_node |= of_choice
        for key in of_node:
            makers.setdefault(key, judged)


def empty_results(trace: Trace) -> list[Finding]:
    """-1 for a tool that worked and returned nothing (empty text, null, or an empty list or object), otherwise 0."""
    return [Finding(-1.0 if _is_empty(node) else 0.0, node) for node in trace.tools]


def answer_format(
    trace: Trace, *, pattern: str | None = None, schema: Mapping[str, Json] | None = None
) -> list[Finding]:
    """1 for an agent whose last answer has the format, otherwise -1; several answers are judged separately.

    Args:
        trace: the attempt.
        pattern: a regular expression that must match in the text; ``(?s)^...$`` for the whole text.
        schema: a JSON schema that the text, parsed as JSON, must match; {} accepts any JSON.
    """
    if (pattern is None) == (schema is None):
        raise ConfigError("answer_format needs either a pattern or a schema.")
    if pattern is not None:
        _check_pattern(pattern)
    checks = Checks()

    def has_format(text: str) -> bool:
        return _reads_as(text, schema, checks) if pattern is None else checks.found(pattern, text)

    last = {judged.place.path: judged for judged in judged_calls(trace) if not judged.is_try}
    return [
        _finding(1.0 if has_format(text) else -1.0, judged, choice)
        for judged in last.values()
        for choice, text in _texts(judged.node)
    ]


def latency(trace: Trace, *, budget_s: float) -> list[Finding]:
    """How far an attempt exceeded its time, as a share of the budget: 0 within it, -1 at twice that or more.

    Args:
        trace: the attempt.
        budget_s: seconds from the start of its first span to the end of its last.
    """
    _check_budget(budget_s, "budget_s")
    if not trace.nodes:
        return []
    spans = [node.span for node in trace.nodes]
    seconds = (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) / 1e9
    return [Finding(_over(seconds, budget_s))]


def cost(trace: Trace, *, budget: float, prompt: float = 1.0, response: float = 1.0) -> list[Finding]:
    """How far an attempt exceeded its cost, as a share of the budget: 0 within it, -1 at twice that or more.

    Args:
        trace: the attempt.
        budget: in the currency of the prices; tokens with prices of 1.
        prompt: price of a token of a prompt.
        response: price of a token of an answer.
    """
    _check_budget(budget, "budget")
    if not trace.chats:
        return []
    counted = [tokens_of(judged.node) for judged in judged_calls(trace)]
    spent = prompt * sum(given for given, _ in counted) + response * sum(drawn for _, drawn in counted)
    return [Finding(_over(spent, budget))]


def overlong(trace: Trace, *, max_tokens: int, buffer: int) -> list[Finding]:
    """The soft overlong punishment (DAPO, arXiv 2503.14476, equation 13).

    0 up to max_tokens - buffer, falling to -1 at max_tokens, -1 beyond.

    Args:
        trace: the attempt.
        max_tokens: most tokens of an answer.
        buffer: tokens before that at which the punishment begins.
    """
    if not 0 < buffer <= max_tokens:
        raise ConfigError(f"overlong: buffer = {buffer} must be above 0 and at most max_tokens = {max_tokens}.")
    return [
        _finding(-min(max((tokens - (max_tokens - buffer)) / buffer, 0.0), 1.0), judged, choice)
        for judged in judged_calls(trace)
        for choice, tokens in _lengths(judged.node)
    ]


RULES: Final[Mapping[str, Rule]] = {
    "tool_status": tool_status,
    "tool_arguments": tool_arguments,
    "repeated_calls": repeated_calls,
    "empty_results": empty_results,
    "answer_format": answer_format,
    "latency": latency,
    "cost": cost,
    "overlong": overlong,
}


def text_of(node: Node) -> str:
    """Return the text of a model call's first answer; empty if it has none."""
    return _texts(node)[0][1]


def _texts(node: Node) -> list[tuple[int | None, str]]:
    """Return the index and the text of each answer of a model call."""
    return [(choice.index, _text(choice.message)) for choice in node.answer.choices] or [(None, "")]


def _lengths(node: Node) -> list[tuple[int | None, int]]:
    """Return the index and the number of tokens of each answer of a model call; the sum where only that is known."""
    known = [choice for choice in node.answer.choices if choice.token_ids is not None]
    return [(choice.index, len(choice.token_ids or ())) for choice in known] or [(None, tokens_of(node)[1])]


def _text(message: Mapping[str, Json]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    for item in message.get("output") or []:
        parts = [*parts, *(item.get("content") or [])] if isinstance(item, Mapping) else parts
    return "".join(str(part["text"]) for part in parts if isinstance(part, Mapping) and "text" in part)


def _check_pattern(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"answer_format: pattern {pattern!r} is not a regular expression: {error}.") from None


def _finding(value: float, judged: JudgedCall, choice: int | None) -> Finding:
    """Return a finding about an answer; one of another call of the same span is about the call that is reported."""
    return Finding(value, judged.place, choice if judged.node is judged.place else None)


def _fits(node: Node, call: ToolCall, checks: Checks) -> bool:
    schemas = tool_schemas(request_of(node))
    if call.name not in schemas:
        return False
    try:
        return checks.fits(call.parsed, schemas[call.name])
    except (ValueError, RecursionError):
        return False


def _reads_as(text: str, schema: Mapping[str, Json] | None, checks: Checks) -> bool:
    try:
        return checks.fits(json.loads(text), schema or {})
    except (ValueError, RecursionError):
        return False


def _is_empty(node: Node) -> bool:
    if node.error is not None:
        return False
    result = node.span.attributes.get(TOOL_RESULT)
    if result is None:
        return False  # the source does not record results, so they are unknown
    return str(result).strip().lower() in ("", "null", "none", "[]", "{}", '""', "''")


def _check_budget(budget: float, option: str) -> None:
    if not isinstance(budget, (int, float)) or not budget > 0:
        raise ConfigError(f"{option} = {budget!r} must be a number above 0.")


def _over(spent: float, budget: float) -> float:
    return -min(max(spent / budget - 1.0, 0.0), 1.0)
