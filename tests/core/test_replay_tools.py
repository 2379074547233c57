"""Tools in a replay, in plain code: what the record has is returned or raised, and nothing is called twice."""

from __future__ import annotations

import asyncio
import datetime as dt
import decimal
import enum
import logging
import math
import random
import threading
import uuid
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest

import lightning_spans
from lightning_conformance.plugins.recorded_tools import RUN, RecordedTools
from lightning_conformance.plugins.replayed import run_attempt, run_twice
from lightning_conformance.plugins.server import ScriptedServer
from lightning_spans import Attempt, agent, use_attempt
from lightning_spans.errors import ConfigError, RecordedToolError, ReplayEndedError
from lightning_spans.record import replay, returned
from lightning_spans.schema import spans as names
from lightning_spans.schema.replays import Replay

pytest.importorskip("openai")  # the plugin that is attached


@dataclass(frozen=True)
class Hit:
    title: str
    scores: tuple[float, ...]


Point = namedtuple("Point", "x y")


class Colour(enum.Enum):
    RED = 1


class OwnError(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.reason}"


VALUES = [
    None, True, 3, -2.5, "text", "", [1, [2]], {"a": {"b": None}}, (1, "two"), {1: "one"}, {"$type": "tuple"}, {1, 2},
    frozenset({"a"}), b"\x00\xff", math.inf, 1j, decimal.Decimal("1.10"), uuid.UUID(int=7), dt.datetime(2026, 1, 2, 3),
    dt.datetime(2026, 1, 2, tzinfo=dt.UTC), dt.date(2026, 1, 2), dt.time(1, 2), dt.timedelta(days=-1, microseconds=5),
    Path("a/b"), Point(1, 2), Colour.RED, Hit("a", (0.5, 1.0)), [Hit("b", ())], 2**70,
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_what_a_tool_returned_comes_back_as_it_was(value):
    again = returned.read(returned.write(value)).outcome()
    assert (again, type(again)) == (value, type(value))


def test_arrays_come_back_as_they_were():
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(6, dtype="float32").reshape(2, 3)
    again = returned.read(returned.write({"a": array, "b": numpy.float64(0.5)})).outcome()
    assert (again["a"].dtype, again["a"].tolist()) == (array.dtype, array.tolist())
    assert type(again["b"]) is numpy.float64
    again["a"][0] = 1  # it is the program's own


def test_models_come_back_as_they_were():
    pydantic = pytest.importorskip("pydantic")
    globals()["Answer"] = Answer = pydantic.create_model("Answer", __module__=__name__, text=(str, ...), n=(int, 3))
    value = Answer(text="a")
    again = returned.read(returned.write(value)).outcome()
    assert again == value
    assert type(again) is Answer


def test_what_would_not_come_back_is_refused_by_its_type():
    class Local:
        pass

    for value in (object(), threading.Lock(), [Local()], iter(())):
        with pytest.raises(TypeError, match=type(value[0] if isinstance(value, list) else value).__name__):
            returned.write(value)


def test_no_text_imports_a_module_or_calls_a_function():
    for text in (
        '{"$type": "dataclass", "class": "xml.dom.expatbuilder:Rejecter", "fields": {}}',
        '{"$type": "model", "class": "os:system", "value": "true"}',
        '{"$type": "enum", "class": "builtins:dict", "name": "x"}',
        '{"$type": "namedtuple", "class": "subprocess:Popen", "items": [["true"]]}',
        '{"$type": "unheard of"}',
    ):
        with pytest.raises(ValueError, match=r"."):
            returned.read(text)


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyError("x"), OSError(2, "gone"), OwnError(4, "late"), ConfigError("a"), ValueError()]
)
def test_what_a_tool_raised_is_raised_again(error):
    again = returned.read(returned.write_error(error)).error
    assert isinstance(again, type(error))
    assert (str(again), type(again).__name__) == (str(error), type(error).__name__)


def test_an_error_of_a_class_that_is_not_here_says_which():
    again = returned.error_of("shop:SoldOutError", "none left")
    assert isinstance(again, RecordedToolError)
    assert str(again) == "SoldOutError: none left"
    assert isinstance(returned.error_of("ZeroDivisionError", "division by zero"), ZeroDivisionError)


# The decorator


calls = []


@lightning_spans.tool
def look_up(word: str, *, limit: int = 3) -> Hit:
    calls.append(word)
    if word == "fail":
        raise OwnError(len(calls), "not there")
    return Hit(word, (float(len(calls)), float(limit)))


@lightning_spans.tool(name="wait_for", side_effects=True)
async def wait_for(word: str) -> tuple[str, int]:
    calls.append(word)
    await asyncio.sleep(0)
    return word, len(calls)


dice = lightning_spans.tool(random.random, name="dice")


def tools(spans):
    return [span for span in spans if span.operation == names.EXECUTE_TOOL]


def test_a_function_is_not_called_again_in_a_replay(tmp_path):
    def program(url):
        with agent("caller"):
            found = [look_up("a"), look_up("a"), look_up("b", limit=1)]
        with pytest.raises(OwnError) as error:
            look_up("fail")
        return found, str(error.value), dice()

    calls.clear()
    (first, second), spans = run_twice(program, tmp_path, "openai")
    assert first == second
    assert len(calls) == 4
    assert [(span.name, span.agent) for span in tools(spans)][:1] == [("look_up", "caller")]
    assert {span.attributes[names.REPLAYED] for span in tools(spans)} == {True}


def test_coroutines_run_at_once_and_each_gets_its_own_result(tmp_path):
    async def program(url):
        return await asyncio.gather(*(wait_for(word) for word in ("a", "b", "a")))

    calls.clear()
    (first, second), spans = run_twice(program, tmp_path, "openai")
    assert first == second
    assert len(calls) == 3
    assert {span.attributes[names.TOOL_SIDE_EFFECTS] for span in tools(spans)} == {True}


def test_the_event_loop_goes_on_while_the_gateway_is_asked(tmp_path):
    gate = threading.Event()

    def answers(asked):
        assert gate.wait(30)
        return 200, RUN

    async def program(url):
        waiting = asyncio.create_task(wait_for("a"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not waiting.done()
        gate.set()
        return await waiting

    output, _ = run_attempt(program, tmp_path, "openai", answers)
    assert output[0] == "a"


def test_a_method_is_known_by_its_arguments_alone(tmp_path):
    class Shop:
        @lightning_spans.tool
        def price(self, what: str, by: object = None) -> int:
            calls.append(what)
            return len(calls)

    calls.clear()
    (first, second), spans = run_twice(lambda url: Shop().price("tea", by=Shop()), tmp_path, "openai")
    assert first == second == 1
    (span,) = tools(spans)
    assert "0x" not in span.attributes[names.TOOL_ARGUMENTS]
    assert '"what":"tea"' in span.attributes[names.TOOL_ARGUMENTS]


def test_a_result_that_can_not_be_kept_ends_the_replay_and_says_why(tmp_path, caplog):
    opened = lightning_spans.tool(threading.Lock, name="opened")

    def program(url):
        try:
            return type(opened()).__name__
        except ReplayEndedError as error:
            return str(error)

    with caplog.at_level(logging.WARNING, logger="lightning_spans"):
        (_, second), _ = run_twice(program, tmp_path, "openai")
    assert "_thread.lock" in second
    assert "what the tool 'opened' returns holds _thread.lock" in caplog.text


def test_without_an_attachment_it_is_asked_for_all_the_same():
    endpoint = RecordedTools([])
    with ScriptedServer(tools=endpoint) as server:
        attempt = Attempt("r", "a", endpoint=server.base, key="k", replay=Replay(attempt_id="earlier"))
        calls.clear()
        with use_attempt(attempt), pytest.raises(ReplayEndedError, match="no such call of 'look_up'"):
            look_up("a")
        assert calls == []
        assert endpoint.asked == [
            {"agent": None, "name": "look_up", "call_id": None, "arguments": '{"word":"a","limit":3}'}
        ]


def test_a_mark_goes_along_with_the_question(tmp_path):
    endpoint = RecordedTools([], otherwise=RUN)
    run_attempt(lambda url: asyncio.run(wait_for("a")), tmp_path, "openai", endpoint)
    assert endpoint.asked[0]["side_effects"] is True


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((409, {"error": {"message": "`a`'s call differs", "code": "replay_differs"}}), "`a`'s call differs"),
        ((500, "no"), "answers 500"),
        ((200, {"do": "give", "status": "ok", "result": None}), "does not say what 'look_up' gave"),
        ((200, {"do": "give", "status": "ok", "result": "__REDACTED__"}), "masked"),
        ((200, {"do": "give", "status": "ok", "result": "", "returned": '{"$type": "?"}'}), "can't be read"),
    ],
)
def test_nothing_is_run_where_the_record_does_not_say_what_to_give(answer, said, tmp_path):
    def program(url):
        with pytest.raises(ReplayEndedError, match=said):
            look_up("a")

    calls.clear()
    run_attempt(program, tmp_path, "openai", lambda asked: answer)
    assert calls == []


def test_a_gateway_that_is_gone_runs_no_tool():
    attempt = Attempt("r", "a", endpoint="http://127.0.0.1:9", key="k", replay=Replay(attempt_id="earlier"))
    with use_attempt(attempt), pytest.raises(ReplayEndedError, match="does not return the recorded result"):
        look_up("a")


def test_what_is_no_replay_asks_nobody():
    assert replay.current_replay() is None
    with use_attempt(Attempt("r", "a", endpoint="http://127.0.0.1:9")):
        assert replay.current_replay() is None
        assert look_up("b").title == "b"


def test_an_error_while_a_result_is_recorded_does_not_reach_the_program(tmp_path, caplog):
    def fail(span, answer):
        raise OwnError(1, "not kept")

    @lightning_spans.tool
    def count():
        return replay.run_or_replay(lambda: 1, keep=fail)

    @lightning_spans.tool
    async def count_later():
        return await replay.arun_or_replay(lambda: asyncio.sleep(0, 2), keep=fail)

    output, spans = run_attempt(lambda url: (count(), asyncio.run(count_later())), tmp_path, "openai")
    assert output == (1, 2)
    assert [span.status for span in tools(spans)] == ["ok", "ok"]
    for name in ("count", "count_later"):
        assert f"recording what a tool returned failed at span execute_tool '{name}'" in caplog.text


def test_marks_that_contradict_each_other_and_generators_are_refused():
    with pytest.raises(ConfigError, match="choose one of them"):
        lightning_spans.tool(pure=True, side_effects=True)
    with pytest.raises(ConfigError, match="generator"):

        @lightning_spans.tool
        def many():
            yield 1
