"""What was said in a model call, as the messages and tools that chat templates and other trainers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from lightning_spans.schema.json import dumps, loads
from lightning_spans.schema.transitions import Transition
from lightning_trainer.export.wanted import CUT, NO_ANSWER, NO_MESSAGES, NOT_TEXT
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.surfaces.responses_request import messages_of_input

Message = dict[str, Any]
THOUGHTS: Final = "reasoning_content"
_OTHER_THOUGHTS: Final = "reasoning"  # as newer vLLM and OpenRouter name it
_KEPT = ("name", "tool_call_id", THOUGHTS)


class UnreadableError(Exception):
    """A call can't be told as a conversation; the text is the reason."""


@dataclass(frozen=True, slots=True)
class CallChat:
    """One model call as a conversation.

    Attributes:
        messages: what was asked.
        answer: what the model said.
        tools: those that it might call, in OpenAI's shape.
    """

    messages: tuple[Message, ...]
    answer: Message
    tools: tuple[Any, ...]

    @property
    def whole(self) -> list[Message]:
        """All messages, the answer last."""
        return [*self.messages, self.answer]


def exchange(call: Transition) -> CallChat:
    """Read a call.

    Raises:
        UnreadableError: it has no messages, one that is no text, or no whole answer.
    """
    messages = _asked(call.request)
    if call.finish_reason == "length":
        raise UnreadableError(CUT)
    said = call.message
    if isinstance(said.get("output"), list):
        output = _items(said["output"], NO_ANSWER)
        said = output[-1]
    answer = plain({**said, "role": "assistant"})
    if not answer["content"] and not answer.get("tool_calls"):
        raise UnreadableError(NO_ANSWER)
    return CallChat(tuple(plain(message) for message in messages), answer, _tools(call.request))


def _asked(request: Mapping[str, Any]) -> list[Any]:
    messages = request.get("messages")
    if messages is None and "input" in request:
        instructions = request.get("instructions")
        system = [{"role": "system", "content": instructions}] if isinstance(instructions, str) else []
        messages = [*system, *_items(request["input"], NO_MESSAGES)]
    if not isinstance(messages, list) or not messages:
        raise UnreadableError(NO_MESSAGES)
    return messages


def _items(items: Any, reason: str) -> list[Message]:
    try:
        return messages_of_input(items)
    except Refusal:
        raise UnreadableError(reason) from None


def plain(message: Any) -> Message:
    """Return a message as templates take it: content as text, arguments of tools as data, nothing that is None.

    Raises:
        UnreadableError: its content is more than text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UnreadableError(NO_MESSAGES)
    found: Message = {"role": message["role"], "content": _text(message.get("content"))}
    found |= {name: message[name] for name in _KEPT if message.get(name) is not None}
    if THOUGHTS not in found and isinstance(message.get(_OTHER_THOUGHTS), str):
        found[THOUGHTS] = message[_OTHER_THOUGHTS]
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_tool_call(call) for call in calls]
    return found


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None for part in parts]
    read = [text for text in texts if isinstance(text, str)]
    if len(read) < len(texts):
        raise UnreadableError(NOT_TEXT)
    return "\n".join(read)  # as the gateway and vLLM join them


def _tool_call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UnreadableError(NO_MESSAGES)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # what the model wrote is no JSON: it stays text, as in the gateway's prompts
            arguments = loads(arguments or "{}")
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(request: Mapping[str, Any]) -> tuple[Any, ...]:
    tools = request.get("tools")
    if not isinstance(tools, list):
        return ()
    return tuple(
        tool if "function" in tool else {"type": "function", "function": {n: v for n, v in tool.items() if n != "type"}}
        for tool in tools
        if isinstance(tool, Mapping)
    )


def spoken(messages: Sequence[Message]) -> list[bytes]:
    """Return each message as bytes by which it is compared, without ids, which programs make anew."""
    return [
        dumps([m["role"], m["content"], m.get(THOUGHTS), [call["function"] for call in m.get("tool_calls", ())]])
        for m in messages
    ]
