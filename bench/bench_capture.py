"""What recording costs a program, in every framework, beside OpenInference's instrumentors.

One process for each framework: it runs an agent with one model call that is answered inside the process, in turns:
bare, attached with each of our tracers, and instrumented by OpenInference. In a turn everything is attached, warmed up
and delivered before the clock runs. The clock is the CPU time of the whole process, until everything recorded has been
sent, as OTLP, to a server in another process that throws it away. Beside it stands the time of the agent's own thread.

The frameworks live together in an environment of their own: BENCH_FRAMEWORKS_PYTHON names its Python (`nox -s bench`
sets it). Without it, those that are installed here are measured.

    python bench/bench_capture.py [FRAMEWORK ...]           # prints the whole table
    python bench/bench_capture.py --count [FRAMEWORK ...]   # instructions instead of time, by valgrind

A machine that others use has another speed from turn to turn; how many instructions run, it does not change.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from figures import QUICK, Figure, choose_size

TURNS = choose_size(20, 4)
CALLS = choose_size(40, 4)  # of one turn
COUNTED_CALLS = 20
WARM_UP = 20  # calls before: patching a class empties the interpreter's caches for it
CASES = ("bare", "otel", "embedded", *choose_size(("openinference",), ()))
COUNTED = ("bare", "otel", "openinference")  # both of our tracers do the same
KINDS = {"a call": False, "a stream of 20 events": True}
MOST, SHARE = 150, 0.5  # what a call may cost: µs, and of what OpenInference costs
Recorder = tuple[Callable[[], object], Callable[[], int]]  # what waits until all is sent; and how many spans were
PACKAGES = {"openai": "openai", "langchain": "langchain", "openai-agents": "agents", "autogen": "autogen_agentchat"}


@dataclass(frozen=True)
class Cost:
    """What one case costs.

    Attributes:
        framework: which.
        kind: a key of `KINDS`.
        case: one of `CASES`.
        process: µs of CPU of the whole process for a model call: of a bare one, or more than a bare one.
        thread: the same of the agent's own thread.
        spans: recorded for a model call.
        of_theirs: `process` over that of OpenInference.
    """

    framework: str
    kind: str
    case: str
    process: float
    thread: float
    spans: float
    of_theirs: float


def measure() -> list[Figure]:
    return [figure for cost in costs_of(frameworks()) for figure in figures_of(cost)]


def frameworks() -> list[str]:
    """Name those that can be measured."""
    from capture_programs import PROGRAMS

    everywhere = "BENCH_FRAMEWORKS_PYTHON" in os.environ
    there = [name for name in PROGRAMS if everywhere or find_spec(PACKAGES.get(name, name)) is not None]
    return ["openai"] if QUICK else there


def costs_of(wanted: Sequence[str]) -> list[Cost]:
    """Measure each framework in a process of its own."""
    found = []
    for framework in wanted:
        command = [os.environ.get("BENCH_FRAMEWORKS_PYTHON", sys.executable), __file__, "--json", framework]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{framework}: {done.stderr}")
        found += [Cost(**data) for data in json.loads(done.stdout.splitlines()[-1])]
    return found


def figures_of(cost: Cost) -> list[Figure]:
    """Return the two bars of one of our tracers."""
    if cost.case not in {"otel", "embedded"}:
        return []
    what = f"{cost.framework}, {cost.kind}, {cost.case}"
    theirs = "" if QUICK else f"OpenInference {cost.process / cost.of_theirs:.0f} µs"
    note = f"{cost.thread:.0f} µs of it in the agent's thread; {cost.spans:.0f} spans"
    ratio = Figure(what=f"{what}, beside OpenInference", value=cost.of_theirs, unit="times", goal=SHARE)
    figure = Figure(what=what, value=cost.process, unit="µs CPU", goal=MOST, others=theirs, note=note)
    return [figure] if QUICK else [figure, ratio]


def table(costs: Sequence[Cost]) -> str:
    """Show all that was measured: µs of CPU for a model call, above a bare one, whose own cost is in brackets."""
    head = ("framework", "kind", "case", "process", "thread", "spans", "a span", "of theirs", "<=150", "<=half")
    rows = [head, *(_row(cost) for cost in costs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < 3 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _row(cost: Cost) -> tuple[str, ...]:
    where = (cost.framework, cost.kind, cost.case)
    if cost.case == "bare":
        return (*where, f"({cost.process:.0f})", f"({cost.thread:.0f})", *[""] * 5)
    took = (f"{cost.process:.0f}", f"{cost.thread:.0f}", f"{cost.spans:.1f}", f"{cost.process / cost.spans:.0f}")
    if cost.case == "openinference":
        return (*where, *took, *[""] * 3)
    bars = ("pass" if cost.process <= MOST else "MISS", "pass" if cost.of_theirs <= SHARE else "MISS")
    return (*where, *took, f"{cost.of_theirs:.2f}", *bars)


def measure_here(framework: str) -> list[Cost]:
    """Measure one framework in this process."""
    import capture_programs

    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder, thrown_away() as url:
        os.chdir(folder)
        capture_programs.answer_here()
        return [
            cost
            for kind, stream in KINDS.items()
            for cost in compare_costs(framework, kind, capture_programs.PROGRAMS[framework](stream=stream), url)
        ]


def compare_costs(framework: str, kind: str, call: Callable[[], object], url: str) -> list[Cost]:
    """Run all cases in turns, and give what each adds to a bare call."""
    recorders = {
        "bare": lambda: contextlib.nullcontext((lambda: None, lambda: 0)),
        "otel": lambda: ours(framework, "otel", url),
        "embedded": lambda: ours(framework, "embedded", url),
        "openinference": lambda: openinference(framework, url),
    }
    turns: dict[str, list[tuple[float, float, float]]] = {case: [] for case in CASES}
    for turn in range(TURNS + 1):
        for case in random.sample(CASES, len(CASES)):
            took = one_turn(recorders[case], call)
            if turn:  # the first one warms up
                turns[case].append(took)
    process, thread = ({case: _quiet([turn[at] for turn in turns[case]]) for case in CASES} for at in (0, 1))
    theirs = process.get("openinference", math.nan) - process["bare"]
    costs = []
    for case in CASES:
        least = (process["bare"], thread["bare"]) if case != "bare" else (0.0, 0.0)
        more = process[case] - least[0]
        spans = statistics.median(turn[2] for turn in turns[case])
        costs.append(Cost(framework, kind, case, more, thread[case] - least[1], spans, more / theirs))
    return costs


def _quiet(times: list[float]) -> float:
    """Return the time of the quickest quarter of the turns: those in which nobody else used the core."""
    return statistics.mean(sorted(times)[: len(times) // 4])


def one_turn(recorder: Callable[[], Any], call: Callable[[], object]) -> tuple[float, float, float]:
    """Return µs of CPU of a call, of the process until all is sent and of this thread until it returns; and spans."""
    with recorder() as (flush, count):
        for _ in range(WARM_UP):
            call()
        flush()
        gc.collect()
        gc.freeze()  # else some turns also pay for a collection of everything that was ever imported
        before = count()
        thread, process = time.thread_time(), time.process_time()
        for _ in range(CALLS):
            call()
        own = time.thread_time() - thread
        flush()
        whole = time.process_time() - process
        return 1e6 * whole / CALLS, 1e6 * own / CALLS, (count() - before) / CALLS


@contextlib.contextmanager
def ours(framework: str, tracer: str, url: str) -> Iterator[Recorder]:
    from lightning_spans import Attempt, attach, use_attempt
    from lightning_spans.record.pipeline import live_pipeline

    attachment = attach(framework, tracer=tracer)
    with attachment, use_attempt(Attempt("r", "a", endpoint=url, key="key")):
        reports = live_pipeline().delivery.reports
        yield attachment.flush, lambda: reports.counts.delivered


@contextlib.contextmanager
def openinference(framework: str, url: str) -> Iterator[Recorder]:
    from capture_programs import OPENINFERENCE
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    sent: list[int] = []

    class Exporter(OTLPSpanExporter):
        def export(self, spans: Any) -> Any:
            sent.append(len(spans))
            return super().export(spans)

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(Exporter(f"{url}/v1/traces")))
    instrumentors = []
    for name in OPENINFERENCE[framework]:
        module, kind = name.split(".")
        instrumentors.append(getattr(importlib.import_module(f"openinference.instrumentation.{module}"), kind)())
    for instrumentor in instrumentors:
        instrumentor.instrument(tracer_provider=provider, skip_dep_check=True)
    yield provider.force_flush, lambda: sum(sent)
    for instrumentor in reversed(instrumentors):
        instrumentor.uninstrument()
    provider.shutdown()


def count_instructions(wanted: Sequence[str]) -> str:
    """Count the instructions of a model call in each framework, in thousands: bare, ours above it, and theirs."""
    lines = [f"{'framework':14} {'kind':22} {'bare':>8} {'ours':>8} {'theirs':>8} {'of theirs':>9}"]
    for framework in wanted:
        with tempfile.TemporaryDirectory() as folder:
            command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", sys.executable, __file__]
            done = subprocess.run(
                [*command, "--counted", framework, folder], capture_output=True, text=True, check=False
            )
        if done.returncode != 0:
            raise RuntimeError(f"{framework}: {done.stderr}")
        for kind, found in json.loads(done.stdout.splitlines()[-1]).items():
            bare, ours, theirs = (found[case] / 1000 for case in COUNTED)
            share = (ours - bare) / (theirs - bare)
            lines.append(f"{framework:14} {kind:22} {bare:8.0f} {ours - bare:8.0f} {theirs - bare:8.0f} {share:9.2f}")
    return "\n".join(lines)


def count_here(framework: str, folder: str) -> dict[str, dict[str, float]]:
    """Count what runs in this process, which valgrind runs, for a call of each kind in each case."""
    import capture_programs

    from lightning_spans.record.delivery import sink

    logging.disable(logging.WARNING)
    sink.LINGER_S = sink.IDLE_S = 3600.0  # else, as slow as they are, calls are sent one by one
    with thrown_away() as url:
        os.chdir(folder)
        capture_programs.answer_here()
        return {
            kind: _counts(framework, capture_programs.PROGRAMS[framework](stream=stream), url, Path(folder))
            for kind, stream in KINDS.items()
        }


def _counts(framework: str, call: Callable[[], object], url: str, folder: Path) -> dict[str, float]:
    recorders = {
        "bare": lambda: contextlib.nullcontext((lambda: None, lambda: 0)),
        "otel": lambda: ours(framework, "otel", url),
        "openinference": lambda: openinference(framework, url),
    }
    found = {}
    for case in COUNTED:
        with recorders[case]() as (flush, _):
            for _ in range(CALLS):
                call()
            flush()
            gc.collect()
            gc.freeze()
            _valgrind("--zero")
            for _ in range(COUNTED_CALLS):
                call()
            flush()
            _valgrind("--dump")
        written = max(folder.glob("out.*"), key=lambda path: int(path.suffix[1:]))
        found[case] = int(re.findall(r"^(?:summary|totals): (\d+)", written.read_text(), re.M)[0]) / COUNTED_CALLS
    return found


def _valgrind(what: str) -> None:
    subprocess.run(["callgrind_control", what, str(os.getpid())], capture_output=True, check=True)


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
    if sys.argv[1:] == ["--sink"]:
        serve()
    elif sys.argv[1:2] == ["--counted"]:
        with contextlib.redirect_stdout(sys.stderr):
            counts = count_here(*sys.argv[2:4])
        print(json.dumps(counts))
    elif sys.argv[1:2] == ["--count"]:
        print(count_instructions(sys.argv[2:] or frameworks()))
    elif sys.argv[1:2] == ["--json"]:
        with contextlib.redirect_stdout(sys.stderr):
            costs = measure_here(sys.argv[2])
        print(json.dumps([asdict(cost) for cost in costs]))
    else:
        print(table(costs_of(sys.argv[1:] or frameworks())))
