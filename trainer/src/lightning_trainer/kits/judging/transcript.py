"""What a judge reads of a rollout: inputs, model answers and tool results, each once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from lightning_spans.chat.body import messages_of, tool_calls
from lightning_spans.schema.spans import CHAT, EXECUTE_TOOL, TOOL_ARGUMENTS, TOOL_CALL_ID, TOOL_RESULT
from lightning_trainer.rl.rewards.callers import request_of
from lightning_trainer.rl.told import chat_messages, text_of

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Node, Trace

Entries: TypeAlias = tuple[str, ...]  # events in order, each as a line that starts with the agent's name
_CUT: Final = "\n[... {count} characters left out ...] "  # the text after it does not start a line


def entries_of(trace: Trace) -> Entries:
    """Return the events of an attempt in order. What an agent has received before is not repeated."""
    told: defaultdict[str, list[str]] = defaultdict(list)
    by_tool = {node.span.attributes.get(TOOL_CALL_ID) for node in trace.tools} - {None}
    found: list[str] = []
    for node in trace:
        who = node.span.agent or "agent"
        if node.span.operation == CHAT:
            found += _call(node, who, told[who], by_tool)
        elif node.span.operation == EXECUTE_TOOL:
            found.append(_tool(node, who))
    return tuple(found)


def tell_apart(group: Sequence[Entries]) -> tuple[Entries, list[Entries]]:
    """Split the rollouts of a group into their common beginning and the rest of each."""
    shared = group[0][: min(_alike(group[0], entries) for entries in group)] if len(group) > 1 else ()
    return shared, [entries[len(shared) :] for entries in group]


def shorten(text: str, most: int) -> str:
    """Return a text without its middle if it is too long."""
    if len(text) <= most:
        return text
    half = most // 2
    return text[:half] + _CUT.format(count=len(text) - 2 * half) + text[-half:]


def _call(node: Node, who: str, told: list[str], by_tool: set[Any]) -> list[str]:
    given = [told for message in messages_of(request_of(node)) or () for told in chat_messages(message)]
    asked = [_message(who, message) for message in given if not _known_result(message, by_tool)]
    said = [{"role": "assistant", **choice.message} for choice in node.answer.choices]
    answers = [_message(who, message) for answer in said for message in chat_messages(answer)]
    if node.error is not None:
        answers.append(f"[{who}] model call failed: {node.error}")
    before = _alike(told, asked)
    told[:] = [*asked, *answers]
    return [*asked[before:], *answers]


def _known_result(message: Any, by_tool: set[Any]) -> bool:
    """Whether a tool's own span already contains the message."""
    return isinstance(message, Mapping) and message.get("role") == "tool" and message.get("tool_call_id") in by_tool


def _message(who: str, message: Any) -> str:
    if not isinstance(message, Mapping):
        return f"[{who}] {message}"
    calls = "".join(f" calls {call.name}({call.arguments})" for call in tool_calls(message))
    return f"[{who}] {message.get('role', '')}: {text_of(message.get('content'))}{calls}"


def _tool(node: Node, who: str) -> str:
    attributes = node.span.attributes
    result = f"failed: {node.error}" if node.error is not None else f"gave {attributes.get(TOOL_RESULT, '')}"
    return f"[{who}] tool {node.span.name}({attributes.get(TOOL_ARGUMENTS, '')}) {result}"


def _alike(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the length of the common beginning of two lists."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))
