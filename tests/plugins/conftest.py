"""A recorder that the openai plugin's patches report to, for tests of calls that no client of openai's makes."""

from __future__ import annotations

import pytest
from fake_sink import ListSink

from lightning_spans.record import unrecorded
from lightning_spans.record.recorder import SpanRecorder
from lightning_spans.record.tracing.tracers import make_tracer


@pytest.fixture
def sink():
    return ListSink()


@pytest.fixture
def recorder(sink):
    patch = pytest.importorskip("lightning_openai.patch")
    recorder = SpanRecorder(make_tracer("embedded", sink))
    undo = patch.bind(recorder)
    unrecorded.forget()
    yield recorder
    unrecorded.forget()
    undo()


@pytest.fixture(params=["httpx", "httpx2"])
def library(request):
    return pytest.importorskip(request.param)
