"""Tokens to text as they arrive: whole characters only, and nothing that may turn out to belong to a stop string."""

from __future__ import annotations

from typing import Any

_BROKEN = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one answer.

    A token may contain part of a character, and with some tokenizers its text depends on the previous token. So the
    tokens since the last complete piece are decoded together with that piece.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(text for text in stop if text)
        self._tokens: list[int] = []  # the last piece that was returned, and what came after it
        self._given = 0  # how many of them are that piece
        self._given_text = ""
        self._held = ""

    def push(self, token: int) -> tuple[str, bool]:
        """Add a token.

        Returns:
            The text that can be returned now, and whether a stop string ended the answer.
        """
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(_BROKEN) and len(self._tokens) - self._given < 8:  # no character has more than a few tokens
            return "", False
        new = text[len(self._given_text) :]
        self._tokens = self._tokens[self._given :]
        self._given, self._given_text = len(self._tokens), self._decode(self._tokens) if self._given else text
        return self._release(new)

    def finish(self) -> str:
        """Return what was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _release(self, new: str) -> tuple[str, bool]:
        if not self._stop:
            return new, False
        text, self._held = self._held + new, ""
        ends = [place for place in map(text.find, self._stop) if place >= 0]
        if ends:
            return text[: min(ends)], True
        held = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], False


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text with which the stop string begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
