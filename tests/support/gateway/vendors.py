"""A server on loopback that answers as Google, Ollama and Cohere do, and keeps what it was asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from support.loopback import Loopback, LoopbackHandler

TEXT = ["Nine", "teen", "."]
USAGE = {"billed_units": {"input_tokens": 11, "output_tokens": 3}, "tokens": {"input_tokens": 11, "output_tokens": 3}}


class _Handler(LoopbackHandler):
    def do_POST(self) -> None:
        path, body = self.read()
        self.owner.asked.append((path, body))
        if path.endswith("Content"):
            self._answer(gemini_events(), "stream" in path, "data: %s\r\n\r\n", "text/event-stream", gemini)
        elif path.endswith(("/api/chat", "/api/generate")):
            lines = ollama_lines(path.endswith("chat"))
            self._answer(lines, body.get("stream", True), "%s\n", "application/x-ndjson", ollama(path))
        else:
            self._answer(cohere_events(), body.get("stream"), "data: %s\n\n", "text/event-stream", cohere)

    def _answer(self, events: Iterator[Any], stream: Any, frame: str, kind: str, whole: Any) -> None:
        if stream:
            self.send_text(200, kind, "".join(frame % json.dumps(event) for event in events))
        else:
            self.send(200, whole("".join(TEXT), last=True))


class Vendors(Loopback):
    """`asked` has the path and the body of each request."""

    handler = _Handler


def gemini(text: str, *, last: bool) -> dict[str, Any]:
    candidate = {"content": {"role": "model", "parts": [{"text": text}]}, "index": 0}
    counts = {"promptTokenCount": 11, "candidatesTokenCount": 3, "totalTokenCount": 14}
    ended = {"candidates": [{**candidate, "finishReason": "STOP"}], "usageMetadata": counts}
    return {"candidates": [candidate], "modelVersion": "far-1", "responseId": "gem-1", **(ended if last else {})}


def gemini_events() -> Iterator[dict[str, Any]]:
    for text in TEXT:
        yield gemini(text, last=text == TEXT[-1])


def ollama(path: str) -> Any:
    def answer(text: str, *, last: bool) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if path.endswith("chat") else {"response": text}
        end = {"done_reason": "stop", "prompt_eval_count": 11, "eval_count": 3}
        return {"model": "far", "created_at": "2026-11-20T12:00:00Z", **said, "done": last, **(end if last else {})}

    return answer


def ollama_lines(chat: bool) -> Iterator[dict[str, Any]]:
    answer = ollama("chat" if chat else "generate")
    for text in TEXT:
        yield answer(text, last=False)
    yield answer("", last=True)


def cohere(text: str, *, last: bool) -> dict[str, Any]:
    assert last  # what is streamed has another form
    message = {"role": "assistant", "content": [{"type": "text", "text": text}]}
    return {"id": "co-1", "finish_reason": "COMPLETE", "message": message, "usage": USAGE}


def cohere_events() -> Iterator[dict[str, Any]]:
    yield {"type": "message-start", "id": "co-1", "delta": {"message": {"role": "assistant", "content": []}}}
    empty = {"message": {"content": {"type": "text", "text": ""}}}
    yield {"type": "content-start", "index": 0, "delta": empty}
    for text in TEXT:
        yield {"type": "content-delta", "index": 0, "delta": {"message": {"content": {"text": text}}}}
    yield {"type": "content-end", "index": 0}
    yield {"type": "message-end", "delta": {"finish_reason": "COMPLETE", "usage": USAGE}}
