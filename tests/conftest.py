"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama model in float32 with a byte tokenizer: see `tiny`."""
    pytest.importorskip("torch")
    from tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
