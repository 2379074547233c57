"""LangChain's objects in the words of the wire: tool arguments and results, and the bodies of calls made elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import BaseMessage, ToolMessage, convert_to_openai_messages
from langchain_core.outputs import LLMResult

from lightning_openai.elsewhere import to_json
from lightning_spans.spans import Json


def tool_result(output: Any) -> tuple[str, ToolMessage | None]:
    """Give a tool's result as text, and the message that carries it, where there is one."""
    message = _message_of(output)
    content = message.content if message is not None else output
    return content if isinstance(content, str) else to_json(content), message


def _message_of(output: Any) -> ToolMessage | None:
    """Find the message in a tool's output: itself, or inside a LangGraph `Command` or a list."""
    if isinstance(output, ToolMessage):
        return output
    update = getattr(output, "update", None)
    messages = update.get("messages") if isinstance(update, dict) else output if isinstance(output, list) else None
    found = [message for message in messages or () if isinstance(message, ToolMessage)]
    return found[-1] if found else None


def request_text(messages: Sequence[BaseMessage] | str, params: Mapping[str, Any]) -> str:
    """Give what was asked of a model that the wire does not see, as the body of a chat completion."""
    given = [{"role": "user", "content": messages}] if isinstance(messages, str) else _to_openai(messages)
    rest = {name: value for name, value in params.items() if value is not None and not name.startswith("_")}
    return to_json({**rest, "messages": given})


def response_body(result: LLMResult) -> dict[str, Json]:
    """Give what such a model answered, as a chat completion."""
    generations = result.generations[0] if result.generations else []
    choices = []
    for index, generation in enumerate(generations):
        message = getattr(generation, "message", None)
        info = {**(generation.generation_info or {}), **(getattr(message, "response_metadata", None) or {})}
        body = _to_openai([message])[0] if message is not None else {"role": "assistant", "content": generation.text}
        reason = info.get("finish_reason") or info.get("stop_reason") or info.get("done_reason")
        choices.append({"index": index, "message": body, "finish_reason": reason})
    first = getattr(generations[0], "message", None) if generations else None
    metadata = getattr(first, "response_metadata", None) or {}
    usage = getattr(first, "usage_metadata", None) or {}
    return {
        "id": metadata.get("id"),
        "object": "chat.completion",
        "model": metadata.get("model_name") or metadata.get("model"),
        "choices": choices,
        "usage": {"prompt_tokens": usage.get("input_tokens"), "completion_tokens": usage.get("output_tokens")},
    }


def _to_openai(messages: Sequence[BaseMessage]) -> list[dict[str, Json]]:
    converted = convert_to_openai_messages(messages)
    return converted if isinstance(converted, list) else [converted]
