"""An attempt, and the agent at work, reach every process that is started in it, and pools that were there before."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import pytest

from lightning_spans import Attempt, agent, child_environment, data_terms, use_attempt
from lightning_spans.record.context import current_agent, current_attempt, current_terms, settle_context, use_context
from lightning_spans.record.instrument.processes import carry_attempts
from lightning_spans.record.process import thread_frames
from lightning_spans.record.recorder import SpanRecorder, current_span
from lightning_spans.record.tracing.tracers import make_tracer
from lightning_spans.schema import spans as names
from support.fake_sink import ListSink

ATTEMPT = Attempt("r", "a", endpoint="http://gate", key="k", agents=("coder",))
OTHER = Attempt("r2", "a2", endpoint="http://gate", key="k2")
PRINTS = "import os; print(os.environ.get('LIGHTNING_ATTEMPT_ID'), os.environ.get('LIGHTNING_AGENT'))"


@pytest.fixture(autouse=True)
def _carried() -> Iterator[None]:
    stop = carry_attempts()
    yield
    stop()


def where(_: object = None) -> tuple[str | None, str | None]:
    attempt = current_attempt()
    return attempt and attempt.attempt_id, current_agent()


def put_where(queue: Any) -> None:
    queue.put(where())


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_a_process_belongs_to_the_attempt_in_which_it_is_started(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    for attempt in (ATTEMPT, OTHER):
        with use_attempt(attempt), agent("coder"):
            process = context.Process(target=put_where, args=(queue,))
            process.start()
            process.join()
        assert queue.get() == (attempt.attempt_id, "coder")


@pytest.mark.parametrize("kind", ["executor", "pool"])
def test_a_task_of_a_pool_belongs_to_the_attempt_that_gives_it(kind: str) -> None:
    context: Any = multiprocessing.get_context("spawn")
    with use_attempt(OTHER), ProcessPoolExecutor(1, mp_context=context) as executor, context.Pool(1) as pool:
        for attempt in (ATTEMPT, OTHER):
            with use_attempt(attempt), agent("coder"):
                if kind == "executor":
                    found = [executor.submit(where).result(), *executor.map(where, [0])]
                else:
                    found = [
                        pool.apply(where),
                        *pool.map(where, [0]),
                        *pool.imap(where, [0]),
                        *pool.starmap(where, [(0,)]),
                    ]
            assert set(found) == {(attempt.attempt_id, "coder")}


def where_below() -> tuple[str | None, str | None, str | None]:
    span = current_span()
    return *where(), span and span.name


@pytest.mark.parametrize("method", ["spawn", "fork", "threads"])
def test_a_task_takes_nothing_from_the_attempt_in_which_its_pool_was_started(method: str) -> None:
    recorder = SpanRecorder(make_tracer("embedded", ListSink()))
    with use_attempt(ATTEMPT):
        planner = recorder.start(names.INVOKE_AGENT, "planner", agent="planner").context
    with use_context(planner):
        pool = ThreadPool(1) if method == "threads" else multiprocessing.get_context(method).Pool(1)
    with pool:
        with use_context(planner):
            # a forked process inherits the open span, which a spawned one can't
            assert pool.apply(where_below) == ("a", "planner", None if method == "spawn" else "planner")
        with use_attempt(OTHER):
            assert pool.apply(where_below) == ("a2", None, None)
            with agent("coder"):
                assert pool.apply(where_below) == ("a2", "coder", None)
        assert pool.apply(where_below) == (None, None, None)


def test_a_pool_takes_its_function_by_name_too() -> None:
    with use_attempt(ATTEMPT), ThreadPool(1) as pool:
        assert pool.apply_async(func=where).get() == ("a", None)
        assert list(pool.imap(func=where, iterable=[0])) == [("a", None)]


def stated_terms() -> dict[str, Any]:
    return dict(current_terms(settle_context()))


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_task_has_the_terms_of_its_own_request(method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    with data_terms(tenant="acme", consent=True):
        pool = context.Pool(1)
    with pool:
        with data_terms(tenant="other"):
            assert pool.apply(stated_terms) == stated_terms()
        assert pool.apply(stated_terms) == {}


@pytest.mark.parametrize("given", [None, {"PATH": os.environ["PATH"]}])
def test_a_program_gets_the_attempt_in_its_environment(given: dict[str, str] | None) -> None:
    async def started() -> bytes:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", PRINTS, stdout=subprocess.PIPE, env=given)
        return (await process.communicate())[0]

    with use_attempt(ATTEMPT), agent("coder"):
        assert subprocess.check_output([sys.executable, "-c", PRINTS], env=given) == b"a coder\n"
        assert asyncio.run(started()) == b"a coder\n"
    assert subprocess.check_output([sys.executable, "-c", PRINTS], env=given) == b"None None\n"


def test_child_environment_leads_a_trained_agent_to_the_gateway_and_no_other() -> None:
    assert child_environment() == {}
    with use_attempt(ATTEMPT), agent("planner"):
        found = child_environment()
        assert found.items() >= ATTEMPT.environment().items()
        assert found["LIGHTNING_AGENT"] == "planner"
        assert "OPENAI_BASE_URL" not in found
        led = child_environment(agent="coder")
    assert led["OPENAI_BASE_URL"] == "http://gate/v1"
    assert led["ANTHROPIC_BASE_URL"] == "http://gate"
    assert led["OPENAI_API_KEY"] == led["ANTHROPIC_API_KEY"] == led["CODEX_API_KEY"] == "k"
    assert led["ANTHROPIC_CUSTOM_HEADERS"] == led["OPENAI_CUSTOM_HEADERS"] == "x-lightning-agent: coder"


def test_what_an_outer_attempt_set_does_not_reach_an_inner_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ATTEMPT.environment().items():
        monkeypatch.setenv(name, value)
    with use_attempt(Attempt("r3", "a3")):
        assert child_environment()["LIGHTNING_ENDPOINT"] == ""


def test_no_garbage_is_collected_while_it_is_looked_where_threads_stand(monkeypatch):
    seen = []
    monkeypatch.setattr(
        sys, "_current_frames", lambda real=sys._current_frames: (seen.append(gc.isenabled()), real())[1]
    )
    assert threading.get_ident() in thread_frames()
    assert (seen, gc.isenabled()) == ([False], True)
