"""Comparison of runs: their results, their cost, and the options in which they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from lightning_trainer.config.files import CONFIG_NAME, read_shown
from lightning_trainer.intervals import Declared, Estimate
from lightning_trainer.report.log.lines import read_newest
from lightning_trainer.report.metrics import LOG_NAME, newest_validations
from lightning_trainer.rl.scores import BY_TASK, Score, difference
from lightning_trainer.work import Work

_WHERE: Final = ("out", "resume", "port", "store")  # options about where, not about what


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One run.

    Attributes:
        folder: of the run.
        steps: taken.
        before, after: held-out reward before training and of the last validation; None without.
        difference, difference_low, difference_high: rise of the held-out reward, paired by task, and its interval; None
            if it was not measured twice.
        curve: mean training reward of each step.
        seconds: that its steps took.
        tokens: generated in all steps.
        trainable: whether it has a checkpoint.
        options: its configuration.
    """

    folder: str
    steps: int
    before: float | None
    after: float | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    curve: tuple[float, ...]
    seconds: float
    tokens: int
    trainable: bool
    options: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        return asdict(self)


def find(places: Sequence[Path]) -> list[Path]:
    """Return run folders, oldest first: those that are named, and those in other folders that are named."""
    ours = {path for place in places for path in ([place] if is_run(place) else _runs_in(place))}
    return sorted(ours, key=lambda path: (path / CONFIG_NAME).stat().st_mtime_ns)


def is_run(path: Path) -> bool:
    """Whether a folder is a run's folder."""
    return (path / CONFIG_NAME).is_file() and (path / LOG_NAME).is_file()


def _runs_in(place: Path) -> list[Path]:
    return [path for path in (*place.glob("*"), *place.glob("*/run")) if is_run(path)]


def row_of(folder: Path) -> RunSummary:
    """Return the summary of a run, read from its own files."""
    lines = read_newest(folder / LOG_NAME)
    steps = [line for line in lines if line["kind"] == "train"]
    validations = newest_validations(lines)
    held = [(line["step"], line["reward"]) for line in validations if "reward" in line]
    options = read_shown(folder)
    rise = _rise(validations, Work.declared_in(options))
    return RunSummary(
        folder=str(folder),
        steps=len(steps),
        before=held[0][1] if held and held[0][0] == 0 else None,
        after=held[-1][1] if len(held) > 1 or any(step for step, _ in held) else None,
        difference=rise.mean,
        difference_low=rise.low,
        difference_high=rise.high,
        curve=tuple(line["reward"] for line in steps if "reward" in line),
        seconds=round(sum(line.get("seconds", 0.0) for line in lines if line["kind"] != "alarm"), 1),
        tokens=round(sum(line.get("tokens_generated", 0.0) for line in steps)),
        trainable=(folder / "checkpoint").exists(),
        options=options,
    )


def _rise(validations: Sequence[Mapping[str, Any]], declared: Declared) -> Estimate:
    ends = [Score.from_metrics(line, declared) for line in (*validations[:1], *validations[1:][-1:]) if BY_TASK in line]
    if len(ends) <= 1 or validations[0]["step"]:
        return Estimate(None)
    return difference(ends[1], ends[0])[0]


def differences(rows: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """Return the options in which runs differ, each with its value in every run; None if a run has no such option.

    Options that only some of the runs have belong to another command, such as sft, and do not count.
    """
    names = sorted({name for row in rows for name in row.options} - set(_WHERE))
    values = {name: [row.options.get(name) for row in rows] for name in names}
    shared = [name for name in names if all(name in row.options for row in rows if row.options)]
    return {name: values[name] for name in shared if any(value != values[name][0] for value in values[name])}
