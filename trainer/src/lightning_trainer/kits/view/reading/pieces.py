"""The text of single tokens, from the model's own tokenizer.json: no tokenizer needs to be installed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

FILE: Final = "tokenizer.json"
_MOST_BYTES: Final = 1 << 28


class Pieces:
    """The text of each token of a vocabulary.

    Args:
        path: a ``tokenizer.json``.

    Raises:
        ValueError: it is invalid.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        described = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(described, ensure_ascii=False).encode()  # raises for half a character, which cannot be shown
        if not isinstance(described, dict) or not isinstance(described.get("model"), dict):
            raise ValueError(f"{path} describes no tokenizer")
        self._special = {int(each["id"]): str(each["content"]) for each in described.get("added_tokens") or []}
        self._tokens = _tokens(described["model"].get("vocab"))
        self._bytes = _of_bytes if "ByteLevel" in json.dumps(described.get("decoder")) else _of_pieces

    def text(self, token_id: int) -> str:
        """Return the text of one token; if it is part of a character, its bytes in brackets."""
        if token_id in self._special:
            return self._special[token_id]
        token = self._tokens.get(token_id)
        if token is None:
            return f"⟨{token_id}⟩"
        data = self._bytes(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return f"⟨{data.hex(' ').upper()}⟩"

    def texts(self, token_ids: Iterable[int]) -> list[str]:
        """Return the text of each token."""
        return [self.text(each) for each in token_ids]


def pieces_of(folders: Sequence[Path]) -> Pieces | None:
    """Return the pieces of the first folder that has a tokenizer; None if none has."""
    for folder in folders:
        path = folder / FILE
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            try:
                return _read(path, path.stat().st_mtime_ns)
            except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
                continue  # a file of another program, or an untrusted one
    return None


@lru_cache(maxsize=2)
def _read(path: Path, _changed: int) -> Pieces:
    return Pieces(path)


def _tokens(vocabulary: Any) -> dict[int, str]:
    if isinstance(vocabulary, dict):
        return {int(number): token for token, number in vocabulary.items()}
    return {number: str(entry[0]) for number, entry in enumerate(vocabulary or [])}  # a unigram model


def _alphabet() -> dict[str, int]:
    """Return the byte of each character with which byte-level vocabularies write bytes (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_ALPHABET: Final = _alphabet()


def _of_bytes(token: str) -> bytes:
    return b"".join(bytes([_ALPHABET[letter]]) if letter in _ALPHABET else letter.encode() for letter in token)


def _of_pieces(token: str) -> bytes:
    """Return the bytes of a SentencePiece token: U+2581 is a space, and ``<0xE2>`` a byte without a piece."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
