"""Anthropic's streams: assemble the events into the message that a call without streaming would return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from lightning_spans.chat.stream import Growing
from lightning_spans.schema.json import read_json
from lightning_spans.schema.spans import Json

MESSAGES: Final = "/messages"  # the endpoint
_BLOCKS: Final = {  # which field a delta of a block extends, and from which of its own fields, by the delta's type
    "text_delta": "text", "input_json_delta": "partial_json", "thinking_delta": "thinking",
    "signature_delta": "signature",
}  # fmt: skip


def message_of_events(events: Iterable[Mapping[str, Json]]) -> dict[str, Json]:
    """Assemble one of Anthropic's messages from its events. Its blocks grow in place."""
    message: dict[str, Json] = {}
    blocks: dict[int, Growing] = {}
    for event in events:
        kind, block = event.get("type"), blocks.setdefault(event["index"], Growing()) if "index" in event else None
        if kind == "message_start":
            message = dict(event.get("message") or {})
        elif kind == "message_delta":
            usage = {**(message.get("usage") or {}), **(event.get("usage") or {})}
            message = {**message, **(event.get("delta") or {}), "usage": usage}
        elif kind == "content_block_start" and block is not None:
            block.add(event.get("content_block") or {})
        elif kind == "content_block_delta" and block is not None:
            _grow_block(block, event.get("delta") or {})
    return {**message, "content": [_block(blocks[index].whole()) for index in sorted(blocks)]}


def _grow_block(block: Growing, delta: Mapping[str, Json]) -> None:
    field = _BLOCKS.get(str(delta.get("type")))
    if field is not None:
        block.add_text(field, delta.get(field) or "")


def _block(block: dict[str, Json]) -> dict[str, Json]:
    """Return a block with its input as data, or as the text that arrived if it is not valid JSON."""
    text = block.pop("partial_json", "")
    if not text:
        return block
    try:
        return {**block, "input": read_json(text)}
    except ValueError:
        return {**block, "input": text}
