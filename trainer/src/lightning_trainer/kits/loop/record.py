"""The record of a loop: a folder for each round, with one file for each completed stage."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.session.folder import check_unchanged

STAGES: Final = ("select", "train", "evaluate", "candidate", "shadow", "canary", "approval")
STATUS_NAME: Final = "status.txt"  # in the loop's folder: what `loop --status` prints
_OPTIONS: Final = "options.json"  # in a round's folder
_WAITING: Final = "waiting.json"  # likewise: why the current stage waits; only for display


@dataclass(frozen=True, slots=True)
class StageResult:
    """The result of a stage.

    Attributes:
        facts: for later stages and for display.
        outcome: how the round ended in this stage: promoted, rejected or rolled back; None: it continues.
        reason: why it ended.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    outcome: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A stage that cannot end yet.

    Attributes:
        reason: what it waits for.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class StageState:
    """The state of a stage, for display.

    Attributes:
        stage: its name.
        state: ``done``, ``waiting``, ``current``, ``to come``, or ``-`` if the round ended before it.
        at_s: Unix time in seconds at which it was done; None: it is not.
        text: its result, or what it waits for.
    """

    stage: str
    state: str
    at_s: float | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class LoopRound:
    """One round, read from its folder.

    Attributes:
        folder: the folder.
    """

    folder: Path

    @property
    def number(self) -> int:
        """The number of the round; 1 for the first."""
        return int(self.folder.name)

    @property
    def key(self) -> str:
        """The unique name of this round in the table of deployments."""
        return str(_read(self.folder / _OPTIONS)["key"])

    @property
    def end(self) -> StageResult | None:
        """How it ended; None: it continues."""
        results = (self.result(stage) for stage in STAGES)
        return next((one for one in results if one is not None and one.outcome is not None), None)

    def result(self, stage: str) -> StageResult | None:
        """Return the result of a stage; None: it is not done."""
        path = self._path(stage)
        return StageResult(**_read(path)) if path.exists() else None

    def facts(self, stage: str) -> Mapping[str, Any]:
        """Return the facts of a completed stage, or none if it is not done."""
        found = self.result(stage)
        return {} if found is None else found.facts

    def begin(self, key: str, options: Mapping[str, Any]) -> None:
        """Record the round's name and its options."""
        _write(self.folder / _OPTIONS, {"key": key, "options": dict(options)})

    def write(self, stage: str, result: StageResult) -> None:
        """Record that a stage is done."""
        values = {"facts": dict(result.facts), "outcome": result.outcome, "reason": result.reason}
        _write(self._path(stage), values)

    def wait(self, stage: str, reason: str) -> None:
        """Record why a stage waits, for `lines`."""
        _write(self.folder / _WAITING, {"stage": stage, "reason": reason})

    @property
    def options(self) -> Mapping[str, Any]:
        """The options with which it was started."""
        return dict(_read(self.folder / _OPTIONS)["options"])

    def stages(self) -> Iterator[StageState]:
        """Yield the state of each stage."""
        waiting = _read(self.folder / _WAITING) if (self.folder / _WAITING).exists() else {}
        end, current = self.end, next((stage for stage in STAGES if self.result(stage) is None), None)
        for stage in STAGES:
            result = self.result(stage)
            if result is not None:
                yield StageState(stage, "done", self._path(stage).stat().st_mtime, _describe(result))
            elif stage == current and end is None:
                reason = waiting["reason"] if waiting.get("stage") == stage else ""
                yield StageState(stage, "waiting" if reason else "current", None, reason)
            else:
                yield StageState(stage, "-" if end is not None else "to come")

    def lines(self) -> Iterator[str]:
        """Yield one line for each stage."""
        for one in self.stages():
            when = "" if one.at_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.at_s))
            shown = (f"{one.state:<7}", *([when] if when else []), one.text)
            yield f"  {one.stage:<10} {'  '.join(shown)}".rstrip()

    def _path(self, stage: str) -> Path:
        return self.folder / f"{stage}.json"


def rounds_in(folder: Path) -> list[LoopRound]:
    """Return the rounds of a loop, oldest first."""
    found = [LoopRound(path) for path in folder.glob("*") if path.name.isdecimal() and (path / _OPTIONS).is_file()]
    return sorted(found, key=lambda one: one.number)


def open_round(folder: Path, options: Mapping[str, Any]) -> LoopRound:
    """Return the current round, or start the next one.

    While no stage is done, the options of the round may still change.

    Raises:
        ConfigError: a stage was done with other options.
    """
    rounds = rounds_in(folder)
    if not rounds or rounds[-1].end is not None:
        current = LoopRound(folder / str(rounds[-1].number + 1 if rounds else 1))
        current.folder.mkdir(exist_ok=True)
        current.begin(uuid.uuid4().hex, options)
        return current
    current = rounds[-1]
    if current.result(STAGES[0]) is None:
        current.begin(current.key, options)
        return current
    before, now = current.options, json.loads(json.dumps(dict(options), default=str))
    names = dict.fromkeys([*now, *before])
    check_unchanged(
        current.folder,
        {name: before.get(name) for name in names},
        {name: now.get(name) for name in names},
        "Options can change after this round.",
    )
    return current


def describe_loop(folder: Path) -> str:
    """Return the state of a loop as text: the current round, and how the earlier ones ended.

    Raises:
        ConfigError: there is no loop.
    """
    rounds = rounds_in(folder)
    if not rounds:
        raise ConfigError(f"{folder} contains no loop. Give the loop's --out, or start one without --status.")
    lines = [f"round {one.number}: {end.outcome}. {end.reason}" for one in rounds[:-1] if (end := one.end) is not None]
    last = rounds[-1]
    state = "is running" if last.end is None else f"{last.end.outcome}. {last.end.reason}"
    return "\n".join([*lines, f"round {last.number}: {state}", *last.lines()]) + "\n"


def write_status(folder: Path) -> None:
    """Write the status page of the loop."""
    write_atomically(folder / STATUS_NAME, describe_loop(folder).encode())


def _describe(result: StageResult) -> str:
    shown = [
        f"{name} {value:+.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in _short(result)
    ]
    return ", ".join([*shown, *([f"{result.outcome}: {result.reason}"] if result.outcome else [])])


def _short(result: StageResult) -> Iterator[tuple[str, Any]]:
    facts = result.facts.items()
    return ((name, value) for name, value in facts if isinstance(value, int | float | str) and name != "until_ns")


def _write(path: Path, values: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(values, indent=2, default=str) + "\n").encode())


def _read(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}. Choose another --out.") from None
    return values
