"""A request of OpenAI's Responses as a chat completion asks for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from lightning_trainer.server.fields import flag, wrong
from lightning_trainer.server.refusals import bad_request

_TRANSLATED: Final = frozenset({
    "input", "instructions", "tools", "tool_choice", "text", "max_output_tokens", "reasoning", "include", "truncation",
    "previous_response_id", "conversation", "background", "prompt", "store", "stream", "stream_options", "metadata",
    "max_tool_calls", "top_logprobs", "context_management",
})  # fmt: skip
_REFUSED: Final = ("conversation", "background", "prompt", "max_tool_calls", "context_management")
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDED: Final = frozenset({_LOGPROBS, "reasoning.encrypted_content"})  # the latter: there is none to send


def chat_of_response(body: Mapping[str, Any], before: list[dict[str, Any]]) -> dict[str, Any]:
    """Translate a request.

    Args:
        body: as received.
        before: the messages of the response that it goes on from.

    Raises:
        Refusal: it is malformed, or asks for what no chat completion does.
    """
    for name in _REFUSED:
        if body.get(name):
            raise bad_request(f"{name} is not done here. Leave it out.", "unsupported_parameter")
    if body.get("truncation") not in (None, "disabled"):
        raise bad_request("truncation is not done here: a context too long is an error.", "unsupported_parameter")
    chat = {name: value for name, value in body.items() if name not in _TRANSLATED}
    instructions = body.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat["messages"] = [*system, *before, *messages_of_input(body.get("input"))]
    if tools := body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in _list("tools", tools)]
    if body.get("tool_choice") is not None:
        chat["tool_choice"] = _tool_choice(body["tool_choice"])
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if flag(body, "stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return chat | _reasoning(body.get("reasoning")) | _format(body.get("text")) | _logprobs(body)


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    included = body.get("include") or []
    for name in _list("include", included):
        if name not in tuple(_INCLUDED):
            raise bad_request(f"include {name!r} is not done here. There is: {', '.join(sorted(_INCLUDED))}.")
    chat: dict[str, Any] = {"logprobs": True} if _LOGPROBS in included else {}
    return chat | ({"top_logprobs": body["top_logprobs"]} if body.get("top_logprobs") else {})


def _reasoning(value: Any) -> dict[str, Any]:
    """Give the effort; a summary is never made here, and asking for one changes no answer."""
    effort = value.get("effort") if isinstance(value, dict) else None
    return {} if effort is None else {"reasoning_effort": effort}


def _format(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise wrong("text", value, "an object")
    chat = {"verbosity": value["verbosity"]} if value.get("verbosity") is not None else {}
    wanted = value.get("format")
    if wanted is None or wanted == {"type": "text"}:
        return chat
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        described = {name: part for name, part in wanted.items() if name != "type"}
        return {**chat, "response_format": {"type": "json_schema", "json_schema": described}}
    return {**chat, "response_format": wanted}


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, dict) else tool
        raise bad_request(f"tool {kind!r} runs at OpenAI only. Give function tools.", "unsupported_tool")
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    raise wrong("tool_choice", choice, 'auto, none, required or {"type": "function", "name": ...}')


def messages_of_input(value: Any) -> list[dict[str, Any]]:
    """Give the messages of an input: a text, or a list of items.

    An answer comes back as several items (reasoning, text, calls): together they are one message of the assistant.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    thought = ""
    for at, item in enumerate(_list("input", value)):
        where = f"input[{at}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "reasoning":
            thought = "".join(_thoughts(item, where))
        elif kind == "message":
            messages.append(_message(item, where))
        elif kind == "function_call":
            _add_call(messages, item, thought)
        elif kind == "function_call_output":
            content = _content(item.get("output"), where)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise bad_request(f"{where}: an item of type {kind!r} is not taken.", "unsupported_content")
        if kind != "reasoning" and thought:
            if messages[-1]["role"] == "assistant":
                messages[-1].setdefault("reasoning_content", thought)
            thought = ""
    if not messages:
        raise wrong("input", value, "a text or a list with at least one message")
    return messages


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], thought: str) -> None:
    function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    if thought or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _thoughts(item: Mapping[str, Any], where: str) -> Iterator[str]:
    for part in _list(f"{where}: content or summary", item.get("content") or item.get("summary") or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {"role": item.get("role"), "content": _content(item.get("content"), where)}


def _content(value: Any, where: str) -> Any:
    if isinstance(value, str):
        return value
    parts = [_part(part, where) for part in _list(where, value)]
    return parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("input_text", "output_text", "text") and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal":
        return {"type": "refusal", "refusal": part.get("refusal")}
    if kind == "input_image" and isinstance(part.get("image_url"), str):
        detail = {} if part.get("detail") is None else {"detail": part["detail"]}
        return {"type": "image_url", "image_url": {"url": part["image_url"], **detail}}
    raise bad_request(f"{where}: content of type {kind!r} is not taken.", "unsupported_content")


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise wrong(where, value, "a list")
    return value
