"""What recording costs a program, in every framework, beside OpenInference's instrumentors.

One process for each framework: it runs an agent with one model call that is answered inside the process, in turns:
bare, attached with each of our tracers, and instrumented by OpenInference. In a turn everything is attached, warmed up
and delivered before the clock runs. The clock is the CPU time of the whole process, until everything recorded has been
sent, as OTLP, to a server in another process that throws it away. Beside it stands the time of the agent's own thread.

The frameworks live together in an environment of their own: BENCH_FRAMEWORKS_PYTHON names its Python (`nox -s bench`
sets it). Without it, those that are installed here are measured.

    python tests/bench/bench_capture.py FRAMEWORK    # one framework in this process; prints JSON
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any

from figures import Figure

TURNS = 20
CALLS = 40  # of one turn
WARM_UP = 20  # calls before: patching a class empties the interpreter's caches for it
CASES = ("bare", "otel", "embedded", "openinference")
KINDS = {"a call": False, "a stream of 20 events": True}
PACKAGES = {"openai": "openai", "langchain": "langchain", "openai-agents": "agents", "autogen": "autogen_agentchat"}


def measure() -> list[Figure]:
    from capture_programs import PROGRAMS

    python = os.environ.get("BENCH_FRAMEWORKS_PYTHON")
    here = [name for name in PROGRAMS if find_spec(PACKAGES.get(name, name)) is not None]
    figures = []
    for framework in PROGRAMS if python else here:
        command = [python or sys.executable, __file__, framework]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{framework}: {done.stderr}")
        figures += [Figure(**data) for data in json.loads(done.stdout.splitlines()[-1])]
    return figures


def measure_here(framework: str) -> list[Figure]:
    """Measure one framework in this process."""
    import capture_programs

    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, thrown_away() as url:
        os.chdir(folder)
        capture_programs.answer_here()
        return [
            figure
            for kind, stream in KINDS.items()
            for figure in compared(
                f"{framework}, {kind}", framework, capture_programs.PROGRAMS[framework](stream=stream), url
            )
        ]


def compared(what: str, framework: str, call: Callable[[], object], url: str) -> list[Figure]:
    """Run all cases in turns, and give what each adds to a bare call."""
    recorders = {
        "bare": lambda: contextlib.nullcontext(lambda: None),
        "otel": lambda: ours(framework, "otel", url),
        "embedded": lambda: ours(framework, "embedded", url),
        "openinference": lambda: openinference(framework, url),
    }
    process: dict[str, list[float]] = {case: [] for case in CASES}
    thread: dict[str, list[float]] = {case: [] for case in CASES}
    for turn in range(TURNS + 1):
        for case in random.sample(CASES, len(CASES)):
            whole, own = one_turn(recorders[case], call)
            if turn:  # the first one warms up
                process[case].append(whole)
                thread[case].append(own)
    bare = _quiet(process["bare"])
    added = {case: _added(process, case) for case in CASES[1:]}
    theirs = added["openinference"]
    figures = []
    for tracer in ("otel", "embedded"):
        note = f"a bare call costs {bare:.0f} µs; {_added(thread, tracer):.0f} µs of it in the agent's thread"
        beside = f"OpenInference {theirs:.0f} µs, {_added(thread, 'openinference'):.0f} in the agent's thread"
        figures += [
            Figure(what=f"{what}, {tracer}", value=added[tracer], unit="µs CPU", goal=150, others=beside, note=note),
            Figure(
                what=f"{what}, {tracer}, beside OpenInference", value=added[tracer] / theirs, unit="times", goal=0.5
            ),
        ]
    return figures


def _added(times: dict[str, list[float]], case: str) -> float:
    """Give what a case costs more than a bare call, in µs."""
    return _quiet(times[case]) - _quiet(times["bare"])


def _quiet(times: list[float]) -> float:
    """Give the time of the quickest quarter of the turns: those in which nobody else used the core."""
    return statistics.mean(sorted(times)[: len(times) // 4])


def one_turn(recorder: Callable[[], Any], call: Callable[[], object]) -> tuple[float, float]:
    """CPU time of one call in µs: of the process until all is sent, and of this thread until the call returns."""
    with recorder() as flush:
        for _ in range(WARM_UP):
            call()
        flush()
        gc.collect()
        gc.freeze()  # else some turns also pay for a collection of everything that was ever imported
        thread, process = time.thread_time(), time.process_time()
        for _ in range(CALLS):
            call()
        own = time.thread_time() - thread
        flush()
        return 1e6 * (time.process_time() - process) / CALLS, 1e6 * own / CALLS


@contextlib.contextmanager
def ours(framework: str, tracer: str, url: str) -> Iterator[Callable[[], object]]:
    from lightning_spans import Attempt, attach, use_attempt

    attachment = attach(framework, tracer=tracer)
    with attachment, use_attempt(Attempt("r", "a", endpoint=url, key="key")):
        yield attachment.flush


@contextlib.contextmanager
def openinference(framework: str, url: str) -> Iterator[Callable[[], object]]:
    from capture_programs import OPENINFERENCE
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces")))
    instrumentors = []
    for name in OPENINFERENCE[framework]:
        module, kind = name.split(".")
        instrumentors.append(getattr(importlib.import_module(f"openinference.instrumentation.{module}"), kind)())
    for instrumentor in instrumentors:
        instrumentor.instrument(tracer_provider=provider, skip_dep_check=True)
    yield provider.force_flush
    for instrumentor in reversed(instrumentors):
        instrumentor.uninstrument()
    provider.shutdown()


class _Sink(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def thrown_away() -> Iterator[str]:
    """A server in another process that takes everything and keeps nothing."""
    process = subprocess.Popen([sys.executable, __file__, "--sink"], stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def serve() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1] == "--sink":
        serve()
    else:
        with contextlib.redirect_stdout(sys.stderr):
            found = measure_here(sys.argv[1])
        print(json.dumps([asdict(figure) for figure in found]))
