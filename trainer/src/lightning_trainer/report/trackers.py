"""Experiment trackers in addition to our own files: MLflow and Weights & Biases, imported when chosen by name."""

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
from lightning_trainer.registry import unknown

PROJECT: Final = "lightning-rl"  # experiment or project if the environment names none
IDS_NAME: Final = "trackers.json"  # in the run's folder: the id of the run in each tracker


class ExperimentTracker(Protocol):
    """Receives a run's metrics."""

    @property
    def name(self) -> str:
        """Its name on the command line."""
        ...

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step (kind ``train``) or of a validation (``val``), each named KIND/NAME.

        Raises:
            Exception: the service does not accept them.
        """
        ...

    def close(self) -> None:
        """Close the tracker: the run has ended, or will be resumed later."""
        ...


def check(names: Sequence[str]) -> None:
    """Reject trackers that cannot be opened here.

    Raises:
        ConfigError: a name is unknown, or its package is not installed.
    """
    for name in names:
        if name not in _KNOWN:
            raise unknown("tracker", name, _KNOWN)
        if find_spec(name) is None:
            raise ConfigError(f'{name} is not installed here. Run: pip install "lightning-trainer[{name}]"')


@contextmanager
def open_trackers(names: Sequence[str], folder: Path, options: Mapping[str, Any]) -> Iterator[list[ExperimentTracker]]:
    """Open the named trackers, in which a resumed run continues, too. The log closes them.

    Args:
        names: ``mlflow``, ``wandb``.
        folder: of the run; its name names the run.
        options: of the run, stored as its parameters.

    Raises:
        ConfigError: a name is unknown, the package is not installed, or the service cannot be reached.
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
    """Logs to MLflow: to ``MLFLOW_TRACKING_URI``, by default to ``mlflow.db`` in the run's folder."""

    name = "mlflow"

    def __init__(self, folder: Path, options: Mapping[str, Any], run_id: str | None) -> None:
        mlflow = import_module("mlflow")
        self._entities = import_module("mlflow.entities")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        self._client = mlflow.MlflowClient(tracking_uri=uri)  # our own, so the program's settings are unchanged
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
        """Log the numbers of a step; see `ExperimentTracker.log`."""
        now = int(time.time() * 1000)
        numbers = [
            self._entities.Metric(re.sub(r"[^\w\-. :/]", "_", f"{kind}/{name}"), float(value), now, step)
            for name, value in values.items()
            if math.isfinite(value)
        ]
        self._client.log_batch(self.run_id, metrics=numbers)

    def close(self) -> None:
        """Mark the run as finished for now."""
        self._client.set_terminated(self.run_id)


class Wandb:
    """Logs to Weights & Biases, as its environment variables say (``WANDB_MODE=offline`` only writes files)."""

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
            reinit="create_new",  # a run that the program has opened stays separate
        )
        self._run.define_metric("*", step_metric="step")  # wandb's own count cannot go back, as a resumed run does

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of a step; see `ExperimentTracker.log`."""
        self._run.log({"step": step, **{f"{kind}/{name}": value for name, value in values.items()}})

    def close(self) -> None:
        """Mark the run as finished for now."""
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
