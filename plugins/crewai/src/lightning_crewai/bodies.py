"""What CrewAI's events say of a model call, in the words of chat completions."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from lightning_openai.elsewhere import to_json

if TYPE_CHECKING:
    from lightning_spans.spans import Json

_PARAMETERS: Final = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_tokens": "max_tokens",
    "stream": "stream",
    "seed": "seed",
    "stop_sequences": "stop",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "n": "n",
}
_taking: Final = threading.Lock()
_MARK: Final = "cache_breakpoint"  # CrewAI's own; it is taken out before a message is sent


class Asked(NamedTuple):
    """A tool call that a model asked for; `arguments` is JSON text."""

    call_id: str | None
    name: str
    arguments: str


def request_body(event: Any, llm: Any, messages: Any, tools: Any) -> dict[str, Json]:
    """Give the request of a call that starts, copied: messages and tools are the agent's, and may change."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body: dict[str, Json] = {"model": event.model, "messages": messages, "tools": tools or None}
    for key, name in _PARAMETERS.items():  # on the event since 1.14
        told = getattr(event, key, None)
        body[name] = getattr(llm, key, None) if told is None else told
    copied: dict[str, Json] = json.loads(to_json({name: value for name, value in body.items() if value is not None}))
    for message in copied.get("messages") or ():
        if isinstance(message, dict):
            message.pop(_MARK, None)
    return copied


def response_body(event: Any) -> dict[str, Json]:
    """Give the response of a call that is completed."""
    calls = list(asked_in(event.response))
    message: dict[str, Json] = {"role": "assistant", "content": None}
    if calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    elif event.response is not None:
        message["content"] = event.response if isinstance(event.response, str) else to_json(event.response)
    # Known since 1.14.7: why it ended, and its id; usage since 1.13.
    choice = {"index": 0, "message": message, "finish_reason": getattr(event, "finish_reason", None)}
    body = {"id": getattr(event, "response_id", None), "model": event.model, "usage": getattr(event, "usage", None)}
    kept = {name: value for name, value in body.items() if value is not None}
    return {"object": "chat.completion", **kept, "choices": [choice]}


def asked_in(response: Any) -> Iterator[Asked]:
    """Give the tool calls that an answer asks for, in whichever provider's format."""
    if not isinstance(response, Sequence) or isinstance(response, str):
        return
    for call in response:
        function = _get(call, "function") or call
        name = _get(function, "name")
        given = _first(function, "arguments", "input", "args")
        if isinstance(name, str) and given is not None:
            call_id = _first(call, "call_id", "id", "toolUseId")
            yield Asked(call_id, name, given if isinstance(given, str) else to_json(given))


def take_asked(asked: list[Asked], name: str, arguments: Any) -> Asked | None:
    """Take out the call that a tool makes: the same name and arguments, else the same name."""
    with _taking:  # tools that are called at once begin in threads
        same = [call for call in asked if call.name == name]
        exact = (call for call in same if call.arguments == arguments or _parsed(call.arguments) == arguments)
        found = next(exact, same[0] if same else None)
        if found is not None:
            asked.remove(found)
        return found


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _first(thing: Any, *keys: str) -> Any:
    return next((value for key in keys if (value := _get(thing, key)) is not None), None)


def _get(thing: Any, key: str) -> Any:
    return thing.get(key) if isinstance(thing, Mapping) else getattr(thing, key, None)
