"""The request of a model call of any API, as messages and tools in the form of chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.surfaces.messages_request import chat_of_messages
from lightning_trainer.gateway.surfaces.response_tools import ResponseTools
from lightning_trainer.gateway.surfaces.responses_request import Items
from lightning_trainer.kits.export.wanted import UnexportedReason

_EARLIER: Final = ("previous_response_id", "conversation")
_ANTHROPICS: Final = frozenset({"tool_use", "tool_result", "thinking", "redacted_thinking"})


class UnreadableError(Exception):
    """A call cannot be written as a conversation; the text is the reason."""


def read_request(request: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return messages and tools of a request.

    Raises:
        UnreadableError: it has no messages, not all of them, or tools that are not functions.
    """
    if any(request.get(name) for name in _EARLIER) or isinstance(request.get("prompt"), Mapping):
        raise UnreadableError(UnexportedReason.ELSEWHERE)
    if request.get("messages") is None and "input" in request:
        return _of_responses(request)
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UnreadableError(UnexportedReason.NO_MESSAGES)
    return _of_anthropic(request) if _is_anthropics(request) else (messages, list(_functions(request.get("tools"))))


def _of_responses(request: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    instructions = request.get("instructions")
    system = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
    try:
        items = Items(request["input"])
    except Refusal:
        raise UnreadableError(UnexportedReason.NO_MESSAGES) from None
    try:
        tools = ResponseTools([*(request.get("tools") or []), *items.tools], None).chat
    except (Refusal, TypeError):
        raise UnreadableError(UnexportedReason.NO_FUNCTION) from None
    return [*system, *items.messages], tools


def _is_anthropics(request: Mapping[str, Any]) -> bool:
    """Whether this is a request of Anthropic's Messages API: chat completions have none of these fields."""
    if "system" in request or any("input_schema" in tool for tool in _objects(request.get("tools"))):
        return True
    messages = _objects(request.get("messages"))
    return any(part.get("type") in _ANTHROPICS for message in messages for part in _objects(message.get("content")))


def _of_anthropic(request: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    said = {name: request[name] for name in ("system", "messages") if name in request}
    tools = {"messages": [{"role": "user", "content": ""}], "tools": request.get("tools")}
    try:
        messages = chat_of_messages({**said, "max_tokens": 1})[0]["messages"]
    except Refusal:
        raise UnreadableError(UnexportedReason.NOT_TEXT) from None
    try:
        return messages, chat_of_messages({**tools, "max_tokens": 1})[0].get("tools", [])
    except Refusal:
        raise UnreadableError(UnexportedReason.NO_FUNCTION) from None


def _functions(tools: Any) -> Iterator[Any]:
    for tool in _objects(tools):
        if isinstance(tool.get("function"), Mapping):
            yield tool
        elif isinstance(tool.get("name"), str):  # the form of some instrumentations
            yield {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}
        else:
            raise UnreadableError(UnexportedReason.NO_FUNCTION)


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []
