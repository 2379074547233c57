"""Text of tokens in which a format's control tokens differ from the same letters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_trainer.gateway.formats.reader import SIGN
from lightning_trainer.gateway.prompt.text_stream import TextStream


class MarkedText:
    """Converts one answer's tokens to text as they arrive. Control tokens that are not kept are left out.

    Args:
        tokenizer: the model's.
        kept: texts of the control tokens that are kept, by token.
        stop: strings that end the answer, and are not part of it.
    """

    def __init__(self, tokenizer: Any, kept: Mapping[int, str], stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._kept, self._stop = tokenizer, kept, stop
        self._text = TextStream(tokenizer, stop)
        self._stopped = False

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens; return the new text."""
        return "".join(self._push_token(token) for token in ids)

    def _push_token(self, token: int) -> str:
        if self._stopped:
            return ""
        if (mark := self._kept.get(token)) is None:
            text, self._stopped = self._text.push(token)
            return text
        text, self._text = self._text.finish(), TextStream(self._tokenizer, self._stop)
        return f"{text}{SIGN}{mark}"

    def finish(self) -> str:
        """Return what was held back for a stop string that did not come."""
        return "" if self._stopped else self._text.finish()
