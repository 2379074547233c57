"""The ids of a run's groups: the run, its start and the step of each group."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# verl's trainer may repeat a position when groups were dropped: then there is a number before the colon.
_TRAIN: Final = re.compile(r"(?P<start>.*?)(\.\d+)?:t(?P<step>\d+)(r\d+)?-\d+", re.DOTALL)
_VAL: Final = re.compile(r"(?P<start>.*)\.(?P<step>\d+):v-\d+", re.DOTALL)
_NUMBER: Final = re.compile(r"[0-9a-f]{8}\Z")  # of a start


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """A step of a run, or the validation before it; ``other`` if no run of ours has named it."""

    mode: str
    number: int


def name_start(folder: Path) -> str:
    """Return a name for a start of the run in a folder, unique in the store: the prefix of its rollouts' ids."""
    return f"{prefix_of(folder)}{uuid.uuid4().hex[:8]}"


def prefix_of(folder: Path) -> str:
    """Return the common prefix of the names of all its starts. Those of a run in another folder may have it too."""
    return f"{folder.resolve().name}-"


def step_of(group_id: str) -> Step:
    """Read a group's step from its id; see `rl.rollouts.plan`."""
    return _read(group_id)[1]


def groups_of(group_ids: Iterable[str], folder: Path | None = None, *, shared: bool = False) -> dict[str, Step]:
    """Return the groups of a run with their steps. A step that began again counts with its last run.

    Args:
        group_ids: of all rollouts in a store, in the order in which these were queued.
        folder: of the run; None: of every run in the store.
        shared: whether other runs may be in the store; then the groups with the folder's name are the run's.
    """
    own = prefix_of(folder) if folder is not None else None
    found: dict[str, tuple[str, tuple[str, Step]]] = {}
    last: dict[tuple[str, Step], str] = {}
    for group_id in group_ids:
        start, step = _read(group_id)
        prefix = _NUMBER.sub("", start)
        if shared and prefix != own:
            continue
        place = (prefix if own is None else "", step)  # the folder may have been renamed
        found[group_id] = start, place
        last[place] = start
    return {group_id: place[1] for group_id, (start, place) in found.items() if last[place] == start}


def _read(group_id: str) -> tuple[str, Step]:
    """Return the name of a group's start, and its step."""
    if found := _TRAIN.fullmatch(group_id):
        return found["start"], Step("train", int(found["step"]))
    if found := _VAL.fullmatch(group_id):
        return found["start"], Step("val", int(found["step"]))
    return "", Step("other", 0)
