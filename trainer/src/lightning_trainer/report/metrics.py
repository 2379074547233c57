"""What a run records about itself: one line of JSON per step, the same for TensorBoard and others, and the curve.

A step's numbers may raise alarms, which are separate lines.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from lightning_trainer.report.alarms import Alarm, active_alarms
from lightning_trainer.report.history import History
from lightning_trainer.report.log.lines import HELD_OUT, Line, read
from lightning_trainer.rl.scores import BY_TASK

if TYPE_CHECKING:
    from lightning_trainer.report.trackers import ExperimentTracker

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal["train", "val"]

LOG_NAME: Final = "metrics.jsonl"
CURVE_NAME: Final = "curve.png"
_TRIES: Final = 3  # consecutive failures after which a tracker is dropped: each try may take minutes


class MetricLog:
    """The metrics of one run, in its folder.

    Args:
        folder: of the run; it exists.
        from_step: the first step that is still to come. Lines of later steps, which a resumed run repeats, are removed.
        trackers: get the same numbers; closed with the log. One that keeps failing is dropped.
        held_out: names the held-out tasks, and how often each is sampled: validations on others are not compared with
            theirs. None: there are none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        from_step: int = 0,
        trackers: Sequence[ExperimentTracker] = (),
        held_out: str | None = None,
    ) -> None:
        from tensorboardX import SummaryWriter

        self._held_out = held_out
        self._folder = folder
        self._path = folder / LOG_NAME
        self._lines = [line for line in read(self._path) if _stays(line, from_step)]
        self._history = History(line for line in self._lines if self._is_compared(line))
        write_atomically(self._path, "".join(json.dumps(line) + "\n" for line in self._lines).encode())
        self._file = self._path.open("a", encoding="utf-8")
        self._drawn = -1
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=from_step + 1 if from_step else None)
        self._trackers = dict.fromkeys(trackers, 0)  # with the number of consecutive failures of each
        self.alarms: list[Alarm] = active_alarms(self._history)  # the active ones

    def add(
        self,
        kind: Kind,
        step: int,
        values: Mapping[str, float],
        facts: Mapping[str, Any] | None = None,
    ) -> list[Alarm]:
        """Store the numbers of one step, or of the validation before it.

        Returns:
            Alarms that this line raises and that were not active before.

        Args:
            kind: of the line.
            step: steps taken before: 0 for the first one and for the validation before training.
            values: numbers by name.
            facts: other entries of the line in the file, such as `BY_TASK`, by which two validations are compared.
        """
        tasks = {HELD_OUT: self._held_out} if kind == "val" and self._held_out is not None else {}
        self._write({"kind": kind, "step": step, "time": round(time.time(), 3), **tasks, **(facts or {}), **values})
        shown = shown_step(kind, step)
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, shown)
        for tracker in list(self._trackers):
            self._tell(tracker, kind, shown, values)
        standing = {alarm.name for alarm in self.alarms}
        self.alarms = active_alarms(self._history)
        fresh = [alarm for alarm in self.alarms if alarm.name not in standing]
        for alarm in fresh:
            facts = {"name": alarm.name, "text": alarm.text, "steps_taken": alarm.step}
            self._write({"kind": "alarm", "step": step, "time": round(time.time(), 3), **facts})
            self._board.add_text(f"alarm/{alarm.name}", alarm.text, shown)
        self._board.flush()
        return fresh

    def add_event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        """Store an event between two steps, as a line of its own kind."""
        self._write({"kind": kind, "step": step, "time": round(time.time(), 3), **facts})

    def raised(self) -> list[Alarm]:
        """Return every alarm of the run, including those that are no longer active."""
        return [
            Alarm(line["name"], line["steps_taken"], line["text"]) for line in self._lines if line["kind"] == "alarm"
        ]

    def _write(self, line: Line) -> None:
        self._lines.append(line)
        if self._is_compared(line):
            self._history.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def _tell(self, tracker: ExperimentTracker, kind: Kind, step: int, values: Mapping[str, float]) -> None:
        try:
            tracker.log(kind, step, values)
            self._trackers[tracker] = 0
        except Exception as error:  # noqa: BLE001 - whatever a service does, the run goes on
            self._trackers[tracker] += 1
            given_up = self._trackers[tracker] >= _TRIES
            logger.warning(
                "%s did not accept the metrics of step %d (%s); they are in %s%s",
                tracker.name, step, error, self._path, ". It gets no further metrics" if given_up else "",
            )  # fmt: skip
            if given_up:
                del self._trackers[tracker]

    def lines(self, kind: Kind | Literal["alarm", "rollback"]) -> list[Line]:
        """Return every line of a kind."""
        return [line for line in self._lines if line["kind"] == kind]

    def validations(self) -> list[Line]:
        """Return the lines of the validations on the current held-out tasks."""
        return [line for line in self._lines if self._is_of_now(line)]

    def _is_compared(self, line: Line) -> bool:
        return line["kind"] == "train" or self._is_of_now(line)

    def _is_of_now(self, line: Line) -> bool:
        return line["kind"] == "val" and line.get(HELD_OUT) == self._held_out

    def series(self, kind: Kind, name: str) -> list[tuple[int, float]]:
        """Return (step, value) for every line of a kind with this number; for validations, on the current tasks."""
        lines = self.validations() if kind == "val" else self.lines(kind)
        return [(line["step"], line[name]) for line in lines if name in line]

    def draw(self) -> Path:
        """Draw the reward curve if there is anything new, and return the picture's path."""
        path = self._folder / CURVE_NAME
        if self._drawn == len(self._lines) and path.exists():
            return path
        self._drawn = len(self._lines)
        curves: dict[str, Sequence[tuple[int, float]]] = {
            "training": self._shown("train", "reward"),
            "held out": self._shown("val", "reward"),
        }
        for name in self._history.names("reward/"):
            curves[f"training, {name.removeprefix('reward/')}"] = self._shown("train", name)
        write_atomically(path, _picture({label: points for label, points in curves.items() if points}))
        return path

    def _shown(self, kind: Kind, name: str) -> list[tuple[int, float]]:
        return [(shown_step(kind, step), value) for step, value in self.series(kind, name)]

    def close(self) -> None:
        """Close the files and the trackers."""
        self._file.close()
        self._board.close()
        for tracker in self._trackers:
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001 - whatever a service does, the run has ended
                logger.warning("%s did not take the end of the run: %s", tracker.name, error)


def shown_step(kind: Kind, step: int) -> int:
    """Return the step number that people see: training steps count from 1, a validation has the steps before it."""
    return step + 1 if kind == "train" else step


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or a crash, sees all of it or none of it.

    Raises:
        OSError: it cannot be written; the error names the file, and no partial file is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)  # the system names no file if the disk is full
        raise


def newest_validations(lines: Iterable[Line]) -> list[Line]:
    """Return the lines of the validations on the same tasks as the last one: a resumed run may have other tasks."""
    found = [line for line in lines if line["kind"] == "val"]
    return [line for line in found if line.get(HELD_OUT) == found[-1].get(HELD_OUT)]


def best_step(validations: Iterable[Line]) -> int | None:
    """Return after how many steps the held-out reward first reached its highest value; None without a validation.

    Validations that cannot be compared with each other, because a judge gave the rewards, have no rewards by task.
    """
    known = [line for line in validations if line.get("reward") is not None and line.get(BY_TASK)]
    return max(known, key=lambda line: float(line["reward"]), default={"step": None})["step"]


def _stays(line: Line, from_step: int) -> bool:
    """Whether a line was written before the checkpoint of a resumed run, including the validation before its step.

    An alarm has the step of the line that raised it: of the validation, or of the step after it.
    """
    if line["step"] != from_step:
        return bool(line["step"] < from_step)
    return line["kind"] in {"val", "rollback"} or (line["kind"] == "alarm" and line["steps_taken"] == from_step)


def _picture(curves: Mapping[str, Iterable[tuple[int, float]]]) -> bytes:
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for label, points in curves.items():
        steps, values = zip(*points, strict=True)
        width, style = (2.0, "-") if label == "training" else (1.0, ":" if label == "held out" else "--")
        axes.plot(steps, values, label=label, linewidth=width, linestyle=style, marker="o", markersize=3)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.grid(visible=True, alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if curves:
        axes.legend()
    output = io.BytesIO()
    FigureCanvasAgg(figure).print_figure(output, format="png")
    return output.getvalue()
