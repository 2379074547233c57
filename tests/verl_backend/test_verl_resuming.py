"""From which checkpoints a run on verl goes on. Without verl."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer.backend_protocol import Start
from lightning_trainer.backends.verl import backend
from lightning_trainer.backends.verl.resuming import find_checkpoint, note_identity
from lightning_trainer.run.folders import read_config
from lightning_trainer.run.interrupts import SavedInterrupt
from lightning_trainer.run.train import _resumable_step

IDENTITY = {"seed": 1}


@pytest.fixture
def run(tmp_path):
    """The folder of a run with two checkpoints that eight GPUs wrote."""
    for step in (2, 4):
        model = tmp_path / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface"
        model.mkdir(parents=True)
        (model.parent / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 8}))
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    (tmp_path / "checkpoint").symlink_to(model)
    (tmp_path / "config.json").write_text('{"seed": 1}')
    note_identity(tmp_path, IDENTITY)
    return tmp_path


def test_a_run_goes_on_with_as_many_gpus(run):
    assert find_checkpoint(run, IDENTITY, accelerators=8).name == "global_step_4"
    assert find_checkpoint(run / "checkpoint", IDENTITY, accelerators=8).name == "global_step_4"


def test_a_run_goes_on_from_the_checkpoint_that_is_named(run):
    earlier = run / "checkpoints" / "global_step_2"
    assert find_checkpoint(earlier, IDENTITY, accelerators=8) == earlier


def test_a_run_that_goes_on_from_an_earlier_checkpoint_does_not_return_to_the_later_one(run, monkeypatch):
    """If it ends before it saves, the message says to continue with `--resume RUN`."""

    def stop(*_args, **_options):
        raise SavedInterrupt

    earlier = run / "checkpoints" / "global_step_2"
    monkeypatch.setattr(backend, "resolve_model", stop)
    with pytest.raises(SavedInterrupt):
        backend.VerlBackend().train(
            SimpleNamespace(folder=run, config=None, start=Start(step=2, folder=run, checkpoint=earlier))
        )
    assert find_checkpoint(run, IDENTITY, accelerators=8) == earlier
    assert _resumable_step(SimpleNamespace(folder=run)) == 2


def test_a_checkpoint_that_verl_removed_is_refused(run):
    earlier = run / "checkpoints" / "global_step_2"
    shutil.rmtree(earlier / "actor")
    with pytest.raises(ConfigError, match="contains no weights") as refused:
        find_checkpoint(earlier, IDENTITY, accelerators=8)
    assert f"--resume {run}." in str(refused.value)


def test_the_options_of_a_run_that_goes_on_are_read_from_its_folder(run):
    for resume in (run, run / "checkpoint", run / "checkpoints" / "global_step_2"):
        assert read_config(resume) == {"seed": 1}


def test_another_number_of_gpus_is_refused_before_anything_starts(run):
    with pytest.raises(ConfigError, match="parts for 8 GPUs, not 4") as refused:
        find_checkpoint(run, IDENTITY, accelerators=4)
    assert f"--model {run}/checkpoints/global_step_4/actor/huggingface" in str(refused.value)
