"""The chat format: messages and tools to text and token ids, with the tokenizer's own template."""

from __future__ import annotations

import functools
import hashlib
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.formats import probe
from lightning_trainer.gateway.formats.arguments import as_data, as_text
from lightning_trainer.gateway.formats.frames import HERMES, CallFrame, frame_of
from lightning_trainer.gateway.formats.reader import AnswerReader, Dialect, ParsedAnswer, parse
from lightning_trainer.gateway.formats.table import NONE, Format, Thinking, by_name, names
from lightning_trainer.gateway.http.errors import Refusal, bad_request
from lightning_trainer.gateway.prompt.marked_text import MarkedText
from lightning_trainer.gateway.prompt.plain_text import PlainText
from lightning_trainer.models.merged_messages import advice, are_merged, merges
from lightning_trainer.models.rendering import RenderError, render

Message = Mapping[str, Any]
Switches = Mapping[str, Any]  # variables of the template itself, such as enable_thinking


class ChatFormat:
    """Renders conversations for one tokenizer, and parses answers. Must not be used by two threads at once.

    Rendered texts have marks in place of control tokens' text in messages: see `PlainText`.

    Args:
        tokenizer: the model's.
        tool_format: name of the format of its tool calls; None: the one in which its chat template writes them.

    Raises:
        ConfigError: there is no such format.
    """

    def __init__(self, tokenizer: Any, tool_format: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        if tool_format is not None:
            by_name(tool_format)  # or reject
        self.plain = PlainText(tokenizer)

    @functools.cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return probe.takes_tools(self._render_probe)

    @functools.cached_property
    def _chosen(self) -> tuple[Format | None, probe.Form]:
        found = probe.detect_format(self._render_probe, str(self._tokenizer.chat_template), tuple(self.plain.controls))
        form = found[1] if found else probe.Form()
        if self._tool_format is not None:
            return by_name(self._tool_format), form
        return (found[0] if found else None), form

    @property
    def calls(self) -> Format | None:
        """The format of the model's tool calls; None if it is unknown."""
        return self._chosen[0]

    @functools.cached_property
    def frame(self) -> CallFrame | None:
        """The text around a call's name and arguments; None if the template does not show it."""
        if self.calls is None:
            return None
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        tokens = {token.content: number for number, token in added.items()}
        found = frame_of(self._render_probe, self.calls, self._chosen[1], tokens, self.plain.controls)
        return found or (replace(HERMES, tokens=tokens) if self.calls.name == "hermes" else None)

    @functools.cached_property
    def _thinking(self) -> tuple[Thinking | None, bool]:
        return probe.thinking_of(self._render_probe, str(self._tokenizer.chat_template), self.calls)

    @functools.cached_property
    def dialect(self) -> Dialect:
        """How the model writes."""
        thinking = self._thinking[0]
        wanted = [*(self.calls.controls if self.calls else ()), *((thinking.open, thinking.close) if thinking else ())]
        ids = {text: self._tokenizer.encode(text, add_special_tokens=False) for text in self.plain.controls & {*wanted}}
        return Dialect(self.calls, thinking, {found[0]: text for text, found in ids.items() if len(found) == 1})

    @property
    def thinks(self) -> bool:
        """Whether the model writes reasoning before an answer."""
        return self.dialect.thinking is not None

    def thought(self, ids: Sequence[int]) -> str | None:
        """Return the text of an answer's reasoning with its marks, for templates that look for it in the content."""
        if self._thinking[0] is None or self._thinking[1]:
            return None
        before, close, after = self.decode(ids, control_tokens=False).partition(self._thinking[0].close)
        return f"{before}{close}{after[: len(after) - len(after.lstrip())]}" if close else None

    def opened(self, prompt: str) -> bool:
        """Whether a rendered prompt ends within reasoning."""
        thinking = self.dialect.thinking
        return thinking is not None and prompt.rstrip().endswith(thinking.open.rstrip())

    def reader(self, tools: Sequence[Message], *, opened: bool) -> AnswerReader:
        """Return a reader that splits an answer to a conversation; it is fed by `text_of`."""
        return AnswerReader(self.dialect, tools, opened=opened)

    def text_of(self, stop: tuple[str, ...] = ()) -> MarkedText | None:
        """Return what converts an answer's tokens to a reader's text; None if the engine's own text will do."""
        return MarkedText(self._tokenizer, self.dialect.kept, stop) if self.dialect.kept else None

    def read(self, ids: Sequence[int], tools: Sequence[Message], *, opened: bool = False) -> ParsedAnswer:
        """Split a whole answer into its parts."""
        text = MarkedText(self._tokenizer, self.dialect.kept)
        return parse(self.dialect, text.push(ids) + text.finish(), tools, opened=opened)

    def parse(self, text: str, tools: Sequence[Message], *, opened: bool = False) -> ParsedAnswer:
        """Split an answer whose control tokens are present as text."""
        return parse(Dialect(self.dialect.calls, self.dialect.thinking), text, tools, opened=opened)

    def check_tools(self) -> None:
        """Check that tools reach the model, and that its calls are parsed.

        Raises:
            Refusal: they would not; the message says what to do.
        """
        if not self.takes_tools:
            raise bad_request(
                "the model's chat template has no section for tools, so the model would never see them."
                " Start the trainer or server with --chat-template hermes, or with a template of your own.",
                "tools_not_supported",
            )
        if self.calls is None:
            raise bad_request(self.unread_calls, "tool_format_unknown")
        if self.hidden_results is not None:
            raise bad_request(self.hidden_results, "tool_results_not_shown")

    @functools.cached_property
    def hidden_results(self) -> str | None:
        """Why no tool result would reach the model, and what to do; None if they do."""
        why = probe.results(self._render_probe, self._chosen[1]) if self.takes_tools else None
        if why is None:
            return None
        return (
            f"the model would never see the results of tools: {why}. Start with --chat-template hermes, or with a"
            f" template of your own, or with --tool-format {NONE} if no agent has tools."
        )

    @property
    def unread_calls(self) -> str:
        """Why no call of this model is parsed, and what to do."""
        if self._tool_format == NONE:
            return (
                f"tool format {NONE!r} was chosen, so tool calls are not parsed. Leave the tools out, or name a format."
            )
        how = (
            "writes tool calls in an unsupported form"
            if self.writes_calls
            else "does not write the tool calls of earlier answers, so their format can't be detected"
        )
        return (
            f"the model's chat template {how}: "
            "no tool would ever be called. Start with --tool-format NAME if you know the model's format"
            f" ({', '.join(names()[:-1])}), with --chat-template hermes to teach it that"
            f" form, or with --tool-format {NONE} if no agent has tools."
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        switches: Switches | None = None,
        *,
        prompt: bool = True,
    ) -> str:
        """Render a conversation, ending where the assistant's answer begins.

        Args:
            messages: in OpenAI's format.
            tools: those the model may call.
            switches: variables for the template.
            prompt: False ends with the last message instead.

        Raises:
            Refusal: the template does not support tools, writes calls in an unknown format, or rejects the
                conversation.
        """
        if tools:
            self.check_tools()
        shown = [self._for_template(each) for each in messages]
        return self._template(self.plain.marked(shown), self.plain.marked(tools), prompt=prompt, switches=switches)

    def merges(self, messages: Sequence[Message]) -> bool:
        """Whether the template merges some of these messages, as `--system-messages merge` requests."""
        return merges(str(self._tokenizer.chat_template)) and are_merged(messages)

    def knows(self, switch: str) -> bool:
        """Whether the template uses a variable."""
        return re.search(rf"\b{re.escape(switch)}\b", str(self._tokenizer.chat_template)) is not None

    @functools.cached_property
    def effort_switch(self) -> str | None:
        """The template's variable that sets how much the model reasons; None if there is none."""
        for name in ("reasoning_effort", "enable_thinking"):
            if self.knows(name):
                return name
        return "thinking" if self.knows("thinking") and self._changes_prompt("thinking") else None

    def _changes_prompt(self, switch: str) -> bool:
        user = [{"role": "user", "content": "hi"}]
        try:
            on, off = (self._template(user, (), switches={switch: value}) for value in (True, False))
        except Refusal:
            return False
        return on != off

    @functools.cached_property
    def header(self) -> str | None:
        """The template's text before each answer; None if it does not identify answers."""
        user = [{"role": "user", "content": "hi"}]
        try:
            whole, bare = self._template(user, ()), self._template(user, (), prompt=False)
        except Refusal:
            return None
        if not whole.startswith(bare) or len(whole) == len(bare):
            return None
        added = whole[len(bare) :]
        thinking = self.dialect.thinking
        for mark in (thinking.open, thinking.close) if thinking else ():
            added = added.partition(mark)[0]
        header = added.rstrip("\n")
        return header if any(control in header for control in self.plain.controls) else None

    def end_of(self, ids: Sequence[int]) -> str:
        """Return the text of the control token that ends an answer; empty if there is none."""
        text = self.decode(ids[-1:]) if len(ids) else ""
        return text if text in self.plain.controls else ""

    @property
    def end_token(self) -> int:
        """The token that ends answers, as the tokenizer names it."""
        return int(self._tokenizer.eos_token_id)

    @property
    def writes_calls(self) -> bool:
        """Whether the template writes the calls of answers at all."""
        return probe.writes_calls(self._render_probe)

    @property
    def usual_end(self) -> str:
        """The text of the token that ends answers, as the tokenizer names it."""
        return self.decode([self._tokenizer.eos_token_id])

    def encode(self, text: str) -> list[int]:
        """Tokenize a rendered text, or a piece of one."""
        return self.plain.encode(text)

    def decode(self, ids: Sequence[int], *, control_tokens: bool = True) -> str:
        """Return the text of tokens, with or without control tokens."""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=not control_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def normal(self, text: str) -> str:
        """Return a rendered text without marks, in the Unicode normal form that the tokenizer reads."""
        normalizer = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "normalizer", None)
        shown = self.plain.shown(text)
        return shown if normalizer is None else str(normalizer.normalize_str(shown))

    def _render_probe(self, messages: list[dict[str, Any]], tools: Sequence[Message], *, prompt: bool) -> str:
        return self._template(messages, tools, prompt=prompt)

    def _template(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Message],
        *,
        prompt: bool = True,
        switches: Switches | None = None,
    ) -> str:
        from jinja2 import TemplateError

        try:
            given = {"tools": list(tools) or None, "add_generation_prompt": prompt, **(switches or {})}
            return render(self._tokenizer, messages, **given)
        except (RenderError, TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            do = advice(self._tokenizer, messages)
            raise bad_request(f"the model's chat template refuses this conversation: {error}.{do}") from None

    def _for_template(self, message: Message) -> dict[str, Any]:
        """Return a message as the template expects it: text content, arguments as data or text, reasoning by name."""
        role = "system" if message["role"] == "developer" else message["role"]
        out = {**message, "role": role, "content": join_content(message.get("content"))}
        self._name_reasoning(out)
        if self.calls is not None and self.calls.nine_letters and message.get("tool_call_id") is not None:
            out["tool_call_id"] = _nine_letters(str(message["tool_call_id"]))
        calls = message.get("tool_calls")
        if not calls:
            out.pop("tool_calls", None)
            return out
        form = self._chosen[1]
        out["content"] = out["content"] or form.content
        out["tool_calls"] = [self._call(call, form) for call in calls]
        return out

    def _name_reasoning(self, message: dict[str, Any]) -> None:
        """Give an answer's reasoning the field names that templates use."""
        found = reasoning_of(message)
        for name in _REASONING:
            message.pop(name, None)
        if found is None or message["role"] != "assistant":
            return
        message["reasoning_content"] = found
        if self.knows("thinking") and not (message.get("tool_calls") and message["content"]):
            message["thinking"] = found  # gpt-oss's; it accepts no content next to it on a call

    def _call(self, call: Message, form: probe.Form) -> dict[str, Any]:
        function = call["function"]
        arguments = as_data(function.get("arguments", "{}"))  # data, so that a template's `tojson` writes them as such
        if form.arguments == "text":
            arguments = as_text(arguments)
        out = {"type": "function", **call, "function": {**function, "arguments": arguments}}
        if self.calls is not None and self.calls.nine_letters:
            out["id"] = _nine_letters(str(call.get("id")))
        return out


def check_calls(tokenizer: Any, tool_format: str | None) -> None:
    """Check before a run that tool calls of its model would be parsed.

    Raises:
        ConfigError: the chat template shows tools to the model, but writes calls in an unknown format, or does not show
            their results.
    """
    chat = ChatFormat(tokenizer, tool_format)
    if tool_format is None and chat.takes_tools and chat.calls is None:
        raise ConfigError(chat.unread_calls)
    if tool_format != NONE and chat.hidden_results is not None:
        raise ConfigError(chat.hidden_results)


_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
_LETTERS: Final = string.digits + string.ascii_letters


def reasoning_of(message: Message) -> str | None:
    """Return the reasoning of a message, under any name that clients use; None if it has none."""
    return next((message[name] for name in _REASONING if isinstance(message.get(name), str) and message[name]), None)


def _nine_letters(call_id: str) -> str:
    """Return an id of nine letters and digits.

    The id itself if it is one, otherwise always the same for the same id.
    """
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.blake2b(call_id.encode(errors="replace"), digest_size=8).digest(), "big")
    return "".join(_LETTERS[number // 62**place % 62] for place in range(9))


def join_content(content: Any) -> str:
    """Return content as one text. Text parts are joined by line breaks, as in vLLM."""
    if isinstance(content, list):
        return "\n".join(part["text"] if part["type"] == "text" else part["refusal"] for part in content)
    return content or ""
