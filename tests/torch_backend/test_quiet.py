"""Loading a model writes nothing: stderr belongs to the program."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.torch

PROGRAM = """
import sys
from pathlib import Path

from lightning_trainer.backends.torch import TorchLearner
from transformers.utils.logging import is_progress_bar_enabled

for number, options in enumerate([{}, {"adapters": ("writer",), "lora_rank": 4}]):
    saved = Path(sys.argv[2], str(number))
    learner = TorchLearner(sys.argv[1], threads=1, **options)
    learner.save(saved)
    learner.close()
    TorchLearner(saved, threads=1).close()
assert is_progress_bar_enabled(), "the program's own models still show it"
"""


def test_loading_a_model_and_its_adapters_writes_nothing(tiny_model, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_PROGRESS_BARS"}
    command = [sys.executable, "-c", PROGRAM, str(tiny_model), str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert (done.stderr, done.stdout, done.returncode) == ("", "", 0)
