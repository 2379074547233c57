"""Text of tokens in which the control tokens of a format can be told from their letters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_trainer.gateway.formats.signs import SIGN
from lightning_trainer.gateway.prompt.text_stream import TextStream


class MarkedText:
    """Makes text of one answer's tokens, as it comes. Control tokens that are not kept are left out.

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
        """Take tokens; give the text that is new."""
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
        """Give what was held back for a stop string that did not come."""
        return "" if self._stopped else self._text.finish()
