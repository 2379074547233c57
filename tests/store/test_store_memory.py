"""The store in memory, which tests use instead of a real one, keeps the same promises."""

from __future__ import annotations

from collections.abc import Callable

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
