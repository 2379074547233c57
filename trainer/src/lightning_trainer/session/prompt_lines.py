"""Lines of prompts: what many prompts share, and whether one program can have written two sets of prompts.

A prompt is a tuple of lines. In a shared part, `None` stands for whatever differs between the prompts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Final, TypeAlias

from lightning_trainer.session.programs import digest

SharedLines: TypeAlias = tuple[str | None, ...]
_MOST: Final = 2000  # lines of a prompt that are kept
_LONGEST: Final = 2000  # characters of a line that are kept
_SHOWN: Final = 80
_MONTH: Final = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_DAY: Final = r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b\.?"
_ZONE: Final = r"(?:Z|UTC|GMT|[+-]\d{2}:?\d{2})"
_MOMENTS: Final = re.compile(
    "|".join(
        (
            rf"\b\d{{4}}-\d{{2}}(?:-\d{{2}})?(?:[T ]\d{{2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?)?(?:\s?{_ZONE})?\b",
            r"\b\d{1,4}[./]\d{1,2}[./]\d{1,4}\b",
            rf"\b\d{{1,2}}:\d{{2}}(?::\d{{2}}(?:\.\d+)?)?(?:\s?[ap]\.?m\b\.?)?(?:\s?{_ZONE}\b)?",
            rf"\b{_MONTH}\s+\d{{1,2}}(?:st|nd|rd|th)?\b(?:,?\s+\d{{4}}\b)?",
            rf"\b\d{{1,2}}(?:st|nd|rd|th|\.)?\s+(?:of\s+)?{_MONTH}(?:,?\s+\d{{4}}\b)?",
            rf"\b{_MONTH}\s+\d{{4}}\b",
            rf"\b(?:{_DAY})(?=[\s,.;:)]|$)",
            r"\b1\d{9}(?:\d{3}|\d{6}|\d{9})?(?:\.\d+)?\b",  # Unix time
            r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
        )
    ),
    re.IGNORECASE,
)


def without_moments(text: str) -> str:
    """Return a text with dates, times and UUIDs replaced by a placeholder: they change by themselves."""
    return _MOMENTS.sub("<time>", text)


def lines_of(prompt: str) -> tuple[str, ...]:
    """Return the lines of a prompt, without empty ones, and with dates, times and UUIDs replaced."""
    stripped = (line.strip() for line in without_moments(prompt).splitlines())
    return tuple(_shorten(line) for line in stripped if line)[:_MOST]


def _shorten(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} {digest(line)}"


def share(shared: SharedLines, lines: Sequence[str]) -> SharedLines:
    """Return the lines that a prompt shares with all prompts before it."""
    found: list[str | None] = []
    for tag, first, last, _, _ in _compare(shared, lines):
        if tag == "equal":
            found += shared[first:last]
        elif not found or found[-1] is not None:
            found.append(None)
    return tuple(found)


def fit(one: SharedLines, other: SharedLines) -> bool:
    """Whether one program can have written both: all lines that differ are at places where one of the two varies."""
    places = _pass_gaps({0}, other)
    for line in one:
        if line is None:
            places = set(range(min(places), len(other) + 1))
        else:
            held = {at for at in places if at < len(other) and other[at] is None}
            places = held | {at + 1 for at in places if at < len(other) and other[at] == line}
        if not places:
            return False
        places = _pass_gaps(places, other)
    return len(other) in places


def _pass_gaps(places: set[int], lines: SharedLines) -> set[int]:
    passed = set(places)
    for at in places:
        while at < len(lines) and lines[at] is None:
            at += 1  # noqa: PLW2901 - it walks on
            passed.add(at)
    return passed


def describe_difference(evaluated: SharedLines, served: SharedLines) -> str:
    """Return a text that names the lines by which two parts that do not fit differ, the evaluated one first."""
    pairs = list(_changes(evaluated, served))
    if not pairs:
        return "the order of its lines differs"
    texts = []
    for old, new in pairs[:2]:
        start = max(0, _shared_length(old, new) - _SHOWN // 4) if old and new else 0
        texts.append(f"evaluated {_show(old, start)}, served {_show(new, start)}")
    more = f", and {len(pairs) - 2} more lines" if len(pairs) > 2 else ""
    return f"{'; '.join(texts)}{more}"


def _shared_length(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


def _changes(evaluated: SharedLines, served: SharedLines) -> Iterator[tuple[str, str]]:
    """Yield pairs of lines; one is empty if a line is only in the other."""
    known_e, known_s = set(evaluated), set(served)
    for tag, first, last, begin, end in _compare(evaluated, served):
        if tag == "equal":
            continue
        old = [line for line in evaluated[first:last] if line is not None and line not in known_s]
        new = [line for line in served[begin:end] if line is not None and line not in known_e]
        if None in served[begin:end] and not new:
            continue
        if begin < end and served[begin] is None and len(old) > len(new):
            old = old[1:]
        # the varying part may be the first of the new lines, otherwise the last
        if first < last and evaluated[first] is None:
            new = new[1:]
        elif None in evaluated[first:last]:
            new = new[:-1]
        for at in range(max(len(old), len(new))):
            yield old[at] if at < len(old) else "", new[at] if at < len(new) else ""


def _compare(one: Sequence[str | None], other: Sequence[str | None]) -> Sequence[tuple[str, int, int, int, int]]:
    return SequenceMatcher(None, one, other, autojunk=False).get_opcodes()


def _show(line: str, start: int) -> str:
    if not line:
        return "without it"
    text = line[start : start + _SHOWN]
    return repr(f"{'...' if start else ''}{text}{'...' if start + _SHOWN < len(line) else ''}")
