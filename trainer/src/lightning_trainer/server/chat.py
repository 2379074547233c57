"""The chat format: messages and tools to token ids, with the tokenizer's own template.

A conversation continues token for token: when the new prompt's text begins with an earlier prompt of the attempt and
the answer sampled there, those tokens are used as they were, and only what follows is tokenized. Text made into tokens
again would often give other tokens than those sampled.
"""

from __future__ import annotations

import functools
from array import array
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from lightning_trainer.server.refusals import bad_request

Message = Mapping[str, Any]
_PROBE: Final = "lightning_probe_tool"
_TURNS_OF_ATTEMPT: Final = 64  # the newest; parallel branches rarely go further back


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine gets, as text and as token ids."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Turn:
    text: str  # prompt and answer, special tokens included
    ids: array[int]
    answer: str  # as sampled, without special tokens
    message: Message  # as the agent got it

    @property
    def call_id(self) -> str | None:
        """The id of its first tool call, by which it is known again."""
        calls = self.message.get("tool_calls")
        return calls[0]["id"] if calls else None

    @property
    def size(self) -> int:
        """About its characters."""
        return len(self.text) + 2 * len(self.answer)


class _Memory:
    """The newest turns of one attempt; those with tool calls also by the id of their first call."""

    __slots__ = ("calls", "size", "turns")

    def __init__(self) -> None:
        self.turns: deque[_Turn] = deque()
        self.calls: dict[str | None, _Turn] = {}
        self.size = 0

    def add(self, turn: _Turn) -> None:
        self.turns.append(turn)
        self.size += turn.size
        if turn.call_id is not None:
            self.calls[turn.call_id] = turn
        if len(self.turns) > _TURNS_OF_ATTEMPT:
            oldest = self.turns.popleft()
            self.size -= oldest.size
            self.calls.pop(oldest.call_id, None)


class ChatFormat:
    """Renders conversations for one tokenizer. Not to be used by two threads at once."""

    def __init__(self, tokenizer: Any, *, remembered_chars: int = 64_000_000) -> None:
        self._tokenizer = tokenizer
        self._remembered_chars = remembered_chars
        self._memories: OrderedDict[str, _Memory] = OrderedDict()
        self._size = 0

    @functools.cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {}}}
        return _PROBE in self._template([{"role": "user", "content": "hi"}], [tool])

    def prompt(self, messages: Sequence[Message], tools: Sequence[Message], attempt_id: str | None = None) -> Prompt:
        """Render a conversation, ending where the assistant's answer begins.

        Args:
            messages: in OpenAI's shape.
            tools: those the model may call.
            attempt_id: whose earlier answers may be continued token for token; None: nobody's.

        Raises:
            Refusal: the template has no place for tools, or refuses the conversation.
        """
        if tools and not self.takes_tools:
            raise bad_request(
                "the model's chat template has no section for tools, so the model would never see them."
                " Start the trainer or server with --chat-template hermes, or with a template of your own.",
                "tools_not_supported",
            )
        memory = self._memories.get(attempt_id) if attempt_id is not None else None
        if memory is not None:
            text = self._template([_for_template(message, memory) for message in messages], tools)
            turn = max((t for t in memory.turns if text.startswith(t.text)), key=lambda t: len(t.text), default=None)
            if turn is not None:
                return Prompt(text, (*turn.ids, *self._encode(text[len(turn.text) :])))
        text = self._template([_for_template(message, None) for message in messages], tools)
        return Prompt(text, tuple(self._encode(text)))

    def remember(self, attempt_id: str, prompt: Prompt, ids: Sequence[int], text: str, message: Message) -> None:
        """Keep an answer, so that the attempt's next prompts continue its tokens.

        Args:
            attempt_id: who sampled it.
            prompt: what it answers.
            ids: as sampled, the end of turn included.
            text: of the ids, special tokens left out.
            message: as the agent got it.
        """
        memory = self._memories.setdefault(attempt_id, _Memory())
        self._memories.move_to_end(attempt_id)
        self._size -= memory.size
        memory.add(_Turn(prompt.text + self.decode(ids), array("i", (*prompt.ids, *ids)), text, message))
        self._size += memory.size
        while self._size > self._remembered_chars and len(self._memories) > 1:
            self.forget(next(iter(self._memories)))

    def forget(self, attempt_id: str) -> None:
        """Drop what an attempt sampled; it has ended."""
        memory = self._memories.pop(attempt_id, None)
        if memory is not None:
            self._size -= memory.size

    def decode(self, ids: Sequence[int]) -> str:
        """Give the text of tokens, special tokens included."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _template(self, messages: list[dict[str, Any]], tools: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise bad_request(f"the model's chat template refuses this conversation: {error}") from None
        return text


def _for_template(message: Message, memory: _Memory | None) -> dict[str, Any]:
    """Give a message as templates expect it: text content, arguments as data, tool calls as sampled where known."""
    role = "system" if message["role"] == "developer" else message["role"]
    out = {**message, "role": role, "content": joined(message.get("content"))}
    calls = message.get("tool_calls")
    if not calls:
        out.pop("tool_calls", None)
        return out
    known = memory.calls.get(calls[0].get("id")) if memory is not None else None
    if known is not None and _same(known.message, message):
        del out["tool_calls"]
        return {**out, "content": known.answer}
    out["tool_calls"] = [
        {**call, "function": {**call["function"], "arguments": _data(call["function"].get("arguments", "{}"))}}
        for call in calls
    ]
    return out


def joined(content: Any) -> str:
    """Give content as one text; text parts are joined by line breaks, as vLLM joins them."""
    if isinstance(content, list):
        return "\n".join(part["text"] if part["type"] == "text" else part["refusal"] for part in content)
    return content or ""


def _same(ours: Message, theirs: Message) -> bool:
    return joined(ours.get("content")) == joined(theirs.get("content")) and [
        _signature(call) for call in ours["tool_calls"]
    ] == [_signature(call) for call in theirs["tool_calls"]]


def _signature(call: Mapping[str, Any]) -> tuple[Any, ...]:
    return call.get("id"), call["function"]["name"], _data(call["function"].get("arguments", "{}"))


def _data(arguments: Any) -> Any:
    """Read arguments given as JSON text, so that a template's ``tojson`` writes them as data; other text stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
