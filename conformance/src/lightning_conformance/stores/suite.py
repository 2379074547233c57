"""The promises of DESIGN's store as one test class: every store passes the same suite."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_conformance.stores.claims import QueuePromises
from lightning_conformance.stores.ends import EndPromises
from lightning_conformance.stores.faults import FaultPromises
from lightning_conformance.stores.records import RecordPromises
from lightning_spans.store import Store


class StoreConformance(RecordPromises, QueuePromises, EndPromises, FaultPromises):
    """Base class of a store's tests: subclass it as ``TestMyStore`` and override the two fixtures.

    Each test says what to do if it fails. Records get their own ids, but the queue must be empty at the start of a
    test.
    """

    @pytest.fixture
    def store(self) -> Store:
        """Return an open store with an empty queue; the suite may close it."""
        raise pytest.UsageError(f"{type(self).__name__} must override the fixture 'store'")

    @pytest.fixture
    def reopen(self) -> Callable[[], Store]:
        """Return a function that opens another store on the data of `store`, which may be open or closed."""
        raise pytest.UsageError(f"{type(self).__name__} must override the fixture 'reopen'")
