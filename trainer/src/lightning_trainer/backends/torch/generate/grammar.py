"""Answers that must follow a grammar, with llguidance: which tokens may come next."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Grammars:
    """Makes grammars for one tokenizer, which llguidance reads once, when the first is requested."""

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: Collection[int]) -> None:
        self._tokenizer, self._vocabulary, self._end_tokens = tokenizer, vocabulary, end_tokens
        self._read: Any = None
        self._lock = threading.Lock()

    def make(self, text: str) -> Grammar:
        """Make a grammar. Takes up to a second the first time.

        Raises:
            ValueError: it is not a grammar, or needs something that llguidance does not support.
        """
        import llguidance.hf

        with self._lock:
            if self._read is None:
                ends = sorted(self._end_tokens)
                self._read = llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=ends)
        if wrong := llguidance.LLMatcher.validate_grammar(text, self._read):
            raise ValueError(f"the answer's format can't be enforced: {wrong}")
        return Grammar(llguidance.LLMatcher(self._read, text), self._end_tokens)


class Grammar:
    """The position of one answer in its grammar.

    Attributes:
        failure: why the grammar cannot be followed further; the answer ends then.
    """

    def __init__(self, matcher: Any, end_tokens: Collection[int]) -> None:
        self._matcher, self._end_tokens = matcher, list(end_tokens)
        self.failure: str | None = None

    def allowed(self, width: int) -> NDArray[np.bool_]:
        """Return (V,) which tokens may come next; at the end of the grammar, those that end the answer."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.zeros(width, np.bool_)
        bits = np.unpackbits(mask, bitorder="little")[:width]
        allowed[: len(bits)] = bits
        if self._matcher.is_error() or not allowed.any():
            self.failure = f"the answer's format can't be enforced: {self._matcher.get_error() or 'no token fits'}"
            allowed[self._end_tokens] = True
        return allowed

    def take(self, token: int) -> None:
        """Record a sampled token."""
        if self.failure is None:
            self._matcher.consume_token(token)
