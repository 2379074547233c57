"""The scripted vLLM server, for every test of an engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """What the server was asked, in order."""
    log = tmp_path / "scripted.jsonl"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("scripted")))
    monkeypatch.setenv("SCRIPTED_LOG", str(log))
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]
