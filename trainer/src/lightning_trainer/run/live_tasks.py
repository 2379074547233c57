"""Traces of production as rows of a data set: the agent's input and its answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from lightning_spans.adapter.trace import Node, Trace
from lightning_spans.schema.spans import CHAT, REQUEST
from lightning_trainer.lineage.permits import join_tenants, tenants_of
from lightning_trainer.rl.told import chat_messages, texts_of

_ASKED = ("messages", "input", "prompt", "contents")


def tasks_of(traces: Iterable[Trace], *, field: str) -> Iterator[dict[str, Any]]:
    """Return a task for each trace whose first model call contains its input.

    Args:
        traces: each becomes one task.
        field: key for the text of the last user message of the first call; what the agent's function reads.

    Yields:
        ``{field: text, "messages": [...], "answer": text, "agents": [...], "origin": ..., "trace_id": ...}``.
    """
    for trace in traces:
        chats = [node for node in trace.nodes if node.span.operation == CHAT]
        messages = next(filter(None, map(_messages, chats)), None)
        if messages is None:
            continue
        answers = [_text(message) for node in chats for message in _answer(node)]
        asked = [_text(told) for told in _readable_messages(messages) if told.get("role", "user") == "user"]
        yield {
            field: next(filter(None, reversed(asked)), ""),
            "messages": messages,
            "answer": next(filter(None, reversed(answers)), ""),
            "agents": list(trace.agents),
            "origin": chats[0].span.origin,
            "trace_id": chats[0].span.trace_id,
            **({"tenant": join_tenants(tenants)} if (tenants := tenants_of(trace)) else {}),
        }


def last_message(node: Node) -> str:
    """Return the last message that a model call sent, as text; empty if it is not recorded."""
    messages = _readable_messages(_messages(node) or [])
    return _text(messages[-1]) if messages else ""


def answer_text(node: Node) -> str:
    """Return a model call's answer, its tool calls as JSON; empty if it is not recorded."""
    said = _answer(node)
    calls = [call for message in said for call in message.get("tool_calls") or ()]
    return " ".join(filter(None, (*map(_text, said), json.dumps(calls) if calls else "")))


def _answer(node: Node) -> list[Mapping[str, Any]]:
    return _readable_messages([choice.message for choice in node.answer.choices[:1]])


def _readable_messages(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [told for message in messages for told in chat_messages(message) if isinstance(told, Mapping)]


def _messages(node: Node) -> list[dict[str, Any]] | None:
    body = _request(node)
    asked = next((body[name] for name in _ASKED if body.get(name)), None)
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    return [message for message in asked if isinstance(message, dict)] if isinstance(asked, list) else None


def _request(node: Node) -> Mapping[str, Any]:
    """Return the request as the program sent it; if it is not attached, as the gateway kept it."""
    text = node.span.attributes.get(REQUEST)
    if text is None:
        return node.call.request if node.call is not None else {}
    try:
        body = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _text(message: Mapping[str, Any]) -> str:
    return "".join(texts_of(message.get("content", message.get("parts"))))  # Gemini's parts
