"""One turn of the command: the model calls and tool calls that its messages report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(slots=True)
class _Speaker:
    """The agent of the command, or one that it called as a tool: several may speak at once.

    Attributes:
        context: of its calls.
        since_ns: when the model was called: when the agent started, or at a tool's result.
        said: the model's message, which arrives in parts.
        heard_ns: when the last part arrived.
    """

    context: Context
    since_ns: int
    said: dict[str, Any] | None = None
    heard_ns: int = 0


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
        self._speakers = {"": _Speaker(self._context, time.time_ns())}  # by the model's id of the call that started it

    def hear(self, message: Mapping[str, Any]) -> None:
        """Process a message of the model, or one with tool results."""
        speaker = self._speaker(message.get("parent_tool_use_id") or "")
        body = message.get("message") or {}
        content = body.get("content")
        blocks = [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []
        if message.get("type") == "assistant":
            self._hear_model(body, blocks, speaker)
        else:
            self._end_call(speaker)
            for block in blocks:
                if block.get("type") == "tool_result":
                    self._end_tool(block)

    def _speaker(self, called_as: str) -> _Speaker:
        if called_as not in self._speakers:
            tool = self._tools.get(called_as)
            self._speakers[called_as] = (
                _Speaker(self._context, time.time_ns()) if tool is None else _Speaker(tool.context, tool.start_ns)
            )
        return self._speakers[called_as]

    def _hear_model(self, body: Mapping[str, Any], blocks: list[dict[str, Any]], speaker: _Speaker) -> None:
        if speaker.said is not None and speaker.said.get("id") != body.get("id"):
            self._end_call(speaker)
        if speaker.said is None:
            speaker.said = {**body, "content": []}
        speaker.said["content"] += blocks
        speaker.heard_ns = time.time_ns()
        for name in ("stop_reason", "usage"):
            speaker.said[name] = body.get(name) or speaker.said.get(name)
        for block in blocks:
            if block.get("type") == "tool_use":
                self._begin_tool(block, speaker.context)

    def _begin_tool(self, block: Mapping[str, Any], context: Context) -> None:
        span = self._tracker.begin_tool(block["name"], block["id"], to_json(block.get("input") or {}), context)
        if span is not None:
            self._tools[block["id"]] = span

    def _end_tool(self, block: Mapping[str, Any]) -> None:
        content = block.get("content")
        text = content if isinstance(content, str) else "".join(map(_text, content or ()))
        call_id = block.get("tool_use_id") or ""
        self._end_call(self._speakers.pop(call_id, None))
        error = text or "failed" if block.get("is_error") else None
        self._tracker.end(self._tools.pop(call_id, None), error=error, attributes={names.TOOL_RESULT: text})

    def _end_call(self, speaker: _Speaker | None) -> None:
        """Create the span of a model call whose message is complete."""
        if speaker is None:
            return
        body, speaker.said = speaker.said, None
        since_ns, speaker.since_ns = speaker.since_ns, time.time_ns()
        if body is None:
            return
        facts = {names.ENDPOINT: _ENDPOINT, names.RESPONSE: to_json(body), names.REROUTABLE: True}
        model = str(body.get("model") or "")
        told = {names.REQUEST_MODEL: model, **response_attributes(_ENDPOINT, body), **facts}
        span = self._tracker.begin(names.CHAT, model, context=speaker.context, attributes=told, start_ns=since_ns)
        self._tracker.end(span, end_ns=speaker.heard_ns)

    def end(self, error: BaseException | str | None = None) -> None:
        """End all open spans and the turn."""
        for speaker in self._speakers.values():
            self._end_call(speaker)
        for span in self._tools.values():
            self._tracker.end(span, error=error)
        self._tools.clear()
        self._tracker.end(self._span, error=error)


def _text(part: Any) -> str:
    return str(part.get("text", "")) if isinstance(part, dict) else str(part)
