"""What the tests of verl share. They run in an environment of their own, made by the session `verl`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

# Before verl or Ray is imported anywhere, and passed on to every process that Ray starts.
os.environ |= {
    "VERL_PLATFORM": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_usage_threshold": "0.98",
    "RAY_worker_niceness": "0",  # the work is theirs: elsewhere on a machine in use they would get none of it
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama model with tied embeddings; vLLM's CPU attention has no heads narrower than 32."""
    from support.models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", head_dim=32)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runners import the programs of this folder, as a user's are: from the current folder."""
    monkeypatch.chdir(HERE)


@pytest.fixture
def options(model: Path, tmp_path: Path, program: None) -> dict[str, Any]:
    """Options of a run of three small steps."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"question": f"Say {number}"}) + "\n" for number in range(6)))
    return {
        "target": "program:run",
        "data": tasks,
        "model": str(model),
        "backend": "verl",
        "device": "cpu",
        "steps": 3,
        "batch_size": 2,
        "group_size": 4,
        "learning_rate": 1e-3,
        "max_tokens": 8,
        "save_every": 1,
        "keep": 4,
        "workers": 1,
        "timeout_s": 60,
        "out": tmp_path / "run",
    }
