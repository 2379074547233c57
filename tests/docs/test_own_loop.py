"""The programs of docs/how-to/own-loop.md: a service that takes rollouts, and one whose threads were there before."""

from __future__ import annotations

import asyncio
import re
import runpy
from contextlib import closing
from pathlib import Path

import pytest

from lightning_spans import Attempt, adapt, open_store, traces_of, use_attempt
from lightning_spans.schema.attempts import Rollout
from lightning_trainer.gateway.settings import Routing
from support.fakes import FakeEngine, served

PROGRAMS = Path(__file__).parent / "loops"
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-loop.md"
MESSAGES = {"lamp": "Where is my lamp?", "hat": "Where is my hat?"}
WHICH = re.compile("|".join(MESSAGES))


def answer(prompt: str) -> str:
    """Answer about what was asked, with a full stop where it is about the lamp."""
    about = WHICH.findall(prompt)[-1]
    return f"The {about} is here{'.' if about == 'lamp' else ''}"


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # attach() records to lightning.db outside of attempts
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")  # the service's own endpoint, where nobody is
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    with served(tmp_path, FakeEngine(answer), routing=Routing(agents=("writer",))) as running:
        yield running


@pytest.fixture
def program(request, server):
    loaded = runpy.run_path(str(PROGRAMS / request.param))
    yield loaded
    loaded["attachment"].detach()


def transitions(server, attempt_id):
    (trace,) = traces_of(server.store, attempt_ids=[attempt_id])
    return adapt(trace)


@pytest.mark.parametrize("program", ["own_loop.py"], indirect=True)
def test_a_loop_of_its_own_takes_rollouts_and_each_call_is_of_its_attempt(server, program):
    asked = [Rollout(rollout_id=name, group_id="g", task={"message": said}) for name, said in MESSAGES.items()]
    server.store.enqueue(asked)
    with closing(open_store(server.url, key=server.keys.issue("runner"))) as store:
        assert asyncio.run(program["take"](store, 4)) == 2
    assert [attempt.error for attempt in server.store.attempts()] == [None, None]
    assert {rollout.status for rollout in server.store.rollouts()} == {"succeeded"}
    for attempt in server.store.attempts():
        name = attempt.rollout.rollout_id
        (made,) = transitions(server, attempt.attempt_id)
        assert (made.agent, made.message["content"]) == ("writer", answer(name))
        assert made.tokens is not None
        assert [(r.agent, r.value) for r in server.store.rewards(attempt_ids=[attempt.attempt_id])] == [
            ("writer", float(name == "lamp"))
        ]


@pytest.mark.parametrize("program", ["own_loop.py"], indirect=True)
def test_a_rollout_that_goes_wrong_in_it_has_failed(server, program):
    server.store.enqueue([Rollout(rollout_id="r", group_id="g", task={}, max_attempts=1)])
    with closing(open_store(server.url, key=server.keys.issue("runner"))) as store:
        asyncio.run(program["take"](store, 1))
    (attempt,) = server.store.attempts()
    assert (attempt.status, attempt.error) == ("failed", "KeyError: 'message'")


@pytest.mark.parametrize("program", ["own_threads.py"], indirect=True)
def test_threads_that_were_there_before_work_in_the_attempt_of_whoever_asked(server, program):
    for name, message in MESSAGES.items():
        attempt = Attempt(f"rollout of {name}", name, endpoint=server.url, key=server.key(name), agents=("writer",))
        with use_attempt(attempt):
            assert program["run"]({"message": message}) == float(name == "lamp")
    program["attachment"].flush()
    for name in MESSAGES:
        (made,) = transitions(server, name)
        assert (made.agent, made.message["content"]) == ("writer", answer(name))


def test_the_page_shows_the_programs_that_are_tested():
    shown = set(re.findall(r"<!-- snippet: tests/docs/loops/(own_\w+\.py):main -->", PAGE.read_text(encoding="utf-8")))
    assert shown == {path.name for path in PROGRAMS.glob("own_*.py")}
