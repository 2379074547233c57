"""Experiment trackers: the real ones, on local files, and what happens when one fails."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.report.metrics import MetricLog
from lightning_trainer.report.trackers import open_trackers

OPTIONS = {"model": "m", "agents": ["writer"], "val": None}


def logged(folder: Path, name: str, *, from_step: int = 0) -> None:
    with open_trackers([name], folder, OPTIONS) as trackers:
        log = MetricLog(folder, from_step=from_step, trackers=trackers)
        log.add("val", from_step, {"reward": 0.1})
        log.add("train", from_step, {"reward": 0.5, "reward/Senior (r)": 0.25, "loss": float("nan")})
        log.close()


def test_mlflow_keeps_every_number_and_a_run_goes_on_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="runs in the nox session `trackers`")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    logged(tmp_path, "mlflow")
    logged(tmp_path, "mlflow", from_step=1)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("lightning-rl")
    [run] = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == tmp_path.name
    assert run.data.params == {"model": "m", "agents": "['writer']"}
    points = client.get_metric_history(run.info.run_id, "train/reward")
    assert [(point.step, point.value) for point in points] == [(1, 0.5), (2, 0.5)]  # steps count from 1
    assert run.data.metrics["train/reward/Senior _r_"] == 0.25
    assert "train/loss" not in run.data.metrics


def test_mlflow_goes_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="runs in the nox session `trackers`")
    uri = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    folder = tmp_path / "run"
    folder.mkdir()
    logged(folder, "mlflow")
    assert not (folder / "mlflow.db").exists()
    client = mlflow.MlflowClient(tracking_uri=uri)
    assert client.search_runs([client.get_experiment_by_name("mine").experiment_id])


def test_wandb_writes_its_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="runs in the nox session `trackers`")
    monkeypatch.setenv("WANDB_MODE", "offline")
    logged(tmp_path, "wandb")
    first = json.loads((tmp_path / "trackers.json").read_text())["wandb"]
    logged(tmp_path, "wandb", from_step=1)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert {path.stem for path in files} == {f"run-{first}"}
    assert b"train/reward" in files[0].read_bytes()


def test_tracker_that_is_unknown_or_not_installed_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(ConfigError, match=r"unknown tracker 'comet'\. Use one of: mlflow, wandb"),
        open_trackers(["comet"], tmp_path, {}),
    ):
        pass
    monkeypatch.setattr("lightning_trainer.report.trackers.find_spec", lambda _: None)
    with (
        pytest.raises(ConfigError, match=r'pip install "lightning-trainer\[wandb\]"'),
        open_trackers(["wandb"], tmp_path, {}),
    ):
        pass


def test_trackers_may_be_one_text_with_commas() -> None:
    config = TrainConfig(target="a:b", data=Path("x"), model="m", trackers="mlflow, wandb")  # type: ignore[arg-type]
    assert config.trackers == ("mlflow", "wandb")


class Noting:
    name = "noting"

    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self.steps.append((kind, step))

    def close(self) -> None:
        pass


def test_trackers_get_training_steps_from_1_and_a_validation_after_so_many_steps(tmp_path: Path) -> None:
    noting = Noting()
    log = MetricLog(tmp_path, trackers=[noting])
    log.add("val", 0, {"reward": 0.5})
    log.add("train", 0, {"reward": 0.5})
    log.add("val", 1, {"reward": 0.5})
    log.close()
    assert noting.steps == [("val", 0), ("train", 1), ("val", 1)]


class Failing:
    name = "failing"

    def __init__(self) -> None:
        self.asked = 0
        self.closed = False

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self.asked += 1
        raise ConnectionError("the server is down")

    def close(self) -> None:
        self.closed = True
        raise ConnectionError("still down")


def test_tracker_that_fails_stops_nothing_and_is_told_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failing = Failing()
    log = MetricLog(tmp_path, trackers=[failing])
    for step in range(5):
        log.add("train", step, {"reward": 0.5})
    log.close()
    assert failing.asked == 3
    assert "It gets no further metrics" in caplog.text
    assert len(log.series("train", "reward")) == 5
