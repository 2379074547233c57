"""``POST /v1/messages``: Anthropic's format, for any model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from lightning_spans.schema.json import dumps, read_json
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.http.events import named_event
from lightning_trainer.gateway.request.pending import PendingCall
from lightning_trainer.gateway.surfaces.messages_request import chat_of_messages, refuse_prefill, shows_thinking
from lightning_trainer.gateway.surfaces.output_items import OutputItem, OutputItems, Step

_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class MessagesSurface:
    """Anthropic's messages."""

    path = "/v1/messages"
    id_prefix = "msg_"

    def begin(self, body: Mapping[str, Any], owner: str | None) -> MessagesExchange:  # noqa: ARG002 - nothing is kept
        """Read a request; see `Surface.begin`."""
        asked, left_out = chat_of_messages(body)
        refuse_prefill(asked)
        return MessagesExchange(asked, left_out, thinking=shows_thinking(body))

    def refusal(self, refusal: Refusal) -> bytes:
        """Return an error in Anthropic's format."""
        return dumps(refusal.anthropic())


class MessagesExchange:
    """One request and its answer."""

    keeps_id = False
    demands_limit = True

    def __init__(self, asked: Mapping[str, Any], left_out: Mapping[str, Any], *, thinking: bool) -> None:
        self.asked = asked
        self.left_out = left_out
        self._thinking = thinking
        self._parts = OutputItems(reasoning=thinking)
        self._begun = False

    def whole(self, pending: PendingCall, completion: dict[str, Any]) -> bytes:
        """See `Exchange`."""
        parts = OutputItems.of(completion, reasoning=self._thinking)
        return dumps(
            {
                **_head(pending),
                "content": [_block(part) for part in parts.parts],
                **_stop(parts),
                "usage": _usage(parts, pending),
            }
        )

    def chunk(self, pending: PendingCall, chunk: dict[str, Any]) -> bytes:
        """See `Exchange`."""
        return b"".join([*self._first(pending), *map(_event, self._parts.take(chunk))])

    def end(self, pending: PendingCall) -> bytes:
        """See `Exchange`."""
        last = {"delta": _stop(self._parts), "usage": _usage(self._parts, pending)}
        closing = [*self._first(pending), *map(_event, self._parts.end())]
        return b"".join([*closing, named_event("message_delta", last), named_event("message_stop", {})])

    def failed(self, pending: PendingCall, refusal: Refusal) -> bytes:  # noqa: ARG002
        """See `Exchange`."""
        return named_event("error", refusal.anthropic())

    def _first(self, pending: PendingCall) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            usage = {**_usage(self._parts, pending), "output_tokens": 0}
            message = {**_head(pending), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
            yield named_event("message_start", {"message": message})


def _head(pending: PendingCall) -> dict[str, Any]:
    return {"id": pending.response_id, "type": "message", "role": "assistant", "model": pending.routed.policy}


def _stop(parts: OutputItems) -> dict[str, Any]:
    reason = _REASONS.get(parts.finish_reason or "", "end_turn")
    if reason == "end_turn" and any(part.kind == "tool" for part in parts.parts):
        reason = "tool_use"  # vLLM says "stop" for a call that was forced
    elif reason == "end_turn" and parts.stopped_by is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": parts.stopped_by if reason == "stop_sequence" else None}


def _usage(parts: OutputItems, pending: PendingCall) -> dict[str, Any]:
    prompt, drawn, cached = parts.usage(pending)
    return {
        "input_tokens": prompt - cached,
        "output_tokens": drawn,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _block(part: OutputItem) -> dict[str, Any]:
    if part.kind == "tool":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _input(part.text)}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _input(arguments: str) -> Any:
    """Return a call's arguments as an object, which this format requires.

    Anything else is put under a separate name.
    """
    try:
        data = read_json(arguments or "{}")
    except ValueError:
        return {"arguments": arguments}
    return data if isinstance(data, dict) else {"arguments": data}


def _event(step: Step) -> bytes:
    what, part, text = step
    if what == "open":
        empty = _block(OutputItem(part.kind, part.index, part.call_id, part.name))
        return named_event("content_block_start", {"index": part.index, "content_block": empty})
    if what == "more":
        return named_event("content_block_delta", {"index": part.index, "delta": _delta(part, text)})
    return named_event("content_block_stop", {"index": part.index})


def _delta(part: OutputItem, text: str) -> dict[str, Any]:
    if part.kind == "tool":
        return {"type": "input_json_delta", "partial_json": text}
    if part.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}
