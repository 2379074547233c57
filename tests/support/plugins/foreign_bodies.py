"""What Gemini, Ollama and Cohere are asked and answer, as bodies: whole and streamed."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Form(NamedTuple):
    """A vendor's form.

    Attributes:
        provider: on the span.
        path: of a whole answer.
        body: a conversation with a tool call, its result, and sampling parameters.
        whole: an answer with a text and a tool call.
        events: the same, streamed.
        kind: the content type of the stream.
        streamed: path and fields of the body that ask for a stream.
        refused: fields that no chat completion has, each with its name in the error.
    """

    provider: str
    path: str
    body: dict[str, Any]
    whole: dict[str, Any]
    events: list[dict[str, Any]]
    kind: str
    streamed: tuple[str, dict[str, Any]]
    refused: dict[str, dict[str, Any]]

    def stream(self) -> bytes:
        """The bytes of the stream."""
        if "ndjson" in self.kind:
            return b"".join(json.dumps(event).encode() + b"\n" for event in self.events)
        return b"".join(f"data: {json.dumps(event)}\r\n\r\n".encode() for event in self.events)


# What each of the bodies below asks, in the words of chat completions.
MESSAGES = [
    {"role": "system", "content": "You are writer"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "hm", "tool_calls": [
        {"id": "ID", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
    ]},
    {"role": "tool", "tool_call_id": "ID", "content": "RESULT"},
    {"role": "user", "content": "say nineteen"},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}]

_OLLAMA_CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
_OLLAMA_END = {"done": True, "done_reason": "stop", "prompt_eval_count": 11, "eval_count": 3, "total_duration": 5}
OLLAMA = Form(
    "ollama",
    "/api/chat",
    {
        "model": "far",
        "messages": [
            {"role": "system", "content": "You are writer"},
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "hm", "tool_calls": [_OLLAMA_CALL]},
            {"role": "tool", "content": "RESULT", "tool_name": "add"},
            {"role": "user", "content": "say nineteen"},
        ],
        "tools": TOOLS,
        "stream": False,
        "options": {"temperature": 0.5, "top_p": 0.9, "num_predict": 20, "stop": ["END"], "num_ctx": 4096},
        "keep_alive": "5m",
    },
    {"model": "far", "created_at": "2026-11-20T12:00:00Z", **_OLLAMA_END, "message": {
        "role": "assistant", "content": "good", "tool_calls": [_OLLAMA_CALL],
    }},
    [
        {"model": "far", "message": {"role": "assistant", "content": "go"}, "done": False},
        {"model": "far", "message": {"role": "assistant", "content": "od"}, "done": False},
        {"model": "far", "message": {"role": "assistant", "content": "", "tool_calls": [_OLLAMA_CALL]}, "done": False},
        {"model": "far", "message": {"role": "assistant", "content": ""}, **_OLLAMA_END},
    ],
    "application/x-ndjson",
    ("/api/chat", {"stream": True}),
    {
        "messages[0].images": {"messages": [{"role": "user", "content": "see", "images": ["aGk="]}]},
        "options.mirostat": {"options": {"mirostat": 2}},
        "template": {"template": "{{ .Prompt }}"},
    },
)  # fmt: skip

_GEMINI_CALL = {"functionCall": {"name": "add", "args": {"a": 1}}}
_GEMINI_USAGE = {"promptTokenCount": 11, "candidatesTokenCount": 3, "totalTokenCount": 14}


def _candidate(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    said = {"content": {"role": "model", "parts": list(parts)}, "index": 0, **more}
    return {"candidates": [said], "modelVersion": "far-1", "responseId": "gem-1"}


GEMINI = Form(
    "gcp.gen_ai",
    "/v1beta/models/far:generateContent",
    {
        "systemInstruction": {"parts": [{"text": "You are writer"}], "role": "user"},
        "contents": [
            {"role": "user", "parts": [{"text": "first"}]},
            {"role": "model", "parts": [{"text": "h"}]},
            {"role": "model", "parts": [{"text": "m"}, {**_GEMINI_CALL, "thoughtSignature": "c2ln"}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "add", "response": {"result": "RESULT"}}}]},
            {"role": "user", "parts": [{"text": "say nineteen"}]},
        ],
        "tools": [{"functionDeclarations": [{"name": "add", "description": "adds", "parameters": {
            "type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}, "required": ["a"],
        }}]}],
        "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        "generationConfig": {"temperature": 0.5, "topP": 0.9, "maxOutputTokens": 20, "stopSequences": ["END"]},
    },
    {**_candidate({"text": "good"}, _GEMINI_CALL, finishReason="STOP"), "usageMetadata": _GEMINI_USAGE},
    [
        _candidate({"text": "go"}),
        _candidate({"text": "od"}),
        {**_candidate(_GEMINI_CALL, finishReason="STOP"), "usageMetadata": _GEMINI_USAGE},
    ],
    "text/event-stream",
    ("/v1beta/models/far:streamGenerateContent", {}),
    {
        "contents[0].parts[1].inlineData": {"contents": [{"role": "user", "parts": [
            {"text": "see"}, {"inlineData": {"mimeType": "image/png", "data": "aGk="}},
        ]}]},
        "safetySettings": {"safetySettings": [{"category": "X", "threshold": "BLOCK_LOW_AND_ABOVE"}]},
        "tools[0].googleSearch": {"tools": [{"googleSearch": {"timeRangeFilter": {}}}]},
        "cachedContent": {"cachedContent": "cachedContents/1"},
        "generationConfig.speechConfig": {"generationConfig": {"speechConfig": {"languageCode": "en"}}},
    },
)  # fmt: skip

_COHERE_CALL = {"id": "add_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
_COHERE_USAGE = {"billed_units": {"input_tokens": 9, "output_tokens": 3}, "tokens": {
    "input_tokens": 11, "output_tokens": 3,
}}  # fmt: skip
COHERE = Form(
    "cohere",
    "/v2/chat",
    {
        "model": "far",
        "messages": [
            {"role": "system", "content": "You are writer"},
            {"role": "user", "content": [{"type": "text", "text": "first"}]},
            {"role": "assistant", "tool_plan": "hm", "tool_calls": [_COHERE_CALL]},
            {"role": "tool", "tool_call_id": "add_1", "content": [{"type": "document", "document": {
                "data": "RESULT",
            }}]},
            {"role": "user", "content": "say nineteen"},
        ],
        "tools": TOOLS,
        "temperature": 0.5, "p": 0.9, "max_tokens": 20, "stop_sequences": ["END"], "stream": False,
    },
    {"id": "co-1", "finish_reason": "TOOL_CALL", "usage": _COHERE_USAGE, "message": {
        "role": "assistant", "tool_plan": "good", "tool_calls": [_COHERE_CALL],
    }},
    [
        {"type": "message-start", "id": "co-1", "delta": {"message": {"role": "assistant", "content": []}}},
        {"type": "tool-plan-delta", "delta": {"message": {"tool_plan": "go"}}},
        {"type": "tool-plan-delta", "delta": {"message": {"tool_plan": "od"}}},
        {"type": "tool-call-start", "index": 0, "delta": {"message": {"tool_calls": {
            **_COHERE_CALL, "function": {"name": "add", "arguments": ""},
        }}}},
        {"type": "tool-call-delta", "index": 0, "delta": {"message": {"tool_calls": {"function": {
            "arguments": '{"a":',
        }}}}},
        {"type": "tool-call-delta", "index": 0, "delta": {"message": {"tool_calls": {"function": {
            "arguments": "1}",
        }}}}},
        {"type": "tool-call-end", "index": 0},
        {"type": "message-end", "delta": {"finish_reason": "TOOL_CALL", "usage": _COHERE_USAGE}},
    ],
    "text/event-stream",
    ("/v2/chat", {"stream": True}),
    {
        "messages[0].content[0].image_url": {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "http://far/x.png"}},
        ]}]},
        "documents": {"documents": ["a text"]},
        "safety_mode": {"safety_mode": "STRICT"},
    },
)  # fmt: skip

FORMS = {"ollama": OLLAMA, "gemini": GEMINI, "cohere": COHERE}
