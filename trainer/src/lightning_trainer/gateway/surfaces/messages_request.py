"""Anthropic's request as a chat completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from lightning_spans.chat.body import tool_call
from lightning_trainer.gateway.formats.arguments import as_text
from lightning_trainer.gateway.http.errors import Refusal, bad_request
from lightning_trainer.gateway.request.effort import known_effort
from lightning_trainer.gateway.request.fields import flag, read_list, refuse_several_answers, wrong

_TRANSLATED: Final = frozenset({
    "system", "messages", "tools", "tool_choice", "stop_sequences", "max_tokens", "metadata", "thinking",
    "output_config", "output_format", "service_tier", "cache_control", "inference_geo", "stream", "context_management",
    "speed", "diagnostics", "user_profile_id", "workspace_id", "billing_policy", "fallback_credit_token", "fallbacks",
})  # fmt: skip
_HOSTED: Final = (  # prefixes of the dated names of tools that run at Anthropic
    "web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "mcp_toolset", "advisor_",
)  # fmt: skip
_CLEARED: Final = "clear_thinking_"  # which earlier reasoning is shown is the chat template's choice


def chat_of_messages(body: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Translate a request; return also what was left out because it is not needed, as it was requested.

    What concerns only cost and bookkeeping (``cache_control``, ``metadata``, ``service_tier``) is left out.

    Raises:
        Refusal: it is malformed, or requests what no chat completion supports.
    """
    refuse_several_answers(body)
    chat = {name: value for name, value in body.items() if name not in _TRANSLATED}
    chat["messages"] = [*_system(body.get("system")), *_messages(body.get("messages"))]
    if body.get("max_tokens") is None:
        raise wrong("max_tokens", None, "a whole number, which this API requires")
    chat["max_tokens"] = body["max_tokens"]
    tools, hosted = _tools(body)
    chat |= {"tools": tools} if tools else {}
    chat |= _tool_choice(body.get("tool_choice"))
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if flag(body, "stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    asked = _effort(body.get("thinking"), _config(body).get("effort"))
    chat |= {} if asked is None else {"reasoning_effort": known_effort(asked)}
    left_out = _context_management(body.get("context_management")) | ({"tools": hosted} if hosted else {})
    left_out |= {} if known_effort(asked) == asked else {"reasoning_effort": asked}
    return chat | _format(body), left_out


def refuse_prefill(chat: Mapping[str, Any]) -> None:
    """Reject a translated conversation that ends with the assistant, whose message the model would have to continue.

    Raises:
        Refusal: says what to do.
    """
    if any(message["role"] == "assistant" for message in chat["messages"][-1:]):
        raise bad_request(
            "messages: the last message is the assistant's. Continuing a begun answer (prefill) is not supported."
            " End with a message of the user. To get JSON, set output_config.format, or ask for it in that message.",
            "unsupported_content",
        )


def shows_thinking(body: Mapping[str, Any]) -> bool:
    """Whether a request asks for thinking blocks. Programs that do not may expect a text as the first block."""
    return _thinking(body.get("thinking")) not in {None, "disabled"}


def _thinking(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else value


def _effort(thinking: Any, effort: Any) -> Any:
    """Return the effort for a thinking setting. Its budget has no equivalent in templates; max_tokens is the limit.

    Raises:
        Refusal: it is malformed.
    """
    kind = _thinking(thinking)
    if kind not in {None, "enabled", "adaptive", "disabled"}:
        raise wrong("thinking", thinking, 'of type "enabled", "adaptive" or "disabled"')
    if kind == "disabled":
        return "none"
    return effort if effort is not None or kind is None else "medium"


def _context_management(value: Any) -> dict[str, Any]:
    """Return what is left out: which reasoning of earlier answers the model sees is its template's choice.

    Raises:
        Refusal: other parts of the conversation are to be changed.
    """
    if value is None:
        return {}
    edits = read_list("context_management", value.get("edits") if isinstance(value, dict) else value)
    for edit in edits:
        if not _kind(edit).startswith(_CLEARED):
            raise bad_request(f"context_management: {_kind(edit)!r} is not supported.", "unsupported_parameter")
    return {} if all(edit.get("keep") == "all" for edit in edits) else {"context_management": value}


def _config(body: Mapping[str, Any]) -> Mapping[str, Any]:
    config = body.get("output_config") or {}
    if not isinstance(config, dict):
        raise wrong("output_config", config, "an object")
    if others := config.keys() - {"format", "effort"}:
        listed_names = ", ".join(sorted(others))
        raise bad_request(
            f"output_config: {listed_names}: only format and effort are supported.", "unsupported_parameter"
        )
    return config


def _format(body: Mapping[str, Any]) -> dict[str, Any]:
    config = _config(body)
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
    messages = read_list("messages", value)
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
        blocks = (
            [{"type": "text", "text": content}] if isinstance(content, str) else read_list(f"{where}.content", content)
        )
        yield from _assistant(blocks, where) if role == "assistant" else _user(blocks, where)


def _assistant(blocks: Sequence[Any], where: str) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = _kind(block)
        if kind == "text":
            texts.append(_text(block, where))
        elif kind == "thinking":  # its signature is not checked: exact continuation recognises its own
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            arguments = as_text(block.get("input") or {})
            calls.append(tool_call(block.get("id"), block.get("name"), arguments))
        elif kind != "redacted_thinking":  # encrypted: no model here could read it
            raise _unknown(kind, where)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    yield message


def _user(blocks: Sequence[Any], where: str) -> Iterator[dict[str, Any]]:
    """Return tool results as separate messages, and the content around them as the user's."""
    own: list[dict[str, Any]] = []
    for block in blocks:
        kind = _kind(block)
        if kind == "text":
            own.append({"type": "text", "text": _text(block, where)})
        elif kind == "image":
            own.append(_image(block, where))
        elif kind == "tool_result":
            if own:
                yield _user_message(own)
                own = []
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _result(block, where)}
        else:
            raise _unknown(kind, where)
    if own:
        yield _user_message(own)


def _user_message(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": "user", "content": parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts}


def _result(block: Mapping[str, Any], where: str) -> Any:
    content = block.get("content")
    if isinstance(content, list) and any(_kind(part) == "image" for part in content):
        return [_image(part, where) if _kind(part) == "image" else part for part in content]
    text = content if isinstance(content, str) else "\n".join(_texts(where, content or []))
    # The common form has no field for the flag, and the model must see it.
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


def _tools(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the tools that run at the client, and those left out: tools that run at Anthropic, if there are others.

    Raises:
        Refusal: one is malformed, or cannot be left out.
    """
    given = read_list("tools", body.get("tools") or [])
    hosted = [tool for tool in given if _kind(tool).startswith(_HOSTED)]
    choice = body.get("tool_choice")
    wanted = choice.get("name") if isinstance(choice, dict) else None
    for tool in hosted:
        if len(hosted) == len(given) or tool.get("name") == wanted:
            raise _tool_refusal(_kind(tool))
    return [_tool(tool) for tool in given if tool not in hosted], [_kind(tool) for tool in hosted]


def _tool_refusal(kind: Any) -> Refusal:
    return bad_request(f"tool {kind!r} runs at Anthropic only. Give tools of your own.", "unsupported_tool")


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        if isinstance(kind, str) and kind.startswith(("bash_", "text_editor_", "computer_", "memory_")):
            raise bad_request(f"tool {kind!r} has no schema. Give it one.", "unsupported_tool")
        raise _tool_refusal(kind)
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
    for block in read_list(where, blocks):
        if _kind(block) != "text":
            raise _unknown(_kind(block), where)
    return [_text(block, where) for block in blocks]


def _unknown(kind: str, where: str) -> Refusal:
    return bad_request(f"{where}: content of type {kind!r} is not taken.", "unsupported_content")
