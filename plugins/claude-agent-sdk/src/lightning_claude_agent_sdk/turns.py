"""One turn of the command: the model calls and tool calls that its messages report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from lightning_openai.attributes import response_attributes
from lightning_openai.json_text import to_json
from lightning_spans.record.context import settle_context
from lightning_spans.schema import spans as names

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from lightning_spans.hooks import OpenSpan
    from lightning_spans.record.instrument.tracker import Tracker

_ENDPOINT: Final = "/messages"


class Turn:
    """Creates the spans of one turn.

    Each message of the model is a model call; its id joins it to the gateway's record.

    Args:
        tracker: begins and ends the spans.
        span: the agent span; None if `agent()` names the agent.
    """

    def __init__(self, tracker: Tracker, span: OpenSpan | None) -> None:
        self._tracker = tracker
        self._span = span
        self._context = settle_context() if span is None else span.context
        self._tools: dict[str, OpenSpan] = {}  # by the model's id of the call
        self._since_ns = time.time_ns()  # when the model was called: at the start of the turn or at a tool's result
        self._said: dict[str, Any] | None = None  # the model's message, which arrives in parts
        self._asked_by: Context = self._context

    def hear(self, message: Mapping[str, Any]) -> None:
        """Process a message of the model, or one with tool results."""
        around = self._tools.get(message.get("parent_tool_use_id") or "")  # an agent that was called as a tool
        context = self._context if around is None else around.context
        body = message.get("message") or {}
        content = body.get("content")
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        if message.get("type") == "assistant":
            self._hear_model(body, blocks, context)
        else:
            self._end_call()
            for block in blocks:
                if block.get("type") == "tool_result":
                    self._end_tool(block)

    def _hear_model(self, body: Mapping[str, Any], blocks: list[dict[str, Any]], context: Context) -> None:
        if self._said is not None and self._said.get("id") != body.get("id"):
            self._end_call()
        if self._said is None:
            self._said, self._asked_by = {**body, "content": []}, context
        self._said["content"] += blocks
        for name in ("stop_reason", "usage"):
            self._said[name] = body.get(name) or self._said.get(name)
        for block in blocks:
            if block.get("type") == "tool_use":
                self._begin_tool(block, context)

    def _begin_tool(self, block: Mapping[str, Any], context: Context) -> None:
        span = self._tracker.begin_tool(block["name"], block["id"], to_json(block.get("input") or {}), context)
        if span is not None:
            self._tools[block["id"]] = span

    def _end_tool(self, block: Mapping[str, Any]) -> None:
        content = block.get("content")
        text = content if isinstance(content, str) else "".join(map(_text, content or ()))
        span = self._tools.pop(block.get("tool_use_id") or "", None)
        error = text or "failed" if block.get("is_error") else None
        self._tracker.end(span, error=error, attributes={names.TOOL_RESULT: text})

    def _end_call(self) -> None:
        """Create the span of a model call whose message is complete."""
        if self._said is None:
            return
        body, self._said = self._said, None
        facts = {names.ENDPOINT: _ENDPOINT, names.RESPONSE: to_json(body), names.REROUTABLE: True}
        model = str(body.get("model") or "")
        told = {names.REQUEST_MODEL: model, **response_attributes(_ENDPOINT, body), **facts}
        span = self._tracker.begin(names.CHAT, model, context=self._asked_by, attributes=told, start_ns=self._since_ns)
        self._tracker.end(span)
        self._since_ns = time.time_ns()

    def end(self, error: BaseException | str | None = None) -> None:
        """End all open spans and the turn."""
        self._end_call()
        for span in self._tools.values():
            self._tracker.end(span, error=error)
        self._tools.clear()
        self._tracker.end(self._span, error=error)


def _text(part: Any) -> str:
    return str(part.get("text", "")) if isinstance(part, dict) else str(part)
