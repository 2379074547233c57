"""Requests for token ids and log-probabilities beyond OpenAI's API, and how servers identify themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

from lightning_spans.schema.json import read_json

# vLLM and this gateway: in chunks too. SGLang: only in whole replies; it rejects them for streams. plain: never.
Dialect: TypeAlias = Literal["vllm", "lightning", "sglang", "plain"]
_KNOWN: Final[tuple[Dialect, ...]] = ("vllm", "lightning", "sglang")


def dialect_of(listed: bytes) -> Dialect:
    """Read a server's kind from ``GET /v1/models``."""
    try:
        owners = {model.get("owned_by") for model in read_json(listed).get("data") or ()}
    except (ValueError, AttributeError, TypeError):
        return "plain"
    return next((known for known in _KNOWN if known in owners), "plain")


def asking(dialect: Dialect, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request, chat or completion, that also asks for tokens if the server can send them."""
    if dialect == "plain":
        return native(body)
    asked = {**native(body), "return_token_ids": True}
    if "prompt" in body:
        asked["logprobs"] = body.get("top_logprobs") or (1 if dialect == "sglang" else 0)
    else:
        asked["logprobs"] = True
    if body.get("stream") is True:  # the token count shows whether all their ids arrived
        asked["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    if dialect == "sglang":
        for name in ("stream", "stream_options"):
            asked.pop(name, None)
    return asked


def native(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request in the format of ``/chat/completions`` or ``/completions``, which counts log-probabilities."""
    if "prompt" not in body:
        return dict(body)
    asked = {name: value for name, value in body.items() if name not in {"logprobs", "top_logprobs"}}
    return {**asked, "logprobs": body.get("top_logprobs") or 0} if body.get("logprobs") else asked


def as_chat(reply: dict[str, Any]) -> dict[str, Any]:
    """Return a reply of ``/completions``, whole or a chunk, in the format of a chat completion."""
    for choice in reply.get("choices") or ():
        if isinstance(choice, dict) and "text" in choice:
            choice["delta"] = {"content": choice.pop("text")}
            choice["logprobs"] = _content(choice.get("logprobs"))
    return reply


def _content(given: Any) -> dict[str, Any] | None:
    if not isinstance(given, dict) or not isinstance(given.get("tokens"), list):
        return None
    logprobs, tops = given.get("token_logprobs") or [], given.get("top_logprobs") or []
    content = []
    for at, (token, logprob) in enumerate(zip(given["tokens"], logprobs, strict=False)):
        top = tops[at] if at < len(tops) else None
        others = [{"token": name, "logprob": value} for name, value in (top or {}).items()]
        content.append({"token": token, "logprob": logprob, "bytes": None, "top_logprobs": others})
    return {"content": content}


def chunks_of(completion: Mapping[str, Any], *, usage: bool) -> list[dict[str, Any]]:
    """Split a whole completion into the chunks of a stream, for servers that send tokens only in whole replies."""
    head = {name: value for name, value in completion.items() if name not in {"choices", "usage"}}
    head["object"] = "chat.completion.chunk"
    chunks = []
    for choice in completion.get("choices") or ():
        delta = dict(choice.get("message") or choice.get("delta") or {})
        if calls := delta.get("tool_calls"):
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        news = {name: value for name, value in choice.items() if name not in {"message", "delta"}}
        chunks.append({**head, "choices": [{**news, "delta": delta}]})
    return [*chunks, {**head, "choices": [], "usage": completion.get("usage")}] if usage else chunks
