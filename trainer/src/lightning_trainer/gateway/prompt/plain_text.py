"""Text stays text: a message never becomes a control token, so no user can speak as the assistant.

A chat template writes control tokens as text (``<|im_end|>``), and tokenizers convert such text back to the token,
whoever wrote it. So before a template gets a message, each control token's text in it is replaced by a mark, and
afterwards the mark is tokenized as the plain characters that it stands for. The message is not changed.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from lightning_trainer.gateway.http.errors import bad_request


class PlainText:
    """Marks and tokenizes control tokens' text for one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.controls = _controls(tokenizer)  # texts of the tokenizer's control tokens
        controls = sorted(self.controls, key=len, reverse=True)
        nonce = secrets.token_hex(12)  # a message cannot contain a mark: it is random
        self._marks = {control: f"lkm{nonce}n{place}e" for place, control in enumerate(controls)}
        self._texts = {mark: control for control, mark in self._marks.items()}
        self._control = re.compile("|".join(map(re.escape, controls)) or r"(?!)")
        self._mark = re.compile(f"(lkm{nonce}n[0-9]+e)")
        self._nonce = nonce

    def marked(self, value: Any) -> Any:
        """Replace control tokens' text in every text of a JSON value; return the value itself if there is none."""
        if isinstance(value, str):
            return self._control.sub(lambda found: self._marks[found[0]], value)
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(inner) for key, inner in value.items()}
        return [self.marked(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    def shown(self, text: str) -> str:
        """Return a text with its marks replaced by what they stand for."""
        return self._mark.sub(lambda found: self._texts[found[0]], text) if self._nonce in text else text

    def after(self, text: str, count: int) -> str | None:
        """Return what follows the first `count` shown characters of a marked text; None if that splits a mark."""
        if self._nonce not in text:
            return text[count:]
        for found in self._mark.finditer(text):
            hidden = len(found[0]) - len(self._texts[found[0]])
            if count <= found.start():
                break
            if count < found.end() - hidden:
                return None
            count += hidden
        return text[count:]

    def encode(self, text: str) -> list[int]:
        """Tokenize a rendered text: the template's control tokens as such, the messages' as plain characters.

        Raises:
            Refusal: the tokenizer cannot write a message's control token as plain characters.
        """
        if self._nonce not in text:
            return self._encode(text)
        ids: list[int] = []
        for part in self._mark.split(text):
            ids += self._spell_control(self._texts[part]) if part in self._texts else self._encode(part)
        return ids

    def _spell_control(self, control: str) -> list[int]:
        ids = [token for letter in control for token in self._encode(letter)]
        if self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) != control:
            raise bad_request(
                f"a message says {control!r}, which this model's tokenizer only knows as a control token. Remove it.",
                "control_token",
            )
        return ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        return ids


def _controls(tokenizer: Any) -> set[str]:
    """Return the texts of a tokenizer's control tokens, without ordinary added words such as <tool_call>."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)} - {""}
