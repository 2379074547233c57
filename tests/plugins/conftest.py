"""What plugins' tests share: a run of a program attached."""

from __future__ import annotations

import asyncio

import pytest

from lightning_conformance.plugins.program import record


@pytest.fixture
def found_of(request, tmp_path):
    """Return a function that runs a program attached to the framework that the module tests.

    It gives what the program left, after what every program must keep.
    """

    def work(program):
        found = record(program, tmp_path, framework=request.module.TestConformance.framework, tracer="embedded")
        known = {span.span_id for span in found.spans}
        assert all(span.parent_id is None or span.parent_id in known for span in found.spans)
        return found

    return work


@pytest.fixture
def under_way():
    """Return a coroutine function that waits until a model call is made."""
    unfinished = pytest.importorskip("lightning_openai.unfinished").unfinished

    async def wait():
        while not unfinished:
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture(params=["httpx", "httpx2"])
def library(request):
    return pytest.importorskip(request.param)
