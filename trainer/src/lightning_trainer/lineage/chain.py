"""A hash chain of JSON lines: each line has a hash of itself and the previous line, so an edit breaks all later lines.

With a key, each line also has an HMAC-SHA256 of its hash. Without one, a rewrite of the whole file is detected only by
the heads that checkpoints keep.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError

KEY_VARIABLE: Final = "LIGHTNING_LINEAGE_KEY_FILE"
_SHORTEST: Final = 16  # bytes in a key
_OWN: Final = frozenset({"n", "prev", "hash", "mac"})
# fields of a step
_TEXTS: Final = ("calls", "rewards", "rollouts", "attempts", "traces", "sources", "lines", "tenants")
_BLOCK: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a chain.

    Attributes:
        lines: number of lines.
        hash: hash of the last line; empty if there is none.
    """

    lines: int = 0
    hash: str = ""


@dataclass(frozen=True, slots=True)
class VerifiedChain:
    """A chain whose links have all been verified.

    Attributes:
        lines: content of each line, in order, without the chain's own fields.
        hashes: hash of each line.
        signed: whether the signature of every line was checked; None: lines are signed, but no key was given.
    """

    lines: tuple[Mapping[str, Any], ...]
    hashes: tuple[str, ...]
    signed: bool | None


def read_signing_key(path: Path | None = None) -> bytes | None:
    """Read the signing key from this file, by default from the one named by ``LIGHTNING_LINEAGE_KEY_FILE``.

    Raises:
        ConfigError: the file cannot be read, or the key is too short.
    """
    named = path or os.environ.get(KEY_VARIABLE)
    if not named:
        return None
    try:
        key = Path(named).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"the lineage key {named} can't be read: {error.strerror}.") from None
    if len(key) < _SHORTEST:
        raise ConfigError(f"the lineage key {named} has {len(key)} bytes. Give a file with at least {_SHORTEST}.")
    return key


class ChainWriter:
    """Appends to a chain, continuing where an earlier writer stopped. May be used from any thread.

    Args:
        path: the file; created with its first line.
        key: signs each line; None: lines are not signed.

    Raises:
        ConfigError: the existing file is not a chain.
    """

    def __init__(self, path: Path, key: bytes | None = None) -> None:
        self._path = path
        self._key = key
        self._lock = threading.Lock()
        _drop_torn_line(path)
        self._head = read_head(path)

    @property
    def head(self) -> Head:
        """The end of the chain."""
        return self._head

    def append(self, values: Mapping[str, Any]) -> Head:
        """Append a line. It is on disk when this returns.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            line = {"n": self._head.lines + 1, **values, "prev": self._head.hash}
            line["hash"] = _hash(line)
            if self._key is not None:
                line["mac"] = _mac(self._key, line["hash"])
            with self._path.open("ab") as file:
                file.write(_canonical(line) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            self._head = Head(line["n"], line["hash"])
            return self._head


def read_head(path: Path) -> Head:
    """Read the head of a chain from the end of its file.

    Raises:
        ConfigError: the file is not a chain.
    """
    last = _last_line(path)
    if not last:
        return Head()
    try:
        line = json.loads(last)
        return Head(int(line["n"]), str(line["hash"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise ConfigError(f"{path}: its last line is not a line of a lineage file. Move the file away.") from None


def verify_chain(path: Path, key: bytes | None = None, *, lines: int | None = None) -> VerifiedChain:
    """Read a chain and verify every link.

    Args:
        path: the file.
        key: key that the lines must be signed with; None: signatures are not checked.
        lines: number of lines to read from the beginning; None: all.

    Raises:
        ConfigError: the file cannot be read, or a line was changed, removed or inserted, or is not signed with the key.
    """
    before, found, hashes, signatures = "", list[Mapping[str, Any]](), list[str](), 0
    for number, (line, digest) in enumerate(_read_lines(path, lines), 1):
        if line.get("n") != number or line.get("prev") != before or line.get("hash") != digest:
            raise ConfigError(
                f"{path}, line {number}: "
                "it was changed, so the file proves nothing from there on. Restore it from a backup."
            )
        before = str(line["hash"])
        signatures += "mac" in line
        if key is not None and not hmac.compare_digest(str(line.get("mac", "")), _mac(key, before)):
            state = "is signed with another key" if "mac" in line else "is not signed"
            raise ConfigError(f"{path}, line {number} {state}: it may have been written without the key.")
        found.append({name: value for name, value in line.items() if name not in _OWN})
        hashes.append(before)
    if lines is not None and len(found) < lines:
        raise ConfigError(
            f"{path} has {len(found)} lines, and the checkpoint was made after {lines}: some are missing."
        )
    signed = True if key is not None else None if signatures else False
    return VerifiedChain(tuple(found), tuple(hashes), signed)


def _read_lines(path: Path, most: int | None) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield each line with the hash that it should have."""
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if (most is not None and number > most) or not text.endswith(b"\n"):
                    return  # the process was killed while it wrote this incomplete line
                line = json.loads(text)
                if not isinstance(line, dict) or not _is_one(line):
                    raise ValueError("it is not a line of a lineage file")
                yield line, _hash(line)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}, line {number}: it is not a line of a lineage file.") from None


def _is_one(line: Mapping[str, Any]) -> bool:
    """Whether a line's values have the types that are written. A correct hash proves nothing about a foreign file."""
    prompts, parent = line.get("prompts", {}), line.get("parent")
    return (
        line.get("kind") in ("begin", "step")
        and type(line.get("step")) is int
        and all(_is_texts(line[name]) for name in _TEXTS if name in line)
        and isinstance(prompts, dict)
        and all(map(_is_texts, prompts.values()))
        and all(isinstance(line.get(name, ""), str) for name in ("model", "options"))
        and (parent is None or isinstance(parent, str))
        and all(_are_files(line.get(name) or []) for name in ("data", "code"))
    )


def _are_files(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and all(isinstance(each.get(name), str) for name in ("path", "sha256")) for each in value
    )


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _hash(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical({k: v for k, v in line.items() if k not in {"hash", "mac"}})).hexdigest()


def _mac(key: bytes, text: str) -> str:
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def _canonical(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _last_line(path: Path) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        tail = b""
        while end and tail.count(b"\n") < 2:
            start = max(0, end - _BLOCK)
            file.seek(start)
            tail, end = file.read(end - start) + tail, start
    return tail.rstrip(b"\n").rpartition(b"\n")[2]


def _drop_torn_line(path: Path) -> None:
    """Remove an incomplete last line: its process was killed while writing."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)
