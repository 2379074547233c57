"""The chat format: messages and tools to text and token ids, with the tokenizer's own template."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from lightning_trainer.server.hermes import parse
from lightning_trainer.server.plain_text import PlainText
from lightning_trainer.server.refusals import Refusal, bad_request

Message = Mapping[str, Any]
_PROBE: Final = "lightning_probe_tool"
_SAID: Final = "lightning_probe_said"


class ChatFormat:
    """Renders conversations for one tokenizer. Not to be used by two threads at once.

    Rendered texts hold marks in place of control tokens' text in messages: see `PlainText`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.plain = PlainText(tokenizer)

    @functools.cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {}}}
        return _PROBE in self._template([{"role": "user", "content": "hi"}], [tool])

    @functools.cached_property
    def writes_hermes(self) -> bool:
        """Whether the chat template writes tool calls as `hermes` reads them, so that models do."""
        tool = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {}}}
        user, call = {"role": "user", "content": _SAID}, {"name": _PROBE, "arguments": {"a": 1}}
        called = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function", "function": call}]}
        try:
            text = self._template([user, called, {**user, "content": "hi"}], [tool])
        except Refusal:
            return False
        return [call["function"]["name"] for call in parse(text.partition(_SAID)[2]).tool_calls] == [_PROBE]

    @functools.cached_property
    def thinks(self) -> bool:
        """Whether the chat template knows of thinking before an answer."""
        return "</think>" in str(self._tokenizer.chat_template)

    def render(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        """Render a conversation, ending where the assistant's answer begins.

        Args:
            messages: in OpenAI's shape.
            tools: those the model may call.

        Raises:
            Refusal: the template has no place for tools, or refuses the conversation.
        """
        if tools and not self.takes_tools:
            raise bad_request(
                "the model's chat template has no section for tools, so the model would never see them."
                " Start the trainer or server with --chat-template hermes, or with a template of your own.",
                "tools_not_supported",
            )
        return self._template(self.plain.marked([_for_template(each) for each in messages]), self.plain.marked(tools))

    def encode(self, text: str) -> list[int]:
        """Tokenize a rendered text, or a piece of one."""
        return self.plain.encode(text)

    def decode(self, ids: Sequence[int], *, control_tokens: bool = True) -> str:
        """Give the text of tokens, with that of control tokens or without."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=not control_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def normal(self, text: str) -> str:
        """Give a rendered text as the tokenizer reads it, which may be in another Unicode normal form, and no marks."""
        normalizer = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "normalizer", None)
        shown = self.plain.shown(text)
        return shown if normalizer is None else str(normalizer.normalize_str(shown))

    def _template(self, messages: list[dict[str, Any]], tools: Sequence[Message]) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tools=list(tools) or None, add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise bad_request(f"the model's chat template refuses this conversation: {error}") from None
        return text


def _for_template(message: Message) -> dict[str, Any]:
    """Give a message as templates expect it: text content, arguments as data."""
    role = "system" if message["role"] == "developer" else message["role"]
    out = {**message, "role": role, "content": joined(message.get("content"))}
    calls = message.get("tool_calls")
    if not calls:
        out.pop("tool_calls", None)
        return out
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


def _data(arguments: Any) -> Any:
    """Read arguments given as JSON text, so that a template's ``tojson`` writes them as data; other text stays text."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
