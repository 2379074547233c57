"""From which checkpoints a run on verl goes on. Without verl."""

from __future__ import annotations

import json

import pytest

from lightning_spans.errors import ConfigError
from lightning_trainer.backends.verl.resuming import newest_checkpoint, note_identity

IDENTITY = {"seed": 1}


@pytest.fixture
def run(tmp_path):
    """The folder of a run with a checkpoint that eight GPUs wrote."""
    actor = tmp_path / "checkpoints" / "global_step_4" / "actor"
    actor.mkdir(parents=True)
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 8}))
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    note_identity(tmp_path, IDENTITY)
    return tmp_path


def test_a_run_goes_on_with_as_many_gpus(run):
    assert newest_checkpoint(run, IDENTITY, accelerators=8).name == "global_step_4"


def test_another_number_of_gpus_is_refused_before_anything_starts(run):
    with pytest.raises(ConfigError, match="parts for 8 GPUs, not 4") as refused:
        newest_checkpoint(run, IDENTITY, accelerators=4)
    assert f"--model {run}/checkpoints/global_step_4/actor/huggingface" in str(refused.value)
