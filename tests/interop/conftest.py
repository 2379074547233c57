from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Before CrewAI and LiteLLM are imported: tests send nothing home, and fetch nothing.
os.environ |= {f"CREWAI_{name}": "true" for name in ("DISABLE_TELEMETRY", "DISABLE_TRACKING", "TESTING")}
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "true", "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental"}


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "user-key")
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path / "crewai"))
    monkeypatch.setenv("LIGHTNING_SPOOL", str(tmp_path / "spool"))


@pytest.fixture
def lightning_server(tmp_path):
    """A `lightning-rl server` of its own: its URL, its key, and the store that it writes."""
    store = str(tmp_path / "server.db")
    command = [sys.executable, "-m", "lightning_trainer.cli", "server", "--store", store, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            ready = json.loads(process.stdout.readline())
            yield ready["url"], Path(ready["key_file"]).read_text().strip(), store
        finally:
            process.terminate()
