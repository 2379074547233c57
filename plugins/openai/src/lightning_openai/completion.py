"""Bodies of chat completions, written from the types of a framework.

A plugin whose framework reports model calls in types of its own (see `model_tracker.ModelTracker`) reads them, and
composes the recorded request and answer of these parts:

```python
calls = [tool_call(call.id, call.name, call.arguments) for call in answer.calls]
message = assistant_message(answer.text, calls)
usage = token_usage(answer.input_tokens, answer.output_tokens)
body = chat_completion((message, answer.stop_reason), model=answer.model, usage=usage)
```
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_spans.chat.body import tool_call as tool_call  # noqa: PLC0414 - plugins import it from here
from lightning_spans.schema.spans import Json

__all__ = [
    "assistant_message",
    "chat_completion",
    "chat_request",
    "finish_reason",
    "function_tool",
    "token_usage",
    "tool_message",
]


def chat_request(model: str | None, messages: Iterable[Any], tools: Sequence[Any] = ()) -> dict[str, Json]:
    """Return the body of a request. A plugin adds settings, such as ``temperature``, of its own.

    Args:
        model: the name of the model.
        messages: system, user, assistant and tool messages, in their order.
        tools: those that the model may call, as `function_tool` returns them. Without one, the body has no tools.
    """
    body: dict[str, Json] = {"model": model, "messages": list(messages)}
    return {**body, "tools": list(tools)} if tools else body


def chat_completion(*choices: tuple[Json, str | None], **known: Json) -> dict[str, Json]:
    """Return the body of an answer.

    Args:
        choices: message (see `assistant_message`) and finish reason of each choice; most answers have one. The reason
            is OpenAI's (``stop``, ``length``, ``tool_calls``), or the framework's own if OpenAI has none for it.
        known: other fields: ``id``, ``model``, and ``usage`` as `token_usage` returns it.
    """
    numbered = [
        {"index": index, "message": message, "finish_reason": reason} for index, (message, reason) in enumerate(choices)
    ]
    return {"object": "chat.completion", **known, "choices": numbered}


def assistant_message(content: Json, tool_calls: Sequence[Any] = ()) -> dict[str, Json]:
    """Return a model's message.

    Args:
        content: its text; None if it only calls tools.
        tool_calls: as `tool_call` returns them. Without one, the message has no such field.
    """
    message: dict[str, Json] = {"role": "assistant", "content": content}
    return {**message, "tool_calls": list(tool_calls)} if tool_calls else message


def finish_reason(message: Json) -> str:
    """Return the finish reason of a complete message, for frameworks that report none."""
    return "tool_calls" if message.get("tool_calls") else "stop"


def tool_message(call_id: str | None, content: Json) -> dict[str, Json]:
    """Return the message with a tool's result."""
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def function_tool(name: str, description: str | None, parameters: Json) -> dict[str, Json]:
    """Return a tool that a model may call. Parameters are a JSON schema."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def token_usage(prompt_tokens: int | None, completion_tokens: int | None) -> dict[str, Json]:
    """Return how many tokens a model read and wrote."""
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
