"""Fixtures that several test files share."""

from __future__ import annotations

import importlib
import inspect
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ours", deadline=None)  # a slow machine is no fault of the code
settings.load_profile("ours")

for _library in ("httpx", "httpx2"):  # nor is silence of more than five seconds, their default
    with suppress(ImportError):
        _patient = inspect.signature(importlib.import_module(_library).get).parameters["timeout"].default
        _patient.read = _patient.connect = _patient.write = _patient.pool = 60.0


@pytest.fixture(autouse=True)
def _patient_detach(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with other things to do, opening a store takes longer than `detach()` waits."""
    monkeypatch.setattr("lightning_spans.record.delivery.sink.DETACH_S", 60.0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama model in float32 with a byte tokenizer: see `tiny`."""
    pytest.importorskip("torch")
    from tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
