"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings

from lightning_spans.record import unrecorded
from lightning_spans.record.recorder import SpanRecorder
from lightning_spans.record.tracing.tracers import make_tracer

# Tests start many processes. Where containers turn bytecode off, each would compile all that it imports again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

pytest.register_assert_rewrite("support")

from support.fake_sink import ListSink
from support.postgres import server
from support.warm_workers import WarmWorkers

# Whose tests run many programs, and say nothing of how a worker starts.
FORKED = {
    "engines", "evaluation", "forks", "improve", "interop", "judging", "lineage", "loop", "prompts", "rewards", "run",
    "session", "sft", "tinker_backend",
}  # fmt: skip

settings.register_profile(  # a slow machine is no fault of the code
    "ours", deadline=None, derandomize=os.environ.get("DRAWS") == "fixed"
)
settings.load_profile("ours")

for _library in ("httpx", "httpx2"):  # nor is silence of more than five seconds, their default
    with suppress(ImportError):
        _patient = inspect.signature(importlib.import_module(_library).get).parameters["timeout"].default
        _patient.read = _patient.connect = _patient.write = _patient.pool = 60.0


@pytest.fixture(autouse=True)
def _patient_detach(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with other things to do, opening a store takes longer than `detach()` waits."""
    monkeypatch.setattr("lightning_spans.record.delivery.sink.DETACH_S", 60.0)


@pytest.fixture(scope="session", autouse=True)
def _one_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each client reads the certificates that it trusts: 19 ms for all of them, and none is needed on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
            patch.delenv(variable, raising=False)
        with suppress(ImportError):
            certifi = importlib.import_module("certifi")
            first, end, _ = Path(certifi.where()).read_text(encoding="utf-8").partition("END CERTIFICATE-----\n")
            file = tmp_path_factory.mktemp("trusted") / "one.pem"
            file.write_text(first + end, encoding="utf-8")
            patch.setattr(certifi, "where", lambda: str(file))
        yield


@pytest.fixture(scope="session", autouse=True)
def _servers_start_at_once() -> Iterator[None]:
    """A server that starts collects garbage: 75 ms for all objects of the tests, 0.3 s where torch is loaded."""
    with pytest.MonkeyPatch.context() as patch:
        with suppress(ImportError):
            patch.setattr("lightning_trainer.gateway.http.serving._freeze_objects", gc.freeze)
        yield


@pytest.fixture(scope="session")
def _warm_workers() -> Iterator[WarmWorkers]:
    workers = WarmWorkers()
    yield workers
    workers.close()


@pytest.fixture(scope="module", autouse=True)
def _fork_workers(request: pytest.FixtureRequest, _warm_workers: WarmWorkers) -> Iterator[None]:
    """Runners of some folders fork their workers from a process that has imported the openai client."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name in FORKED and sys.platform == "linux":
            patch.setattr("lightning_trainer.runner.process._start_process", _warm_workers.start)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama model in float32 with a byte tokenizer: see `tiny`."""
    pytest.importorskip("torch")
    from support.models.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def fresh_postgres() -> Iterator[Callable[[], str]]:
    """Return a function that gives the URL of a store in a new schema of this process's PostgreSQL server."""
    with server() as fresh:
        yield fresh


@pytest.fixture
def sink() -> ListSink:
    """Keeps the spans of a test."""
    return ListSink()


@pytest.fixture
def recorder(sink: ListSink) -> Iterator[SpanRecorder]:
    """Records every model call of the test into `sink`, by whichever client."""
    patch = pytest.importorskip("lightning_openai.patch")
    recorder = SpanRecorder(make_tracer("embedded", sink))
    undo = patch.bind(recorder)
    unrecorded.forget()
    yield recorder
    unrecorded.forget()
    undo()
