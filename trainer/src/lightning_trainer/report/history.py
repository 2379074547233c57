"""A run's lines so far, with what was found in them: a check of a new line does not read all earlier lines again."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias, overload

from lightning_trainer.report.log.lines import POLICY_OF
from lightning_trainer.report.teams.cliffs import Fall, fall_of
from lightning_trainer.rl.scores import BY_TASK

Line: TypeAlias = Mapping[str, Any]
Points: TypeAlias = Sequence[tuple[int, float]]  # (step, value)

VAL: Final = "val"


class History(Sequence[Line]):
    """Lines of metrics.jsonl, in order. Lines are only added at the end.

    Attributes:
        steps: taken after the newest line.
        has_tasks: whether every validation has the rewards by task.
        policy_of: the policy of each agent that was seen in training.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        self._lines: list[Line] = []
        self._by_kind: defaultdict[str, list[Line]] = defaultdict(list)
        self._names: set[str] = set()
        self._series: dict[tuple[str, str], tuple[list[tuple[int, float]], int]] = {}  # with the lines read so far
        self._falls: dict[tuple[str, ...], Fall | None] = {}
        self.steps = 0
        self.has_tasks = True
        self.policy_of: dict[str, str] = {}
        for line in lines:
            self.append(line)

    def append(self, line: Line) -> None:
        """Add the newest line."""
        self._lines.append(line)
        self._by_kind[line["kind"]].append(line)
        self._names.update(line)
        self.steps = max(self.steps, int(line["step"]) + (line["kind"] == "train"))
        if line["kind"] == "train":
            self.policy_of |= line.get(POLICY_OF, {})
        if line["kind"] == VAL:
            self.has_tasks &= BY_TASK in line
            self._falls.clear()

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> Line: ...
    @overload
    def __getitem__(self, index: slice) -> list[Line]: ...
    def __getitem__(self, index: int | slice) -> Line | list[Line]:
        return self._lines[index]

    def of_kind(self, kind: str) -> Sequence[Line]:
        """Return the lines of a kind."""
        return self._by_kind[kind]

    def names(self, prefix: str) -> list[str]:
        """Return the names of numbers in any line that begin with this, sorted."""
        return sorted(name for name in self._names if name.startswith(prefix))

    def series(self, kind: str, name: str) -> Points:
        """Return (step, value) for every line of a kind in which this number is finite."""
        points, read = self._series.get((kind, name), ([], 0))
        lines = self._by_kind[kind]
        points += [
            (int(line["step"]), float(line[name]))
            for line in lines[read:]
            if isinstance(line.get(name), (int, float)) and math.isfinite(line[name])
        ]
        self._series[kind, name] = points, len(lines)
        return points

    def fall(self, policy: str = "", names: Sequence[str] = ("",)) -> Fall | None:
        """Return how a policy has fallen in the newest validation, see `fall_of`; computed once for a validation."""
        key = (policy, *names)
        if key not in self._falls:
            self._falls[key] = fall_of(self._by_kind[VAL], policy, names)
        return self._falls[key]
