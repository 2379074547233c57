"""The store in memory, which tests use instead of a real one, keeps the same promises."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_conformance import MemoryStore, StoreConformance
from lightning_spans.store import Store


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()

    @pytest.fixture
    def reopen(self, store: MemoryStore) -> Callable[[], Store]:
        return lambda: MemoryStore(on=store)


def test_stores_that_do_not_share_know_nothing_of_each_other() -> None:
    one, other = MemoryStore(), MemoryStore()
    assert one.consume_group("g", "run 1")
    assert other.consume_group("g", "run 2")


FORGETFUL = """
import pytest
from lightning_conformance import MemoryStore, StoreConformance


class Forgetful(MemoryStore):
    def add_spans(self, spans):
        return 42


class TestForgetful(StoreConformance):
    @pytest.fixture
    def store(self):
        return Forgetful()
"""


def test_an_inherited_test_that_fails_elsewhere_shows_its_values(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(FORGETFUL)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "test_spans_come_back"]
    shown = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "AssertionError: assert 42 == 1" in shown.stdout
