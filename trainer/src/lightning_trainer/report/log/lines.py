"""Read a run's metrics file, which anyone may have written: values of types that a run does not write are left out."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from os import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

from lightning_trainer.rl.scores import BY_TASK

logger = logging.getLogger(__name__)

Line: TypeAlias = dict[str, Any]
Check: TypeAlias = Callable[[Any], bool]

HELD_OUT: Final = "held_out"  # in the line of a validation: its tasks, see `MetricLog`
PROMPTS: Final = "prompts"  # in the line of a validation: digests of each agent's prompts
MOST_FREQUENT: Final = "most_frequent"  # by agent: its most frequent short answer, and that answer's share
POLICY_OF: Final = "policy_of"  # in the line of a step: the policy of each trained agent
WAITED_FOR: Final = "waited_for"  # in the line of a step: the part that took longest

_MOST_BYTES: Final = 1 << 28  # most bytes that `read_newest` reads
_MOST_NUMBER: Final = 1e100  # squares of larger ones are infinite
_MOST_DEPTH: Final = 8  # deepest nesting of values in lines of other kinds, such as `rollback`
_MOST_COUNT: Final = 1e15
_COUNTS: Final = frozenset({"time", "seconds", "rollouts", "failed", "tasks", "tokens_prompt", "tokens_generated"})


def read(path: Path) -> list[Line]:
    """Read the lines of a run's own metrics file.

    Lines that are not an object with a kind and a step, and values of another type than a run writes, are left out,
    with one warning that names the file and the first such line. A last line that was cut off during writing is left
    out without a warning.
    """
    return _valid_lines(path, None)


def read_newest(path: Path) -> list[Line]:
    """Read the last 256 MiB of a metrics file, which may be someone else's, as `read` does.

    One warning says so if earlier lines are left out: the file must not be replaced by what was read.
    """
    return _valid_lines(path, _MOST_BYTES)


def _valid_lines(path: Path, most: int | None) -> list[Line]:
    if not path.is_file():  # reading a pipe in somebody else's folder would wait
        return []
    lines, wrong = [], list[str]()
    with path.open("rb") as file:
        part = "" if most is None else _skip_earlier(file, path, most)
        for number, text in enumerate(_texts(file, most), 1):
            line, why = _parse(text)
            if line is not None:
                lines.append(line)
            if why and text.endswith(b"\n"):
                wrong.append(f"line {number}{part}: {why}")
    if wrong:
        more = f" ({len(wrong)} lines have such errors)" if len(wrong) > 1 else ""
        _warn(f"{path}, {wrong[0]}{more}. Invalid lines are left out.")
    return lines


@cache
def _warn(text: str) -> None:
    """Log a warning once, because the viewer reads the file repeatedly."""
    logger.warning("%s", text)


def _skip_earlier(file: BinaryIO, path: Path, most: int) -> str:
    """Go to the first whole line of the last `most` bytes, and return what a line's number then counts from."""
    begin = file.seek(0, SEEK_END) - most
    file.seek(max(0, begin - 1))
    if begin <= 0:
        return ""
    file.readline(most)
    _warn(f"{path} is larger than {most >> 20} MiB. Only the newest lines are read.")
    return f" of its last {most >> 20} MiB"


def _texts(file: BinaryIO, most: int | None) -> Iterator[bytes]:
    if most is None:
        yield from file
        return
    left = most
    while left > 0 and (text := file.readline(left)):
        left -= len(text)
        yield text


def _parse(text: bytes) -> tuple[Line | None, str]:
    """Return the valid part of a line, or None if nothing is valid, and what is wrong with it."""
    try:
        values = json.loads(text)
        if b"\\ud" in text.lower():
            json.dumps(values, ensure_ascii=False).encode()  # a lone surrogate cannot be shown
    except (ValueError, RecursionError):
        return None, "it is not a line of JSON"
    if not isinstance(values, dict) or not _is_text(values.get("kind")) or not _is_count(values.get("step")):
        return None, "it is not a JSON object with a kind and a step"
    if values["kind"] == "alarm":
        good = _is_text(values.get("name")) and _is_text(values.get("text")) and _is_count(values.get("steps_taken"))
        if not good:
            return None, "it is not an alarm with a name, a text and the steps taken"
    wrong = [name for name, value in values.items() if not _fits(values["kind"], name, value)]
    why = f"{wrong[0]!r} can't be {_describe(values[wrong[0]])}" if wrong else ""
    return {name: value for name, value in values.items() if name not in wrong}, why


def _describe(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, (dict, list)) else repr(value)[:60]


def _fits(kind: str, name: str, value: Any) -> bool:
    """Whether a value has the type that a run writes under this name."""
    if (check := _FACTS.get(name)) is not None:
        return check(value)
    if name in _COUNTS:
        return _is_finite(value) and 0 <= value <= _MOST_COUNT
    if name.startswith("reward"):
        return _is_finite(value)
    return _is_number(value) if kind in {"train", "val"} else _is_shallow(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _is_number(value: Any) -> bool:
    """Whether it is a number; a loss may be infinite or NaN if learning failed."""
    return isinstance(value, (int, float)) and not _MOST_NUMBER < abs(value) < math.inf


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= _MOST_NUMBER


def _is_share(value: Any) -> bool:
    """Whether it is an answer and its share."""
    return isinstance(value, list) and len(value) == 2 and _is_text(value[0]) and _is_finite(value[1])


def _is_shallow(value: Any, depth: int = _MOST_DEPTH) -> bool:
    if not isinstance(value, (dict, list)):
        return not isinstance(value, (int, float)) or _is_number(value)
    within = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(each, depth - 1) for each in within)


def _dict_of(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


_FACTS: Final[Mapping[str, Check]] = {
    "kind": _is_text,
    "step": _is_count,
    HELD_OUT: _is_text,
    WAITED_FOR: _is_text,
    POLICY_OF: _dict_of(_is_text),
    PROMPTS: _dict_of(_list_of(_is_text)),
    MOST_FREQUENT: _dict_of(_is_share),
    BY_TASK: _dict_of(_dict_of(_is_finite)),
}
