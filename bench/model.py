"""The model that is measured, or a tiny random one where a benchmark only has to run."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import tests_path  # noqa: F401 - for tiny.py
from figures import QUICK


@cache
def model_folder() -> str:
    """Return the folder of SmolLM2-135M, or of the model that BENCH_MODEL names."""
    if not QUICK:
        from lightning_trainer import models

        return str(models.resolve(os.environ.get("BENCH_MODEL", "smollm2-135m")))
    from support.models.tiny import make_tiny_model

    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(make_tiny_model(Path(folder) / "tiny", max_position_embeddings=8192))
