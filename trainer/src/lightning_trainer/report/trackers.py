"""Experiment trackers beside our own files: MLflow and Weights & Biases, chosen by name. Imported when chosen."""

from __future__ import annotations

import json
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol

from lightning_spans.errors import ConfigError

PROJECT: Final = "lightning-rl"  # experiment or project, where the environment names none
IDS_NAME: Final = "trackers.json"  # in the run's folder: under which id each tracker knows the run


class ExperimentTracker(Protocol):
    """Takes a run's numbers."""

    @property
    def name(self) -> str:
        """What it is called on the command line."""
        ...

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step (kind ``train``) or of a validation (``val``), each named KIND/NAME.

        Raises:
            Exception: the service does not take them.
        """
        ...

    def close(self) -> None:
        """The run has ended, or goes on another time."""
        ...


def check(names: Sequence[str]) -> None:
    """Refuse trackers that can't be opened here.

    Raises:
        ConfigError: a name is unknown, or its package is not installed.
    """
    for name in names:
        if name not in _KNOWN:
            raise ConfigError(f"unknown tracker {name!r}. Use one of: {', '.join(_KNOWN)}.")
        if find_spec(name) is None:
            raise ConfigError(f'{name} is not installed here. Run: pip install "lightning-trainer[{name}]"')


@contextmanager
def opened(names: Sequence[str], folder: Path, options: Mapping[str, Any]) -> Iterator[list[ExperimentTracker]]:
    """Open the trackers named; a run that goes on goes on there, too. They are closed by the log.

    Args:
        names: ``mlflow``, ``wandb``.
        folder: of the run; its name names the run.
        options: of the run, kept as its parameters.

    Raises:
        ConfigError: a name is unknown, the package is not installed, or the service can't be reached.
    """
    check(names)
    ids = _read_ids(folder)
    found: list[ExperimentTracker] = []
    for name in names:
        try:
            tracker = _KNOWN[name](folder, options, ids.get(name))
        except Exception as error:
            raise ConfigError(f"{name} can't be used: {error}. Set it up, or leave it out of --trackers.") from error
        ids[name] = tracker.run_id
        found.append(tracker)
    if found:
        (folder / IDS_NAME).write_text(json.dumps(ids) + "\n", encoding="utf-8")
    yield found


class Mlflow:
    """Tells MLflow. ``MLFLOW_TRACKING_URI`` says where; without it, into ``mlflow.db`` in the run's folder."""

    name = "mlflow"

    def __init__(self, folder: Path, options: Mapping[str, Any], run_id: str | None) -> None:
        mlflow = import_module("mlflow")
        self._entities = import_module("mlflow.entities")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        self._client = mlflow.MlflowClient(tracking_uri=uri)  # a client of our own: the program's settings stay
        self.run_id = run_id or self._new_run(folder.name, options)
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")

    def _new_run(self, name: str, options: Mapping[str, Any]) -> str:
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found is not None else self._client.create_experiment(experiment)
        run = self._client.create_run(place, run_name=name)
        params = [self._entities.Param(key, str(value)[:500]) for key, value in options.items() if value is not None]
        self._client.log_batch(run.info.run_id, params=params)
        return str(run.info.run_id)

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step: `ExperimentTracker.log`."""
        now = int(time.time() * 1000)
        numbers = [
            self._entities.Metric(re.sub(r"[^\w\-. :/]", "_", f"{kind}/{name}"), float(value), now, step)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        self._client.log_batch(self.run_id, metrics=numbers)

    def close(self) -> None:
        """Say that the run is done for now."""
        self._client.set_terminated(self.run_id)


class Wandb:
    """Tells Weights & Biases, as its own environment variables say (``WANDB_MODE=offline`` writes files only)."""

    name = "wandb"

    def __init__(self, folder: Path, options: Mapping[str, Any], run_id: str | None) -> None:
        wandb = import_module("wandb")
        self.run_id = run_id or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=self.run_id,
            name=folder.name,
            dir=str(folder),
            config=dict(options),
            resume="allow",
            reinit="create_new",  # a run that the program has open stays its own
        )
        self._run.define_metric("*", step_metric="step")  # its own count may not go back, as a run that goes on does

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Take the numbers of a step: `ExperimentTracker.log`."""
        self._run.log({"step": step, **{f"{kind}/{name}": value for name, value in values.items()}})

    def close(self) -> None:
        """Say that the run is done for now."""
        self._run.finish()


_KNOWN: Final[Mapping[str, Callable[[Path, Mapping[str, Any], str | None], Mlflow | Wandb]]] = {
    "mlflow": Mlflow,
    "wandb": Wandb,
}


def _read_ids(folder: Path) -> dict[str, str]:
    path = folder / IDS_NAME
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{path} can't be read: {error}. Remove it to track the run as a new one.") from None
