"""Anthropic's request as a chat completion asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import orjson

from lightning_trainer.server.fields import flag, wrong
from lightning_trainer.server.refusals import Refusal, bad_request

_TRANSLATED: Final = frozenset({
    "system", "messages", "tools", "tool_choice", "stop_sequences", "max_tokens", "metadata", "thinking",
    "output_config", "output_format", "service_tier", "cache_control", "inference_geo", "stream",
})  # fmt: skip


def chat_of_messages(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a request.

    What bears on cost and bookkeeping only (``cache_control``, ``metadata``, ``service_tier``) is left out.

    Raises:
        Refusal: it is malformed, or asks for what no chat completion does.
    """
    chat = {name: value for name, value in body.items() if name not in _TRANSLATED}
    chat["messages"] = [*_system(body.get("system")), *_messages(body.get("messages"))]
    if body.get("max_tokens") is None:
        raise wrong("max_tokens", None, "a whole number: this form demands it")
    chat["max_tokens"] = body["max_tokens"]
    if tools := body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in _list("tools", tools)]
    chat |= _tool_choice(body.get("tool_choice"))
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if flag(body, "stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    thinking = body.get("thinking")
    if thinking is not None and not (isinstance(thinking, dict) and thinking.get("type") == "disabled"):
        raise bad_request(
            "thinking can't be turned on here: these models have no budget for it. Leave thinking out.",
            "unsupported_parameter",
        )
    return chat | _format(body)


def _format(body: Mapping[str, Any]) -> dict[str, Any]:
    config = body.get("output_config") or {}
    if not isinstance(config, dict) or config.keys() - {"format"}:
        raise bad_request("output_config: only its format is taken.", "unsupported_parameter")
    wanted = config.get("format") or body.get("output_format")
    if wanted is None:
        return {}
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        raise wrong("output_format", wanted, '{"type": "json_schema", "schema": ...}')
    described = {"name": "output", "schema": wanted.get("schema"), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def _system(value: Any) -> Iterator[dict[str, Any]]:
    text = value if isinstance(value, str) or value is None else "\n".join(_texts("system", value))
    if text:
        yield {"role": "system", "content": text}


def _messages(value: Any) -> Iterator[dict[str, Any]]:
    messages = _list("messages", value)
    if not messages:
        raise wrong("messages", value, "a list with at least one message")
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role == "system":
            yield from _system(message.get("content"))
            continue
        if role not in ("user", "assistant"):
            raise wrong(f"{where}.role", role, "user or assistant")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else _list(f"{where}.content", content)
        yield from _assistant(blocks, where) if role == "assistant" else _user(blocks, where)


def _assistant(blocks: Sequence[Any], where: str) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = _kind(block)
        if kind == "text":
            texts.append(_text(block, where))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": orjson.dumps(block.get("input") or {}).decode()}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind != "redacted_thinking":  # encrypted: no model here could read it
            raise _unknown(kind, where)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    yield message


def _user(blocks: Sequence[Any], where: str) -> Iterator[dict[str, Any]]:
    """Give tool results as messages of their own, and what stands around them as the user's."""
    own: list[dict[str, Any]] = []
    for block in blocks:
        kind = _kind(block)
        if kind == "text":
            own.append({"type": "text", "text": _text(block, where)})
        elif kind == "image":
            own.append(_image(block, where))
        elif kind == "tool_result":
            if own:
                yield _said(own)
                own = []
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block, where)}
        else:
            raise _unknown(kind, where)
    if own:
        yield _said(own)


def _said(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts}


def _result(block: Mapping[str, Any], where: str) -> Any:
    content = block.get("content")
    if isinstance(content, list) and any(_kind(part) == "image" for part in content):
        return [_image(part, where) if _kind(part) == "image" else part for part in content]
    text = content if isinstance(content, str) else "\n".join(_texts(where, content or []))
    # The common form has no place for the flag, and the model must see it.
    return f"Error: {text}" if block.get("is_error") and not text.lower().startswith("error") else text


def _image(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif isinstance(source, dict) and kind == "url":
        url = str(source.get("url"))
    else:
        raise wrong(f"{where}: image.source", source, "of type base64 or url")
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise bad_request(f"tool {kind!r} runs at Anthropic only. Give tools of your own.", "unsupported_tool")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {"type": "object"}}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> dict[str, Any]:
    if choice is None:
        return {}
    kind = _kind(choice)
    if kind not in {"auto", "any", "none", "tool"}:
        raise wrong("tool_choice", choice, 'of type "auto", "any", "tool" or "none"')
    named = {"type": "function", "function": {"name": choice.get("name")}}
    chat: dict[str, Any] = {"tool_choice": {"any": "required", "tool": named}.get(kind, kind)}
    if flag(choice, "disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    return chat


def _kind(block: Any) -> str:
    return str(block.get("type")) if isinstance(block, dict) else type(block).__name__


def _text(block: Mapping[str, Any], where: str) -> str:
    if not isinstance(block.get("text"), str):
        raise wrong(f"{where}: text", block.get("text"), "a text")
    return str(block["text"])


def _texts(where: str, blocks: Any) -> list[str]:
    for block in _list(where, blocks):
        if _kind(block) != "text":
            raise _unknown(_kind(block), where)
    return [_text(block, where) for block in blocks]


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(where, value, "a list")
    return value


def _unknown(kind: str, where: str) -> Refusal:
    return bad_request(f"{where}: content of type {kind!r} is not taken.", "unsupported_content")
