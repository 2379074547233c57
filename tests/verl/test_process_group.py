"""The one patch of verl: whether it is needed, and whether it does what it says."""

from __future__ import annotations

import pytest

pytest.importorskip("verl.protocol")

import inspect
import subprocess
import sys

import torch


def test_verl_still_asks_torch_for_what_torch_refuses():
    """When this fails, verl or torch can do it alone: remove `process_group.py`."""
    from verl.utils import distributed

    original = inspect.unwrap(distributed.initialize_global_process_group_ray)
    assert 'f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"' in inspect.getsource(original)
    with pytest.raises(ValueError, match="Duplicate device type cpu"):
        torch.distributed.BackendConfig(torch.distributed.Backend("cpu:gloo,cpu:gloo"))


def test_the_patch_stands_where_the_platform_is_the_cpu():
    from verl.utils import distributed

    from lightning_trainer.backends.verl.cpu import process_group

    patched = distributed.initialize_global_process_group_ray
    assert inspect.unwrap(patched) is not patched
    process_group.patch()
    assert distributed.initialize_global_process_group_ray is patched


def test_verl_finds_what_we_registered():
    from verl.plugin.platform import get_platform
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.replica import get_rollout_replica_class

    from lightning_trainer.backends.verl import registrations  # noqa: F401 - they register themselves
    from lightning_trainer.backends.verl.cpu.vllm import ReplicaCPU
    from lightning_trainer.backends.verl.steps import trainers  # noqa: F401 - they register themselves

    assert get_platform().device_name == "cpu"
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2")
    assert EngineRegistry.get_engine_cls("value_model", "fsdp2")
    assert get_rollout_replica_class("vllm") is ReplicaCPU
    for ending in ("", "_sequence_mean", "_sequence_sum"):
        assert get_adv_estimator_fn(f"lightning{ending}")
        assert get_adv_estimator_fn(f"lightning_whitened{ending}")
    assert get_trainer_cls("lightning_sync").kind == "sync"
    assert get_trainer_cls("lightning_async").kind == "colocate_async"


def test_the_cpu_can_be_chosen_after_verl_was_imported():
    """As in a program that composes verl's configuration, which imports verl, before it trains."""
    program = (
        "import os; os.environ.pop('VERL_PLATFORM', None)\n"
        "import verl.trainer.config\n"
        "from lightning_trainer.backends.verl.plugin import use_cpu\n"
        "use_cpu()\n"
        "import verl.trainer.main_ppo\n"
        "from verl.utils.device import get_device_name\n"
        "print('device', get_device_name())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "device cpu" in done.stdout, done.stderr
