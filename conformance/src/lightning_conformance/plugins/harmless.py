"""What every plugin promises when our code fails: the same output, and a log of what is lost.

Faults are injected where spans leave the process (a sink, a server, a store, a collector), where a framework's event
meets the recorder, and where a user's hook is called.
"""

from __future__ import annotations

import http.server
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from lightning_conformance.plugins import program as kit
from lightning_conformance.plugins.program import SCENARIOS, record, run, span_of, user_environment
from lightning_conformance.plugins.script import agent_of
from lightning_conformance.plugins.server import ScriptedServer
from lightning_spans import Attempt, attach, hookimpl, hooks, open_store, use_attempt
from lightning_spans.record.delivery.deliver import Delivery
from lightning_spans.record.delivery.outbox import Spool
from lightning_spans.record.delivery.sink import BatchSink
from lightning_spans.record.recorder import RecordingSpan, SpanRecorder
from lightning_spans.schema.spans import Span

_OURS: Final = {
    "SpanRecorder.start": (SpanRecorder, "start"),
    "SpanRecorder.end": (SpanRecorder, "end"),
    "RecordingSpan.set": (RecordingSpan, "set"),
    "BatchSink.put": (BatchSink, "put"),
}
_SOME: Final = ("one_agent", "several_agents", "streaming", "tool_call", "nested", "asynchronous")
_FAULTS: Final = [  # the sink is the same for every event, so some scenarios are enough
    (scenario, broken) for broken in _OURS for scenario in (_SOME if broken == "BatchSink.put" else SCENARIOS)
]
_HASTE_S: Final = 0.05  # `detach()` waits this long here for a destination that does not answer


class HarmlessPromises:
    """A part of `PluginConformance`, which provides the fixtures `recorded` and `folder`, and the programs."""

    framework: ClassVar[str]
    program: Callable[[str], Callable[[str], Any]]

    @pytest.mark.parametrize(("scenario", "broken"), _FAULTS)
    def test_a_failing_event_or_sink_harms_nothing(
        self, scenario: str, broken: str, folder: Path, recorded: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If our code raises, at any event, the output is the same, including what a tool raised; the error is logged.

        If it fails: find where the exception comes from; every event handler must run inside `SpanRecorder.guard`.
        """
        alone = recorded(scenario, None)
        monkeypatch.setattr(*_OURS[broken], _fail)
        place = folder / f"broken-{scenario}-{broken}"
        with collect_logs() as log:
            found = record(self.program(scenario), place, framework=self.framework, tracer="embedded")
        assert found.output == alone.output
        if broken != "RecordingSpan.set":  # not every program reaches it
            assert any("failed" in line and "the agent continues" in line for line in log)

    @pytest.mark.parametrize("broken", ["SpanRecorder.start", "SpanRecorder.end"])
    @pytest.mark.parametrize("scenario", ["several_agents", "streaming", "tool_call", "tool_error", "nested", "failed"])
    def test_recording_goes_on_after_a_fault(
        self, scenario: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After a fault, every call is recorded again, under its agent, in a tree without gaps.

        If it fails: exit what was entered for a span even if ending the span raised.
        """
        program = self.program(scenario)
        # One server each, because it counts repeated requests.
        with user_environment(tmp_path), ScriptedServer() as broken_server, ScriptedServer() as server:
            with attach(self.framework, store=str(tmp_path / "traces.db"), tracer="embedded") as attachment:
                with monkeypatch.context() as patch:
                    patch.setattr(*_OURS[broken], _fail)
                    run(program, broken_server.url)
                run(program, server.url)
                attachment.flush(kit.PATIENCE_S)
            spans = {span.span_id: span for span in _spans_in(tmp_path / "traces.db")}
            assert server.requests
            for request in server.requests:
                span: Span | None = spans[span_of(request)]
                assert span is not None
                assert span.agent == agent_of(request.body or {})
                while span is not None:
                    span = None if span.parent_id is None else spans[span.parent_id]

    def test_a_failing_hook_harms_nothing(self, tracer: str, folder: Path, recorded: Any) -> None:
        """A user's plugin with hooks that raise changes neither the output nor the records; the error is logged.

        If it fails: listeners must be called by `Listeners`, off the agent's thread, and not by the plugin.
        """
        hooks.register(_Raising(), "raising")
        try:
            place = folder / f"listener-{tracer}"
            with collect_logs() as log:
                found = record(self.program("one_agent"), place, framework=self.framework, tracer=tracer)
        finally:
            hooks.unregister("raising")
        assert found.output == recorded("one_agent", None).output
        assert len(found.chats) == 1
        assert any("lightning_span_ended of plugin raising failed" in line for line in log)

    @pytest.mark.parametrize("fault", ["blocks", "raises", "refuses", "is silent", "answers 500", "collector gone"])
    @pytest.mark.parametrize("scenario", ["streaming", "tool_call", "tool_error"])
    def test_spans_that_can_not_be_delivered_harm_nothing(
        self, scenario: str, fault: str, tmp_path: Path, recorded: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the destination of spans blocks, raises or is gone: same output, no wait, and every span is in the spool.

        If it fails: look for a part of the delivery that runs or waits in the agent's thread, or for a wait in
        `detach()`.
        """
        alone, whole = recorded(scenario, None), recorded(scenario, "embedded")
        monkeypatch.setattr("lightning_spans.record.delivery.sink.DETACH_S", _HASTE_S)
        program, outputs = self.program(scenario), []

        def work() -> None:
            with ScriptedServer() as server, broken_delivery(fault) as (url, otlp):
                attachment = attach(self.framework, store=str(tmp_path / "own.db"), tracer="embedded", otlp=otlp)
                with attachment, use_attempt(Attempt("r", "a", endpoint=url, key="k") if url else _NO_ATTEMPT):
                    outputs.append(run(program, server.url))
                    if fault not in {"blocks", "is silent"}:
                        attachment.flush(kit.PATIENCE_S)

        with user_environment(tmp_path), collect_logs() as log:
            assert finishes(work), "it hangs"
        assert outputs == [alone.output]
        assert len(_spooled_ids(tmp_path / "spool")) == len(whole.spans)
        assert any(f"{len(whole.spans)} were spooled" in line for line in log)
        if fault == "collector gone":  # it delays nothing else
            assert len(_spans_in(tmp_path / "own.db")) == len(whole.spans)

    def test_a_failing_store_harms_nothing(self, tracer: str, tmp_path: Path, recorded: Any) -> None:
        """A store that cannot be written changes nothing for the agent; its spans wait in the spool.

        If it fails: look for a part of the delivery that runs or waits in the agent's thread.
        """
        (tmp_path / "file").write_text("not a folder")
        with user_environment(tmp_path), ScriptedServer() as server:
            with attach(self.framework, store=str(tmp_path / "file" / "traces.db"), tracer=tracer) as attachment:
                output = run(self.program("one_agent"), server.url)
                attachment.flush(kit.PATIENCE_S)
            assert output == recorded("one_agent", None).output
        assert any((tmp_path / "spool").iterdir())

    def test_the_process_ends_though_spans_can_not_be_delivered(self, tmp_path: Path, recorded: Any) -> None:
        """A program that ends while attached does end, with the same output; its spans are in the spool, as it logs.

        If it fails: look for a wait at the end of the process for what never comes, or for a thread that is not a
        daemon.
        """
        alone, whole = recorded("one_agent", None), recorded("one_agent", "embedded")
        with user_environment(tmp_path), ScriptedServer() as server:
            child = self._run_apart("blocks", server.url, tmp_path)
        assert child.stdout.splitlines()[-1:] == [repr(alone.output)], child.stderr
        assert child.returncode == 0
        assert f"{len(whole.spans)} were spooled" in child.stderr
        assert len(_spooled_ids(tmp_path / "spool")) == len(whole.spans)

    def test_no_span_is_lost_where_a_process_ends_at_once(self, tmp_path: Path, recorded: Any) -> None:
        """A program that ends abruptly loses no span that had ended: the next process delivers it.

        If it fails: look for a span that ends after the framework has returned, in a task or thread that the process
        does not wait for.
        """
        alone, whole = recorded("one_agent", None), recorded("one_agent", "embedded")
        with user_environment(tmp_path), ScriptedServer() as server:
            child = self._run_apart("os._exit", server.url, tmp_path)
            assert child.stdout.splitlines()[-1:] == [repr(alone.output)], child.stderr
            with attach(self.framework, store=str(tmp_path / "own.db")) as attachment:
                assert attachment.flush(kit.PATIENCE_S)
        found = sorted((span.operation, span.name) for span in _spans_in(tmp_path / "own.db"))
        assert found == sorted((span.operation, span.name) for span in whole.spans)

    def _run_apart(self, fault: str, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run `one_agent` in a separate process: see `ending`."""
        kind = type(self)
        home = str(sys.modules[kind.__module__].__file__)
        command = [sys.executable, "-m", "lightning_conformance.plugins.ending", home, kind.__name__, fault, url]
        return subprocess.run(  # noqa: S603 - it is this very Python
            command, cwd=folder, env=child_environment(), capture_output=True, text=True, timeout=4 * kit.PATIENCE_S,
            check=False,
        )  # fmt: skip


_NO_ATTEMPT: Final = Attempt("r", "a")


@contextmanager
def broken_delivery(fault: str) -> Iterator[tuple[str | None, str | None]]:
    """Break the delivery of spans, and yield the URLs of the training side and of a collector; None: there is none."""
    gate = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        if fault in {"blocks", "raises"}:
            patch.setattr(Delivery, "__call__", _fail if fault == "raises" else lambda *_: gate.wait() and None)
        try:
            with _broken_server(fault) as url:
                yield (None, f"{url}/v1/traces") if fault == "collector gone" else (url, None)
        finally:
            gate.set()


def _broken_server(fault: str) -> AbstractContextManager[str | None]:
    return {
        "is silent": _silent,
        "answers 500": _failing_server,
        "refuses": _refusing_port,
        "collector gone": _refusing_port,
    }.get(fault, _nowhere)()


@contextmanager
def _nowhere() -> Iterator[None]:
    yield None


@contextmanager
def _silent() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # the system accepts connections, and nothing answers
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextmanager
def _refusing_port() -> Iterator[str]:
    with socket.socket() as bound:  # not listening, and reserved while it lasts
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@contextmanager
def _failing_server() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Failing)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Failing(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_error(500)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that the base class has
        """Log nothing."""


def child_environment() -> dict[str, str]:
    """Return the environment of a process that can import what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}


def finishes(work: Callable[[], None]) -> bool:
    """Run a function in a thread that may hang, and raise what it raises.

    Returns:
        Whether it ended.
    """
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            failed.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(kit.PATIENCE_S)
    for error in failed:
        raise error
    return not thread.is_alive()


@contextmanager
def collect_logs() -> Iterator[list[str]]:
    """Collect the messages of our logger, also after a framework has configured logging without it."""
    lines: list[str] = []

    class Keeping(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("lightning_spans"), Keeping()
    level, limit = logger.level, logger.manager.disable
    for name, each in list(logger.manager.loggerDict.items()):
        if name.startswith(logger.name) and isinstance(each, logging.Logger):
            each.disabled = False  # as `logging.config` leaves the loggers that it does not name
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logging.disable(logging.NOTSET)
    try:
        yield lines
    finally:
        logging.disable(limit)
        logger.setLevel(level)
        logger.removeHandler(handler)


def _fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("something of ours that fails")


class _Raising:
    @hookimpl
    def lightning_span_ended(self, span: Span) -> None:
        raise RuntimeError(f"a listener that fails at {span.name}")

    @hookimpl
    def lightning_agent_name(self, span: hooks.OpenSpan) -> str | None:
        raise RuntimeError(f"a namer that fails at {span.name}")


def _spans_in(path: Path) -> list[Span]:
    store = open_store(str(path))
    try:
        return list(store.spans())
    finally:
        store.close()


def _spooled_ids(folder: Path) -> set[str]:
    """Return the ids of the spans that wait in a spool."""
    found: set[str] = set()

    def take(url: str | None, key: str | None, spans: Sequence[Span]) -> bool:  # noqa: ARG001 - `replay` gives them
        found.update(span.span_id for span in spans)
        return True

    Spool(folder).replay(take)
    return found
