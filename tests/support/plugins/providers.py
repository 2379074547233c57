"""A model server on loopback that speaks Anthropic's, Ollama's and Gemini's protocols, and keeps what it was asked.

A question that says ``use add`` is answered with a call of the tool ``add``, until its result is there; one that says
``fail`` is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from support.loopback import Loopback, LoopbackHandler

TEXT = ["Nine", "teen", "."]
ARGUMENTS = {"a": 12, "b": 7}


@dataclass(frozen=True)
class Asked:
    """One request: its path, its body, and the id that was answered; None where the protocol has none."""

    path: str
    body: dict[str, Any]
    response_id: str | None
    headers: dict[str, str]


class _Handler(LoopbackHandler):
    def do_POST(self) -> None:
        path, body = self.read()
        text = json.dumps(body)
        number = len(self.owner.asked) + 1
        uses = "use add" in text and not any(mark in text for mark in ('"tool_result"', '"tool"', "functionResponse"))
        response_id = f"msg_{number}" if path.endswith("/messages") else f"gem-{number}" if "Content" in path else None
        self.owner.asked.append(Asked(path, body, response_id, {k.lower(): v for k, v in self.headers.items()}))
        if "fail" in text:
            error = {"type": "invalid_request_error", "message": "no such luck"}
            self.send(400, {"type": "error", "error": error if path.endswith("/messages") else "no such luck"})
        elif path.endswith("/messages"):
            self._anthropic(body, response_id, uses=uses)
        elif path.endswith("/api/chat"):
            self._ollama(body, uses=uses)
        elif path.endswith("/api/show"):
            self.send(200, {"details": {}, "model_info": {}, "capabilities": ["tools"], "template": "tools"})
        else:
            self._gemini(response_id, uses=uses, stream="stream" in path)

    def _anthropic(self, body: dict[str, Any], response_id: str | None, *, uses: bool) -> None:
        call = {"type": "tool_use", "id": f"toolu_{response_id}", "name": "add", "input": ARGUMENTS}
        content = [call] if uses else [{"type": "text", "text": "".join(TEXT)}]
        message = {
            "id": response_id,
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": content,
            "stop_reason": "tool_use" if uses else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": 11, "output_tokens": 3},
        }
        if body.get("stream"):
            events = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in _events(message))
            self.send_text(200, "text/event-stream", events)
        else:
            self.send(200, message)

    def _ollama(self, body: dict[str, Any], *, uses: bool) -> None:
        call = [{"function": {"name": "add", "arguments": ARGUMENTS}}]
        texts = [""] if uses else TEXT
        last = {"done": True, "done_reason": "stop", "prompt_eval_count": 11, "eval_count": 3, "total_duration": 5}
        known = {"model": body["model"], "created_at": "2026-11-20T12:00:00Z"}
        if body.get("stream"):
            lines = [
                {
                    **known,
                    "message": {"role": "assistant", "content": text, **({"tool_calls": call} if uses else {})},
                    "done": False,
                }
                for text in texts
            ]
            lines.append({**known, "message": {"role": "assistant", "content": ""}, **last})
            self.send_text(200, "application/x-ndjson", "".join(json.dumps(line) + "\n" for line in lines))
        else:
            message = {"role": "assistant", "content": "".join(texts), **({"tool_calls": call} if uses else {})}
            self.send(200, {**known, "message": message, **last})

    def _gemini(self, response_id: str | None, *, uses: bool, stream: bool) -> None:
        part = {"functionCall": {"name": "add", "args": ARGUMENTS}} if uses else {"text": "".join(TEXT)}
        body = {
            "candidates": [{"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}],
            "usageMetadata": {"promptTokenCount": 11, "candidatesTokenCount": 3, "totalTokenCount": 14},
            "modelVersion": "gemini-test",
            "responseId": response_id,
        }
        if stream:
            self.send_text(200, "text/event-stream", f"data: {json.dumps(body)}\r\n\r\n")
        else:
            self.send(200, body)


class Providers(Loopback):
    """`asked` has an `Asked` for each request."""

    asked: list[Asked]
    handler = _Handler


def _events(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return a message as the events of Anthropic's stream."""
    start = {**message, "content": [], "stop_reason": None, "usage": {"input_tokens": 11, "output_tokens": 0}}
    yield {"type": "message_start", "message": start}
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            yield {"type": "content_block_start", "index": index, "content_block": {"type": "text", "text": ""}}
            for text in TEXT:
                yield {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}}
        else:
            yield {"type": "content_block_start", "index": index, "content_block": {**block, "input": {}}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 3}}
    yield {"type": "message_stop"}
