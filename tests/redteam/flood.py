"""A flood of broken requests: whole bodies of every surface, with values of the wrong type put anywhere.

    python tests/redteam/flood.py --requests 50000 --seed 1

asks a server of its own and prints what was answered otherwise than it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}, "strict": True}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"name": "n", "schema": {"type": "object"}, "strict": True}
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "n": 1, "stop": ["a"], "seed": 1, "logit_bias": {"1": 1}, "stream": True}
SPAN = {"operation": "chat", "name": "n", "trace_id": "a" * 32, "span_id": "b" * 16, "start_ns": 1, "end_ns": 2}
OTLP_SPAN = {
    "traceId": "a" * 32, "spanId": "b" * 16, "parentSpanId": "", "name": "n", "kind": 1, "startTimeUnixNano": "1",
    "endTimeUnixNano": "2", "status": {"code": 1, "message": "m"}, "links": [],
    "attributes": [
        {"key": "a", "value": {"intValue": "1"}},
        {"key": "b", "value": {"arrayValue": {"values": [{"doubleValue": 1.0}]}}},
        {"key": "openinference.span.kind", "value": {"stringValue": "LLM"}},
        {"key": "output.value", "value": {"stringValue": '{"choices": [{}], "id": []}'}},
        {"key": "metadata", "value": {"stringValue": '{"langgraph_node": []}'}},
    ],
    "events": [{"name": "e", "timeUnixNano": "1", "attributes": []}],
}  # fmt: skip
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "r"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": SCHEMA},
        "stream_options": {"include_usage": True}, "top_logprobs": 0, "logprobs": True, "return_token_ids": True,
        "max_tokens": 5, "top_k": -1, "min_p": 0.0, "presence_penalty": 0, "repetition_penalty": 1.0, "metadata": {},
        "parallel_tool_calls": True, "chat_template_kwargs": {}, "user": "u", "functions": [FUNCTION], **SAMPLING,
    },
    "/v1/completions": {
        "prompt": "x", "max_tokens": 5, "logprobs": 1, "echo": False, "suffix": "", "best_of": 1, **SAMPLING,
        "stream_options": {"include_usage": True}, "return_token_ids": True,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "r"},
            {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "t"}], "content": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        ],
        "instructions": "i", "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "f"},
        "max_output_tokens": 5, "stream": True, "store": False, "previous_response_id": None, "metadata": {},
        "reasoning": {"effort": "low", "summary": "auto"}, "text": {"format": {"type": "json_schema", **SCHEMA}},
        "include": [], "truncation": "disabled", "background": False, "conversation": None, "top_logprobs": 0,
    },
    "/v1/messages": {
        "max_tokens": 5, "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "r"}]},
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}, "temperature": 1.0,
        "top_p": 1.0, "top_k": 5, "stop_sequences": ["a"], "stream": True, "metadata": {"user_id": "u"},
        "thinking": {"type": "disabled"},
    },
    "/v1/messages/count_tokens": {
        "messages": [{"role": "user", "content": "hi"}], "system": "s", "tools": [{"name": "f", "input_schema": {}}],
    },
    "/v1/embeddings": {"input": "x", "dimensions": 3, "encoding_format": "float"},
    "/v1/traces": {
        "resourceSpans": [
            {"resource": {"attributes": []}, "scopeSpans": [{"scope": {"name": "n"}, "spans": [OTLP_SPAN]}]}
        ]
    },
    "/api/query": {"what": "spans", "rollout_ids": ["a"], "trace_ids": ["a"], "status": "queued", "origin": "training"},
    "/api/rewards": {"rewards": [{"rollout_id": "r", "attempt_id": "a", "value": 1.0, "source": "o"}]},
    "/api/rollouts": {"rollouts": [{"rollout_id": "r", "group_id": "g", "task": {}, "max_attempts": 1}]},
    "/api/rollouts/cancel": {"group_ids": ["a"], "rollout_ids": ["a"]},
    "/api/claims": {"worker": "w", "limit": 1, "lease_s": 1.0},
    "/api/heartbeats": {"leases": [["a", 1]], "lease_s": 1.0},
    "/api/attempts/a/finish": {"fence": 1, "status": "succeeded", "rewards": [], "error": None},
    "/api/finishes": {"ends": [{"attempt_id": "a", "fence": 1, "status": "succeeded", "rewards": []}]},
    "/api/groups/consume": {"group_id": "g", "consumer": "c"},
    "/api/delete": {"rollout_ids": ["none"], "before_ns": 1},
    "/api/spans": {"spans": [SPAN]},
    "/api/calls": {
        "calls": [
            {
                "call_id": "c", "response_id": "r", "start_ns": 1, "end_ns": 2, "policy": "p", "policy_version": 0,
                "choices": [{"index": 0, "token_ids": [1], "logprobs": [0.1], "finish_reason": "stop", "message": {}}],
            }
        ]
    },
    "/api/policies/pause": {"model": "policy", "drain_s": 0.01},
    "/api/policies/resume": {"model": "policy", "version": 1},
    "/api/policies/adapters": {"checkpoint": "/nowhere", "version": 1},
}  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, -(2**63), 1.5, -0.0, 1e308, 1e-320, "", "x", "\0",
    "\U0001f600", "\u202e", "\ud800", "x" * 5000, "1", "null", "{}", [], [[]], [None], [1], ["x"], [{}], [-1], [2**40],
    [True], [0.5], [1, "x", None, {}], {}, {"": None}, {"type": "text"}, {"type": []}, {"role": "user"}, {"1": "x"},
    {"a": {"b": {"c": [1]}}}, {"type": "object", "properties": []}, {"$ref": "http://169.254.169.254/"},
    "data:image/png;base64,xx",
]  # fmt: skip
_ENDS = ("[DONE]", "message_stop", "response.completed", "response.incomplete", "response.failed", '"error"')


def broken(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a body with one to three values of another type, left out, or added."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = [place for place in _places(body) if place]
        if not places:
            break
        *way, last = rng.choice(places)
        holder: Any = body
        for step in way:
            holder = holder[step]
        kind = rng.random()
        if kind < 0.75:
            holder[last] = copy.deepcopy(rng.choice(ODD))
        elif kind < 0.9:
            del holder[last]
        elif isinstance(holder, dict):
            holder[rng.choice(["type", "role", "content", "x", "name", "id", "text"])] = copy.deepcopy(rng.choice(ODD))
        else:
            holder.append(copy.deepcopy(rng.choice(ODD)))
    return body


def _places(value: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield way
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from _places(inner, (*way, name))


def sparse(path: str, body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Leave most optional fields out, or nearly every request is refused for its first broken one."""
    if not path.startswith("/v1/") or path == "/v1/traces":
        return body
    needed = {"messages", "prompt", "input", "max_tokens"}
    kept = {name: value for name, value in body.items() if name in needed or rng.random() < 0.15}
    return {"model": "policy", **kept}


def complaint(path: str, reply: httpx.Response) -> str | None:
    """Say what is wrong with an answer to a broken request; None: nothing."""
    if reply.status_code >= 500:
        return f"{reply.status_code}: {reply.text[:200]}"
    if reply.status_code >= 400:
        return None if _well_formed(path, reply) else f"another shape: {reply.text[:200]}"
    if "event-stream" in reply.headers.get("content-type", "") and not any(end in reply.text for end in _ENDS):
        return f"a stream without an end: {reply.text[-200:]}"
    return None


def _well_formed(path: str, reply: httpx.Response) -> bool:
    try:
        body = reply.json()
        error = body["error"]
    except (ValueError, KeyError, TypeError):
        return False
    anthropic = path.startswith("/v1/messages")
    told = isinstance(error.get("message"), str) and len(error["message"]) > 5 and isinstance(error.get("type"), str)
    return told and (body.get("type") == "error") == anthropic


async def flood(url: str, key: str, *, requests: int, seed: int, at_once: int = 16) -> tuple[Counter[Any], list[str]]:
    """Send broken requests; give the statuses by path, and what was answered otherwise than it must be."""
    rng, statuses, wrong = random.Random(seed), Counter[Any](), []
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:

        async def one(path: str, body: bytes) -> None:
            try:
                reply = await client.post(path, content=body)
            except httpx.HTTPError as error:
                wrong.append(f"{path}: {type(error).__name__}: {body[:1000]!r}")
                return
            statuses[path, reply.status_code] += 1
            if (said := complaint(path, reply)) is not None:
                wrong.append(f"{path}: {said}: {body[:1000]!r}")

        for _ in range(0, requests, at_once):
            chosen = rng.choices(list(WHOLE.items()), k=at_once)
            bodies = [(path, broken(sparse(path, body, rng), rng)) for path, body in chosen]
            await asyncio.gather(*(one(path, json.dumps(body).encode()) for path, body in bodies))
    return statuses, wrong


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from support.fakes import FakeEngine, served

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), FakeEngine()) as server:
        key = server.keys.issue("admin")
        statuses, wrong = asyncio.run(flood(server.url, key, requests=given.requests, seed=given.seed))
    for (path, status), number in sorted(statuses.items()):
        print(f"{path:32} {status} {number:8}")
    print(f"{sum(statuses.values())} answers, {len(wrong)} wrong")
    for one in wrong[:20]:
        print(one)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
