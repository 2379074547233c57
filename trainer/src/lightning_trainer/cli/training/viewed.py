"""`train --view`: the run's own viewer, in its own process, so that viewing takes no time from training."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from lightning_trainer.config.train import TrainConfig
from lightning_trainer.engines.vllm import supervised
from lightning_trainer.report.metrics import LOG_NAME
from lightning_trainer.report.progress import Progress


def with_folder(config: TrainConfig) -> TrainConfig:
    """Return the options with a folder for the run, named as the run would name it.

    The viewer needs to know the folder.
    """
    if config.resume is not None or config.out is not None:
        return config
    from lightning_trainer.run.folders import RUNS

    day = dt.datetime.now().astimezone().date().isoformat()
    names = (RUNS / (day if number == 1 else f"{day}-{number}") for number in itertools.count(1))
    return config.model_copy(update={"out": next(path for path in names if not path.exists())})


class ViewerProgress(Progress):
    """Forwards progress to another callback, and starts a viewer when the run begins.

    Args:
        progress: the other callback.
        folder: of the run, or a checkpoint in it.
    """

    def __init__(self, progress: Progress, folder: Path | None) -> None:
        self._progress = progress
        self._folder = folder
        self._viewer: subprocess.Popen[str] | None = None

    def __enter__(self) -> ViewerProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._viewer is not None:
            if self._viewer.stdin is not None:
                self._viewer.stdin.close()
            self._viewer.wait()

    def _look(self) -> None:
        """Start the viewer once the folder records what is trained."""
        if self._viewer is not None or self._folder is None:
            return
        folders = (self._folder, *self._folder.resolve().parents)
        found = next((folder for folder in folders if (folder / LOG_NAME).is_file()), None)
        if found is None:
            return
        command = [sys.executable, "-m", "lightning_trainer.cli", "view", str(found), "--trust", "--no-open"]
        self._viewer = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, supervised.__file__, *command],
            stdin=subprocess.PIPE,  # the viewer ends when it is closed, also if this process is killed
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the run, which saves first
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        threading.Thread(target=self._tell, args=(self._viewer,), daemon=True).start()

    def _tell(self, viewer: subprocess.Popen[str]) -> None:
        line = viewer.stdout.readline() if viewer.stdout is not None else ""
        self._progress.note(f"look at it: {json.loads(line)['url']}" if line else "the viewer did not start")

    def begin(self, step: int, steps: int) -> None:
        """Forward the event."""
        self._progress.begin(step, steps)
        self._look()

    def phase(self, name: str, done: int = 0, total: int = 0) -> None:
        """Forward the event."""
        self._progress.phase(name, done, total)
        self._look()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forward the event."""
        self._progress.step(step, metrics)

    def note(self, text: str) -> None:
        """Forward the event."""
        self._progress.note(text)

    def stopping(self) -> None:
        """Forward the event."""
        self._progress.stopping()

    def alarms(self, texts: Sequence[str]) -> None:
        """Forward the event."""
        self._progress.alarms(texts)
