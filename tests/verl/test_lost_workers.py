"""What goes wrong on verl's side ends with a word, and within a bound."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("verl.protocol")

import psutil
import ray
from ray.exceptions import RayActorError, RayTaskError

from lightning_spans.errors import ConfigError, LightningError
from lightning_trainer import TrainConfig, train
from lightning_trainer.backends.verl import process
from lightning_trainer.backends.verl.options.overrides import Site
from lightning_trainer.backends.verl.process import explain_error, run_verl
from lightning_trainer.backends.verl.steps.agreement import WeightsError
from lightning_trainer.backends.verl.steps.trainers import within
from lightning_trainer.report.progress import Silent
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job
from support.training.readings import lines

NOBODY = {"workers": 0, "concurrency": 1, "logs": Path("logs")}


def test_a_hung_weight_transfer_ends_within_its_bound():
    began = time.monotonic()
    with pytest.raises(WeightsError, match="did not reach vLLM within 0 s"):
        within(0.2, lambda: time.sleep(30))
    assert time.monotonic() - began < 5


def test_an_error_of_the_transfer_is_raised_as_it_is():
    def fail() -> None:
        raise OSError("shared memory")

    assert within(5, lambda: 3) == 3
    with pytest.raises(OSError, match="shared memory"):
        within(5, fail)


def test_our_own_errors_come_out_of_rays_wrapping():
    inner = WeightsError("the weights")
    assert explain_error(RayTaskError("run", "traceback", inner)) is inner
    wrapped = explain_error(RayTaskError("run", "traceback", ValueError("bad value")))
    assert isinstance(wrapped, LightningError)
    died = explain_error(RayTaskError("run", "traceback", RayActorError()))
    assert "a process of verl died" in str(died)


@pytest.mark.parametrize(
    "words",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.28 GiB.",
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
        "ValueError: Free memory on device cuda:0 (30/79 GiB) on startup is less than desired GPU memory utilization",
    ],
)
def test_a_gpu_without_room_is_said_first_with_what_to_do(words):
    told = str(explain_error(RayTaskError("run", f"traceback\n{words}", RuntimeError("x"))))
    first, *rest = told.splitlines()
    assert first.startswith("a GPU has too little memory")
    assert "--dry-run" in first
    assert words in "\n".join(rest), "and verl's own words after it"


def test_a_verl_that_cannot_be_imported_is_told(options, tmp_path, monkeypatch):
    """A run must not end as if it had been done."""
    monkeypatch.setitem(sys.modules, "verl.trainer.main_ppo", None)
    with pytest.raises(LightningError, match="verl failed: import of"):
        run_verl(TrainConfig(**options), Site(folder=tmp_path), Runner(Job(target="program:run"), **NOBODY).check)


def test_a_ray_that_does_not_answer_ends_the_run_within_a_bound(options, tmp_path, monkeypatch):
    importlib.import_module("verl.trainer.main_ppo")  # which takes its time
    asked, over = threading.Event(), threading.Event()
    monkeypatch.setattr(ray, "init", lambda **_: asked.set() or over.wait(60))
    monkeypatch.setattr(process, "_START_S", 1.0)
    monkeypatch.setattr(process, "_END_S", 0.1)
    try:
        with pytest.raises(LightningError, match=r"Ray on this machine did not answer within 1 s.*raylet\.out"):
            run_verl(TrainConfig(**options), Site(folder=tmp_path), Runner(Job(target="program:run"), **NOBODY).check)
        assert asked.wait(30)
    finally:
        over.set()
        for thread in threading.enumerate():
            if thread.name == "lightning-verl":
                thread.join(30)


def test_a_temporary_folder_inside_the_environment_is_refused(options, tmp_path, monkeypatch):
    """Ray's workers refuse to start there, and Ray waits for them for ever."""
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    with pytest.raises(ConfigError, match="Set RAY_TMPDIR to another folder"):
        train(TrainConfig(**options))
    assert not options["out"].exists()


def test_a_trl_on_which_verls_workers_would_fail_is_refused(options, monkeypatch):
    if "TRL_FOLDER" not in os.environ:
        pytest.skip("needs a folder with a trl of today")
    monkeypatch.syspath_prepend(os.environ["TRL_FOLDER"])
    with pytest.raises(ConfigError, match=r"verl does not work with this trl .*pip uninstall trl"):
        train(TrainConfig(**options))
    assert not options["out"].exists()


class KillsAfter(Silent):
    """Kills verl's training worker once a step is told."""

    def __init__(self, step: int) -> None:
        self.step_to_kill_after, self.notes = step, list[str]()

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.step_to_kill_after:
            for process in psutil.Process().children(recursive=True):
                if process.name().startswith("ray::WorkerDict"):
                    process.kill()


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_rollout_that_never_ends_is_left_out_and_a_killed_worker_is_told(options):
    """Two steps with an agent that hangs on one task of six, then the trainer's process is killed."""
    options |= {"target": "hanging_program:run", "timeout_s": 60, "max_attempts": 1, "batch_size": 6, "group_size": 2}
    progress = KillsAfter(1)
    with pytest.raises(LightningError, match="a process of verl died"):
        train(TrainConfig(**options), progress)
    assert progress.notes[-1].endswith(f"Continue with: lightning-rl train --resume {options['out']}")
    steps = lines(options["out"])
    assert len(steps) >= 2
    assert [step["failed"] for step in steps[:2]] == [2, 2]
    assert all(step["rollouts"] == 12 and step["grad_norm"] > 0 for step in steps[:2])
