"""Insert a message into a prompt that is already tokenized: right before the model's answer starts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_trainer.gateway.http.errors import Refusal
from lightning_trainer.gateway.prompt.template import ChatFormat

_USER: Final = {"role": "user", "content": "a"}
# What the added message follows. Templates whose roles must alternate refuse a user after a user.
_BEFORE: Final = ((_USER,), (_USER, {"role": "assistant", "content": "b"}))


class Hints:
    """Inserts a user's message at the end of prompts, as the model's chat template writes it.

    The prompt's own tokens are unchanged, before and after the message, and nothing is tokenized again.

    Args:
        chat: the model's format.
        ends: tokens that end an answer.

    Raises:
        ConfigError: the chat template does not allow a message before the answer.
    """

    def __init__(self, chat: ChatFormat, ends: Collection[int]) -> None:
        self._chat, self._ends = chat, frozenset(ends)
        header = chat.header
        if header is None or not self._template_text("a").startswith(tuple(chat.plain.controls)):
            raise ConfigError(
                "teacher = self puts a message before the answer, and this model's chat template begins messages or"
                " answers with no control token of their own. Give another --chat-template, such as hermes."
            )
        self._header = chat.encode(header)

    def put(self, prompt: Sequence[int], text: str) -> list[int] | None:
        """Return a prompt with the message; None if it does not end with the template's beginning of an answer."""
        width = len(self._header)
        for start in range(len(prompt) - width, -1, -1):
            if list(prompt[start : start + width]) == self._header:
                # After an end token there is another turn, so this would be the beginning of an earlier answer.
                ended = self._ends.intersection(prompt[start + width :])
                return (
                    None if ended else [*prompt[:start], *self._chat.encode(self._template_text(text)), *prompt[start:]]
                )
        return None

    def _template_text(self, text: str) -> str:
        """Return the message as the template writes it; empty if that cannot be determined."""
        for before in _BEFORE:
            try:
                bare = self._chat.render(before, (), prompt=False)
                whole = self._chat.render([*before, {"role": "user", "content": text}], (), prompt=False)
            except Refusal:
                continue
            if whole.startswith(bare):
                return whole[len(bare) :]
        return ""
