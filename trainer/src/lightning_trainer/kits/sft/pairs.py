"""Preference pairs of files: two answers to one prompt, in all common formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import DataError
from lightning_trainer.kits.export.asked import UnreadableError
from lightning_trainer.kits.export.chat import Message
from lightning_trainer.kits.sft.data import (
    PROVENANCE,
    Example,
    answer_places,
    conversation,
    list_fields,
    read_rows,
    to_messages,
)

_OF_BOTH: Final = (
    "agent",
    "agent_path",
    "group_id",
    "task_id",
    "tools",
    "system",
    "origin",
    "tenant",
)  # fields that both answers of a pair share


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two answers to one prompt."""

    chosen: Example
    rejected: Example

    @property
    def same(self) -> bool:
        """Whether both answers are the same, so that neither is better."""
        one, other = self.chosen, self.rejected
        if one.ids is not None and other.ids is not None:
            return one.ids == other.ids
        return one.messages == other.messages


def read_pairs(path: Path) -> list[PreferencePair]:
    """Read a file of preference pairs.

    Raises:
        DataError: the file is missing, empty or of another format, or a line of it is not a pair.
    """
    found = []
    for row, faulty in read_rows(path):
        try:
            found.append(read_pair(row.value, f"{path}, {row.where}"))
        except DataError as error:
            faulty.reject(row, str(error).removeprefix(f"{path}, {row.where}: "))
    if not found:
        raise DataError(f"data file {path} is empty. It must hold at least one pair.")
    return found


def read_pair(line: Mapping[str, Any], source: str) -> PreferencePair:
    """Read one pair: ``prompt``, ``chosen`` and ``rejected``, or two conversations with the same beginning.

    Raises:
        DataError: the fields are missing, or contain something else.
    """
    try:
        asked = to_messages(line["prompt"], "user") if line.get("prompt") else []
        told = [to_messages(line[name], "assistant") for name in ("chosen", "rejected")]
        opening = _opening(told[0])
        if asked and opening[-len(asked) :] == asked:  # whole conversations next to their last prompt
            asked = opening
        if asked and all(side[: len(asked)] == asked for side in told):  # whole conversations next to their prompt
            told = [side[len(asked) :] for side in told]
        sides = [[*asked, *side] for side in told]
        differ = (place for place, (a, b) in enumerate(zip(*sides, strict=False)) if a != b)
        shortest = min(map(len, sides))
        first = len(asked) or next(differ, shortest - (len(sides[0]) == len(sides[1])))  # if both are equal, the last
        rewards = _rewards(line.get("rewards"))
        made = []
        for name, messages, reward in zip(("chosen", "rejected"), sides, rewards, strict=True):
            own = {key: line[key] for key in _OF_BOTH if key in line}
            answers = [place for place in answer_places(messages) if place >= first]
            made_of = line.get(f"{name}_from")
            if isinstance(made_of, Mapping):
                own |= {key: made_of[key] for key in PROVENANCE if key in made_of}
            own |= {"messages": messages, "answers": answers, "reward": reward}
            if line.get("prompt_ids") and line.get(f"{name}_ids"):
                prompt, answer = list(line["prompt_ids"]), list(line[f"{name}_ids"])
                own |= {"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer}
            if not answers:
                raise ValueError(f"{name} has no answer")
            made.append(conversation(own, source))
        if not first or _opening(sides[0]) != _opening(sides[1]):
            raise ValueError("chosen and rejected do not answer the same prompt")
        return PreferencePair(*made)
    except (UnreadableError, ValueError, TypeError, LookupError, AttributeError) as error:
        said = f"there is no {error}" if isinstance(error, KeyError) else error
        wanted = "prompt, chosen and rejected, as text or messages"
        raise DataError(f"{source}: {said}. It has {list_fields(line)}. Expected: {wanted}.") from None


def _opening(messages: Sequence[Message]) -> list[Message]:
    return list(takewhile(lambda message: message["role"] != "assistant", messages))


def _rewards(value: Any) -> tuple[Any, Any]:
    """Return the rewards of the better and the worse answer, if they are given.

    Raises:
        ValueError: they are not two numbers, or the better answer earned less.
    """
    if not value:
        return None, None
    if not (isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(x, (int, float)) for x in value)):
        raise ValueError(f"rewards are {value!r}, not those of chosen and rejected")
    if value[0] < value[1]:
        raise ValueError(f"chosen earned {value[0]:g} and rejected {value[1]:g}, so chosen is not the better one")
    return value[0], value[1]
