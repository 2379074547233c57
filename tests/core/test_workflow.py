from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from lightning_conformance.plugins.program import user_environment
from lightning_conformance.plugins.server import ScriptedServer
from lightning_spans import Attempt, agent, attach, open_store, use_attempt, workflow
from lightning_spans.errors import ConfigError
from lightning_spans.record.context import current_agent
from lightning_spans.record.tracing.tracers import TRACERS
from lightning_spans.schema import spans as names

SAID = [{"role": "user", "content": "hello"}]


@pytest.fixture(params=TRACERS)
def spans_of(request, tmp_path):
    """Return a function that runs a program attached to the openai client, and returns the spans it left."""

    def work(program):
        own = str(tmp_path / "own.db")
        with user_environment(tmp_path), ScriptedServer() as server, attach("openai", store=own, tracer=request.param):
            program(server.url)
        store = open_store(own)
        try:
            return store.spans()
        finally:
            store.close()

    return work


def ask(url):
    with openai.OpenAI(base_url=url) as client:
        client.chat.completions.create(model="m", messages=SAID)


async def aask(url):
    async with openai.AsyncOpenAI(base_url=url) as client:
        await client.chat.completions.create(model="m", messages=SAID)


async def research(url):
    """As programs without a framework do: several clients, at once, in tasks and threads."""
    await asyncio.gather(aask(url), asyncio.to_thread(ask, url), asyncio.create_task(aask(url)))
    with ThreadPoolExecutor(1) as pool, agent("writer"):
        pool.submit(ask, url).result()
    thread = threading.Thread(target=ask, args=(url,))
    thread.start()
    thread.join()


def is_one_trace(spans):
    (root,) = [span for span in spans if span.parent_id is None]
    known = {span.span_id for span in spans}
    assert (root.operation, root.agent, root.status) == (names.INVOKE_WORKFLOW, None, "ok")
    assert all(span.parent_id in known for span in spans if span is not root)
    return len({span.trace_id for span in spans}) == 1 and root.name


def agents_of(spans):
    return sorted(str(span.agent) for span in spans if span.operation == names.CHAT)


def test_a_plain_programs_calls_are_a_trace_each_without_it(spans_of):
    spans = spans_of(lambda url: asyncio.run(research(url)))
    assert len({span.trace_id for span in spans}) == 5


@pytest.mark.parametrize("named", [None, "research a question"])
def test_one_run_of_a_coroutine_function_is_one_trace(named, spans_of):
    run = workflow(research) if named is None else workflow(named)(research)
    spans = spans_of(lambda url: asyncio.run(run(url)))
    assert is_one_trace(spans) == (named or "research")
    assert agents_of(spans) == ["None"] * 4 + ["writer"]


def test_each_call_of_a_function_is_a_run_of_its_own(spans_of):
    @workflow
    def run(url):
        ask(url)
        ask(url)

    spans = spans_of(lambda url: [run(url), run(url)])
    roots = [span for span in spans if span.parent_id is None]
    assert [(root.name, root.operation) for root in roots] == [("run", names.INVOKE_WORKFLOW)] * 2
    assert len({span.trace_id for span in spans}) == 2


def test_runs_that_go_on_at_once_are_traces_of_their_own(spans_of):
    async def at_once(url):
        run = workflow("answer")(aask)
        await asyncio.gather(*(run(url) for _ in range(5)))

    spans = spans_of(lambda url: asyncio.run(at_once(url)))
    assert len({span.trace_id for span in spans}) == 5
    assert [sum(span.trace_id == one.trace_id for span in spans) for one in spans] == [2] * 10


def test_a_run_inside_of_another_is_a_part_of_its_trace_and_names_no_agent(spans_of):
    def run(url):
        with workflow("outer"), agent("boss"), workflow("inner"), agent("writer"):
            ask(url)

    spans = spans_of(run)
    assert len({span.trace_id for span in spans}) == 1
    (chat,) = [span for span in spans if span.operation == names.CHAT]
    assert (chat.agent, chat.attributes[names.AGENT_PATH]) == ("writer", "boss/writer")
    assert [span.agent for span in spans if span.name == "inner"] == ["boss"]


def test_a_run_that_raises_is_an_error_and_reaches_the_caller(spans_of):
    @workflow
    async def run():
        raise ZeroDivisionError("nothing left")

    def program(url):
        with pytest.raises(ZeroDivisionError):
            asyncio.run(run())

    (root,) = spans_of(program)
    assert (root.status, root.status_message) == ("error", "nothing left")


def test_in_an_attempt_it_belongs_to_it(spans_of):
    def run(url):
        with use_attempt(Attempt("r", "a")), workflow("run"):
            ask(url)

    assert {span.attempt_id for span in spans_of(run)} == {"a"}


def test_an_agent_named_by_a_decorator_is_at_work_while_the_coroutine_runs(spans_of):
    @agent("writer")
    async def write(url):
        await aask(url)

    spans = spans_of(lambda url: asyncio.run(write(url)))
    assert agents_of(spans) == ["writer"]
    assert len({span.trace_id for span in spans}) == 1


def test_without_being_attached_nothing_is_changed():
    @workflow
    def run():
        """Say who is at work."""
        return current_agent()

    with agent("writer"), workflow("run") as span:
        assert span is None
        assert run() == "writer"
    assert (run.__name__, run.__doc__) == ("run", "Say who is at work.")


@pytest.mark.parametrize("block", [workflow("run"), agent("writer")])
def test_a_generator_is_refused_and_a_block_is_entered_once_at_a_time(block):
    def steps():
        yield 1

    async def asteps():
        yield 1

    for function in (steps, asteps):
        with pytest.raises(ConfigError, match="is a generator"):
            block(function)
    with block, pytest.raises(ConfigError, match="already in use by a `with` block"), block:
        pass
    with block:
        pass
