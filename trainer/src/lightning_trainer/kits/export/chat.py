"""The content of a model call, as messages and tools in the form that chat templates and other trainers take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lightning_spans.schema.json import dumps
from lightning_spans.schema.transitions import Transition
from lightning_trainer.gateway.formats.arguments import as_data
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.surfaces.responses_request import messages_of_input
from lightning_trainer.kits.export.asked import UnreadableError, read_request
from lightning_trainer.kits.export.wanted import UnexportedReason

Message = dict[str, Any]
THOUGHTS: Final = "reasoning_content"
_OTHER_THOUGHTS: Final = "reasoning"  # the name in newer vLLM and OpenRouter
# In lower case: the reasons of OpenAI's APIs, and those of Anthropic, Google and Bedrock as frameworks record them.
_CUT: Final = {
    **dict.fromkeys(
        ("length", "max_output_tokens", "max_tokens", "model_context_window_exceeded"), UnexportedReason.CUT
    ),
    **dict.fromkeys(
        ("content_filter", "content_filtered", "guardrail_intervened", "refusal", "safety"), UnexportedReason.FILTERED
    ),
    **dict.fromkeys(("blocklist", "prohibited_content", "recitation", "spii"), UnexportedReason.FILTERED),
}
_KEPT = ("name", "tool_call_id", THOUGHTS)


@dataclass(frozen=True, slots=True)
class CallChat:
    """One model call as a conversation.

    Attributes:
        messages: of the request.
        answer: the model's message.
        tools: tools that it could call, in OpenAI's form.
    """

    messages: tuple[Message, ...]
    answer: Message
    tools: tuple[Any, ...]

    @property
    def whole(self) -> list[Message]:
        """All messages, with the answer last."""
        return [*self.messages, self.answer]


def exchange(call: Transition) -> CallChat:
    """Return a call as a conversation.

    Raises:
        UnreadableError: it has no messages, one that is not text, or no complete answer.
    """
    messages, tools = read_request(call.request)
    if (reason := (call.finish_reason or "").lower()) in _CUT:
        raise UnreadableError(_CUT[reason])
    said = call.message
    if isinstance(said.get("output"), list):
        said = _said_in(said["output"])
    answer = plain({**said, "role": "assistant"})
    if not answer["content"] and not answer.get("tool_calls"):
        raise UnreadableError(UnexportedReason.NO_ANSWER)
    found = CallChat(tuple(plain(message) for message in messages), answer, tuple(tools))
    if not is_text([*found.whole, *tools]):
        raise UnreadableError(UnexportedReason.HALF)
    return found


def _said_in(output: list[Any]) -> Message:
    try:
        return messages_of_input(output)[-1]
    except Refusal:
        raise UnreadableError(UnexportedReason.NO_ANSWER) from None


def is_text(value: Any) -> bool:
    """Whether UTF-8 can encode all of it: no half of an emoji, which no tokenizer and few readers accept."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def plain(message: Any) -> Message:
    """Return a message in the form of templates: content as text, arguments of tools as data, no None values.

    A developer message becomes a system message: most templates know no other role, and some drop unknown ones.

    Raises:
        UnreadableError: its content is more than text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UnreadableError(UnexportedReason.NO_MESSAGES)
    if message.get("function_call"):  # from before tools existed: no template writes it
        raise UnreadableError(UnexportedReason.NO_FUNCTION)
    role = "system" if message["role"] == "developer" else message["role"]  # as in the gateway's prompts
    found: Message = {"role": role, "content": _text(message.get("content"))}
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
        raise UnreadableError(UnexportedReason.NOT_TEXT)
    return "\n".join(read)  # the gateway and vLLM join them in this way


def _tool_call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UnreadableError(UnexportedReason.NO_MESSAGES)
    # text that is not JSON stays text, as in the gateway's prompts
    arguments = as_data(function.get("arguments") or "{}")
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def comparison_keys(messages: Sequence[Message]) -> list[bytes]:
    """Return each message as bytes for comparison, without ids, which programs generate anew."""
    return [
        dumps([m["role"], m["content"], m.get(THOUGHTS), [call["function"] for call in m.get("tool_calls", ())]])
        for m in messages
    ]
