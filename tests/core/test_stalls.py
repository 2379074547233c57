"""Never silent: whatever stalls is named, with what it waits for, within its bound.

Each test holds one part up and looks at what is told of it; the bounds are set to a fraction of a second first.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from lightning_conformance.plugins.server import ScriptedServer
from lightning_conformance.stores.samples import a_span
from lightning_spans import hookimpl, hooks
from lightning_spans.errors import ConfigError
from lightning_spans.record import stalls
from lightning_spans.record.delivery.deliver import Destination
from lightning_spans.record.delivery.outbox import Spool
from lightning_spans.record.delivery.sink import BatchSink
from lightning_spans.record.recorder import SpanRecorder
from lightning_spans.record.replay import Replaying
from lightning_spans.record.tracing.listeners import Listeners
from lightning_spans.record.tracing.tracers import make_tracer
from lightning_spans.schema.attempts import Attempt, Rollout
from lightning_spans.schema.replays import Replay
from lightning_spans.store import open_store
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.gateway.upstream.upstream import Upstream
from lightning_trainer.gateway.watched import watched_store
from lightning_trainer.rl.rollouts import wait
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job
from support.fake_sink import ListSink
from support.fakes import FakeEngine, served

BOUND_S = 0.3
AGENT = """
import asyncio, time, os
if os.environ.get("SLOW_IMPORT"): time.sleep(float(os.environ["SLOW_IMPORT"]))
async def run(task):
    if task.get("block"): time.sleep(task["block"])
    await asyncio.sleep(task.get("sleep", 0))
    return 1.0
async def score(task, result):
    await asyncio.sleep(task.get("score", 0))
    return 1.0
async def flushing(task):
    from lightning_spans import attach
    class Slow:
        tracer = type("T", (), {"flush": staticmethod(lambda limit_s: time.sleep(task["flush"]) or True)})
    from lightning_trainer.runner.worker import program as worker
    worker.live_recorder = lambda: Slow
    return 1.0
"""


class Scene:
    """A test's parts, and the lever that holds one of them up until the test has seen it named."""

    def __init__(self, folder: Path, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.stack, self.patch = folder, stack, patch
        self.lever = threading.Event()
        stack.callback(self.lever.set)

    def held(self, *_: Any, **__: Any) -> None:
        self.lever.wait(60)

    def aside(self, work: Callable[[], Any]) -> None:
        """Do something that will be held up."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self.stack.callback(thread.join, 20.0)
        self.stack.callback(self.lever.set)

    def store(self) -> Any:
        store = open_store(str(self.folder / "store.db"))
        self.stack.callback(store.close)
        return store

    def runner(self, store: Any, task: dict[str, Any], *, function: str = "run", **options: Any) -> Runner:
        runner = Runner(
            Job(target=f"stalling:{function}", **options.pop("job", {})),
            workers=1, concurrency=2, logs=self.folder / "logs", lease_s=options.pop("lease_s", 60.0),
        )  # fmt: skip
        store.enqueue([Rollout(rollout_id="r", group_id="g", task=task, timeout_s=options.pop("timeout_s", None))])
        runner.start()
        runner.serve(options.pop("through", store))
        self.stack.callback(runner.stop)
        self.stack.callback(self.lever.set)
        return runner


def stall_store(scene: Scene, method: str, *given: Any) -> None:
    store = scene.store()
    scene.patch.setattr(type(store), method, scene.held)
    scene.aside(lambda: getattr(watched_store(store), method)(*given))


def store_write(scene: Scene) -> None:
    stall_store(scene, "add_spans", [])


def store_read(scene: Scene) -> None:
    stall_store(scene, "spans")


def store_lease(scene: Scene) -> None:
    stall_store(scene, "claim", "worker")


def store_locked(scene: Scene) -> None:
    """Another process holds the database."""
    import sqlite3

    store = scene.store()
    other = sqlite3.connect(scene.folder / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    scene.stack.callback(other.close)
    scene.aside(lambda: watched_store(store).add_spans([a_span()]))
    scene.stack.callback(other.rollback)  # first of all that is undone, so that the write goes on


def request_body(scene: Scene) -> None:
    server = scene.stack.enter_context(served(scene.folder))
    key = server.keys.issue("admin")
    line = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    scene.stack.callback(line.close)
    line.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100\r\n"
        + f"authorization: Bearer {key}\r\n\r\n".encode()
        + b'{"model"'
    )


def ask(scene: Scene, url: str, key: str, model: str = "policy") -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}

    def post() -> None:
        httpx.post(f"{url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}, timeout=30.0)

    scene.aside(post)


def engine(scene: Scene) -> None:
    server = scene.stack.enter_context(served(scene.folder, FakeEngine(["slow"], delay_s=3.0)))
    ask(scene, server.url, server.keys.issue("admin"))


def silent_server(scene: Scene, answer: bytes = b"") -> str:
    """A server that takes a request, says what is given, and no more."""
    listener = socket.create_server(("127.0.0.1", 0))
    scene.stack.callback(listener.close)

    def serve() -> None:
        while not scene.lever.is_set():
            try:
                line, _ = listener.accept()
            except OSError:
                return
            request = line.recv(65_536)
            if b"/models" in request:
                line.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")
                line.close()
                continue
            line.sendall(answer)
            scene.lever.wait(60)
            listener.close()  # before the line: who asks again is refused
            line.close()

    threading.Thread(target=serve, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def upstream(scene: Scene, answer: bytes = b"") -> None:
    url = silent_server(scene, answer)
    server = scene.stack.enter_context(served(scene.folder, upstreams=[Upstream("far", f"{url}/v1")]))
    ask(scene, server.url, server.keys.issue("admin"), "far")


def upstream_midway(scene: Scene) -> None:
    chunk = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n'
    upstream(scene, b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 999\r\n\r\n" + chunk)


def shutdown(scene: Scene) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while scope["type"] == "lifespan":
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await asyncio.to_thread(scene.held)
            await send({"type": f"{message['type']}.complete"})

    thread = ServerThread(app)
    thread.start()
    scene.aside(thread.stop)


def sink(scene: Scene, deliver: Callable[..., None], spool: Spool) -> None:
    sink = BatchSink(deliver, route=lambda _: [Destination("http://server/v1/traces", "k")], spool=spool)
    scene.stack.callback(sink.close)
    scene.stack.callback(scene.lever.set)
    sink.put(a_span(), Attempt("r", "r.1"))
    scene.aside(lambda: sink.flush(60))


def sink_delivery(scene: Scene) -> None:
    sink(scene, scene.held, Spool(scene.folder / "spool"))


def spool_write(scene: Scene) -> None:
    spool = Spool(scene.folder / "spool")
    scene.patch.setattr(spool, "append", lambda *_: scene.held() or 1)

    def refuse(*_: Any) -> None:
        raise OSError("the server is away")

    sink(scene, refuse, spool)


def span_listener(scene: Scene) -> None:
    class Held:
        @hookimpl
        def lightning_span_ended(self, span: object) -> None:
            scene.held()

    hooks.register(Held(), "held")
    scene.stack.callback(hooks.unregister, "held")
    listeners = Listeners()
    scene.stack.callback(listeners.close)
    scene.stack.callback(scene.lever.set)
    recorder = SpanRecorder(make_tracer("embedded", ListSink()), on_end=listeners.tell)
    recorder.start("chat", "m", agent="writer").end()
    scene.aside(lambda: listeners.flush(60))


def replayed_tool(scene: Scene) -> None:
    def held(asked: object) -> tuple[int, dict[str, str]]:
        scene.held()
        return 200, {"do": "run"}

    server = scene.stack.enter_context(ScriptedServer(tools=held))
    scene.stack.callback(scene.lever.set)
    attempt = Attempt("r", "a", endpoint=server.base, key="k", replay=Replay(attempt_id="earlier"))
    scene.aside(lambda: Replaying(attempt).tool("writer", "note", None, "{}"))


def span_processor(scene: Scene) -> None:
    from opentelemetry.sdk.trace import SpanProcessor

    class Held(SpanProcessor):
        def on_end(self, span: object) -> None:
            scene.held()

    tracer = make_tracer("otel", ListSink(), [Held()])
    scene.stack.callback(tracer.close, 20.0)
    scene.stack.callback(scene.lever.set)
    SpanRecorder(tracer).start("chat", "m", agent="writer").end()


class HeldStore:
    """A store of which one method does not come back."""

    name = "http://far"

    def __init__(self, scene: Scene, inner: Any, method: str) -> None:
        self._scene, self._inner, self._method = scene, inner, method

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._inner, name)

        def call(*args: Any, **options: Any) -> Any:
            if name.startswith(self._method):
                self._scene.held()
            return inner(*args, **options)

        return call


def runner_claim(scene: Scene) -> None:
    store = scene.store()
    scene.runner(store, {}, through=HeldStore(scene, store, "claim"))


def runner_result(scene: Scene) -> None:
    store = scene.store()
    scene.runner(store, {}, through=HeldStore(scene, store, "finish"))


def runner_heartbeat(scene: Scene) -> None:
    store = scene.store()
    scene.runner(store, {"sleep": 3.0}, through=HeldStore(scene, store, "heartbeat"), lease_s=0.9)


def worker_start(scene: Scene) -> None:
    scene.patch.setenv("SLOW_IMPORT", "2.0")
    store = scene.store()
    scene.aside(lambda: scene.runner(store, {}))


def worker(scene: Scene) -> None:
    scene.runner(scene.store(), {"block": 3.0})


def agent(scene: Scene) -> None:
    scene.runner(scene.store(), {"sleep": 3.0})


def reward_function(scene: Scene) -> None:
    scene.runner(scene.store(), {"score": 3.0}, job={"reward": "stalling:score"})


def sink_flush(scene: Scene) -> None:
    scene.runner(scene.store(), {"flush": 3.0}, function="flushing")


def batch(scene: Scene, store: Any, rollouts: list[Rollout]) -> None:
    def check() -> None:
        if scene.lever.is_set():
            raise RuntimeError("enough")

    def work() -> None:
        with pytest.raises(RuntimeError):
            wait(
                store, rollouts, check=check, describe=lambda: "no worker is alive", on_progress=lambda _: None,
                poll_s=0.05,
            )  # fmt: skip

    scene.aside(work)


def rollouts(store: Any, number: int) -> list[Rollout]:
    made = [Rollout(rollout_id=f"b{n}", group_id=f"g{n // 4}", task={}) for n in range(number)]
    store.enqueue(made)
    return made


def queue(scene: Scene) -> None:
    store = scene.store()
    batch(scene, store, rollouts(store, 4))


def lease(scene: Scene) -> None:
    store = scene.store()
    made = rollouts(store, 4)
    store.claim("a runner that is no more", limit=4, lease_s=0.05)
    batch(scene, store, made)


def group(scene: Scene) -> None:
    store = scene.store()
    made = rollouts(store, 8)
    for attempt in store.claim("runner", limit=7):
        if attempt.rollout.rollout_id != "b3":
            store.finish(attempt.attempt_id, attempt.fence, status="succeeded")
    batch(scene, store, made)


def step(scene: Scene, part: str) -> None:
    """A step of the loop whose backend, algorithm or disk does not come back."""
    from lightning_trainer.kits.teaching.callback import TeacherCallback
    from lightning_trainer.run import loop

    made = SimpleNamespace(rows=(SimpleNamespace(has_gradient=True),))
    run: Any = SimpleNamespace(
        config=SimpleNamespace(
            algorithm="grpo",
            kl_coef=0.0,
            kl_in="loss",
            keep=1,
            learns_from_flat_groups=False,
            checkpoint="newest",
            agents=None,
            seed=0,
            task_order="shuffled",
            batch_size=1,
        ),
        tasks=[{}],
        folder=scene.folder,
        progress=SimpleNamespace(phase=lambda _: None),
        log=SimpleNamespace(draw=lambda: None),
        check=lambda: None,
    )
    local: Any = SimpleNamespace(store=SimpleNamespace(consume_group=lambda *_: True))
    learner: Any = SimpleNamespace(
        engine=SimpleNamespace(model="m"), update=scene.held, save=lambda *_, **__: None, strip=None
    )
    state: Any = loop.State(step=0, identity={}, flat_steps=None)
    scene.patch.setattr(loop, "algorithm_by_name", lambda _: SimpleNamespace(batch=scene.held))
    whole = loop.Loop(run, local, learner, state)
    if part == "update":
        scene.aside(lambda: suppressed(whole._learn, made))
    elif part == "teacher":
        callback = TeacherCallback(SimpleNamespace(teach=scene.held), "the teacher", run.progress)
        scene.aside(lambda: suppressed(callback.after_batch, made, SimpleNamespace(outcomes=[], traces=None)))
    elif part == "rows":
        scene.aside(lambda: suppressed(whole._judge, [], lambda _: []))
    else:
        scene.patch.setattr(loop, "save", scene.held)
        whole._saved = 7
        scene.aside(lambda: suppressed(whole._save))


def suppressed(work: Callable[..., Any], *args: Any) -> None:
    with suppress(AttributeError, TypeError):  # what was held up gave nothing back
        work(*args)


def update(scene: Scene) -> None:
    step(scene, "update")


def rows(scene: Scene) -> None:
    step(scene, "rows")


def teacher(scene: Scene) -> None:
    step(scene, "teacher")


def checkpoint_write(scene: Scene) -> None:
    step(scene, "checkpoint write")


STALLS = [
    (store_write, "store write", "add_spans"),
    (store_read, "store read", "spans of"),
    (store_lease, "store write", "claim of"),
    (store_locked, "store write", "add_spans"),
    (request_body, "request body", "a client to continue after 8 bytes"),
    (engine, "engine", "next tokens from policy"),
    (upstream, "upstream", "to answer for far"),
    (upstream_midway, "upstream", "to answer for far"),
    (shutdown, "shutdown", "the server"),
    (sink_delivery, "sink delivery", "http://server/v1/traces to take 1 spans"),
    (spool_write, "spool write", "spool"),
    (replayed_tool, "replayed tool", "the recorded result of 'note'"),
    (span_listener, "span listener", "lightning_span_ended of held"),
    (span_processor, "span processor", "a span processor"),
    (runner_claim, "runner claim", "from the store http://far"),
    (runner_result, "runner result", "to take the end of r.1"),
    (runner_heartbeat, "runner heartbeat", "http://far to renew 1 leases"),
    (worker_start, "worker start", "imports the agent"),
    (worker, "worker", "stalling.py:5"),
    (agent, "agent", "attempt r.1 in worker"),
    (reward_function, "reward function", "the reward of attempt r.1"),
    (sink_flush, "sink flush", "the spans of attempt r.1"),
    (queue, "queue", "a runner to claim 4 rollouts"),
    (lease, "lease", "a runner that is no more"),
    (group, "group", "b3, b7"),
    (rows, "rows", "the rows of"),
    (update, "update", "to learn from 1 rows"),
    (teacher, "teacher", "the teacher to read 1 rows"),
    (checkpoint_write, "checkpoint write", "the checkpoint of step 0"),
]


@pytest.fixture
def bounds() -> Iterator[None]:
    stalls.configure(";".join(f"{part}={BOUND_S}" for part in stalls.BOUNDS))
    yield
    stalls.configure(None)


@pytest.mark.parametrize(("hold", "part", "waits_for"), STALLS, ids=[hold.__name__ for hold, *_ in STALLS])
def test_stall_is_named_within_its_bound(
    hold: Callable[[Scene], None],
    part: str,
    waits_for: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bounds: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "stalling.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    before = stalls.stall_counts().get(part, 0)
    with ExitStack() as stack:
        hold(Scene(tmp_path, stack, monkeypatch))
        until = time.monotonic() + 60.0
        while not (named := [s for s in stalls.stalls() if s.part == part and waits_for in s.waits_for]):
            assert time.monotonic() < until, f"{part} was not named; {stalls.stalls()}"
            time.sleep(0.02)
        assert named[0].seconds >= named[0].bound_s == BOUND_S
        assert "\n" not in named[0].waits_for, "a message of the log is one line"
        while stalls.stall_counts().get(part, 0) == before:
            assert time.monotonic() < until
            time.sleep(0.02)
    assert any(f"{part} stalls" in message and waits_for in message for message in caplog.messages)
    assert not [stall for stall in stalls.stalls() if stall.part == part and waits_for in stall.waits_for]


def test_every_part_is_held_up_by_a_test() -> None:
    assert set(stalls.BOUNDS) - {part for _, part, _ in STALLS} == {"ray actor"}  # needs Ray


def test_healthz_and_metrics_tell_a_stall(tmp_path: Path, bounds: None) -> None:
    with served(tmp_path) as server:
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        with stalls.waiting("update", "a test"):
            time.sleep(3 * BOUND_S)
            time.sleep(1.1)  # the last answer holds for a second
            answer = httpx.get(f"{server.url}/healthz")
            page = httpx.get(f"{server.url}/metrics").text
        assert answer.status_code == 503
        assert [stall["waits_for"] for stall in answer.json()["stalled"]] == ["a test"]
        assert 'lightning_stalled_seconds{part="update"}' in page
        assert 'lightning_stalls_total{part="update"}' in httpx.get(f"{server.url}/metrics").text
        time.sleep(1.1)
        assert httpx.get(f"{server.url}/healthz").status_code == 200


def test_healthz_is_down_when_the_store_can_not_write(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s.db"))

    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def heartbeat(self, *_: Any, **__: Any) -> list[str]:
            raise OSError(28, "No space left on device")

    with served(tmp_path, store=Full()) as server:  # type: ignore[arg-type]
        answer = httpx.get(f"{server.url}/healthz")
        assert answer.status_code == 503
        assert "No space left" in answer.json()["store"]["error"]


def test_what_moves_does_not_stall(bounds: None) -> None:
    with stalls.waiting("engine", "tokens") as wait_:
        for _ in range(4):
            time.sleep(BOUND_S / 2)
            wait_.moved()
        assert stalls.stalls() == []


@pytest.mark.parametrize("text", ["engines=3", "engine=0", "engine=soon", "engine"])
def test_bounds_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="LIGHTNING_BOUNDS"):
        stalls.configure(text)


def test_description_that_fails_does_not_hide_the_stall(bounds: None) -> None:
    def broken() -> str:
        raise KeyError("gone")

    with stalls.waiting("engine", broken):
        time.sleep(2 * BOUND_S)
        assert "can't be described" in stalls.stalls()[0].waits_for


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="no fork here")
def test_forked_child_looks_for_its_own_stalls() -> None:
    code = (
        "import os, time\nfrom lightning_spans.record import stalls\n"
        "stalls.configure('engine=0.1')\nwait = stalls.begin('engine', 'parent')\n"
        "if os.fork() == 0:\n"
        "    assert stalls.stalls() == []\n    child = stalls.begin('engine', 'child')\n    time.sleep(1.0)\n"
        "    os._exit(0 if stalls.stall_counts() == {'engine': 1} else 5)\n"
        "assert os.waitstatus_to_exitcode(os.wait()[1]) == 0\n"
    )
    import subprocess

    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
