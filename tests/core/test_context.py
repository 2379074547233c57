from __future__ import annotations

import asyncio
from contextvars import copy_context

import pytest
from opentelemetry import context as otel_context

from lightning_spans import Attempt, agent
from lightning_spans.record import context as contexts
from lightning_spans.record.context import (
    current_agent,
    current_attempt,
    entered_steps,
    overlaid,
    settle_context,
    use_context,
    with_agent,
    with_attempt,
)
from lightning_spans.record.instrument.scope import Scope, current_scope


def test_only_our_own_values_are_laid_over():
    theirs = otel_context.set_value("theirs", "kept", with_agent("left"))
    ours = otel_context.set_value("theirs", "not taken", with_agent("right"))
    both = overlaid(ours, theirs)
    assert current_agent(both) == "right"
    assert both["theirs"] == "kept"


def test_a_value_of_ours_that_is_not_there_is_taken_away():
    assert current_agent(overlaid(otel_context.Context(), with_agent("left"))) is None


async def agents_inside(times):
    for _ in range(times):
        yield current_agent()


def test_a_generator_is_inside_and_its_reader_outside():
    async def work():
        with use_context(with_agent("reader")):
            steps = entered_steps(with_agent("generator"), agents_inside(2))
            return [(inside, current_agent()) async for inside in steps], current_agent()

    assert asyncio.run(work()) == ([("generator", "reader")] * 2, "reader")


def test_what_a_generator_enters_itself_is_there_at_its_next_step():
    async def items():
        otel_context.attach(with_agent("deeper"))
        otel_context.attach(otel_context.set_value("theirs", 1))
        yield current_agent()
        yield current_agent()

    async def work():
        steps = entered_steps(with_agent("generator"), items())
        return [(inside, current_agent(), otel_context.get_value("theirs")) async for inside in steps]

    # Theirs leaks to the reader, as it would without us; ours does not.
    assert asyncio.run(work()) == [("deeper", None, 1)] * 2


def test_an_error_of_a_generator_reaches_its_reader_outside():
    async def items():
        yield 1
        raise ValueError(current_agent())

    async def work():
        async for _ in entered_steps(with_agent("generator"), items()):
            pass

    async def checked():
        with pytest.raises(ValueError, match="generator"):
            await work()
        return current_agent()

    assert asyncio.run(checked()) is None


def test_a_generator_that_is_closed_closes_the_one_inside():
    closed = []

    async def items():
        try:
            yield 1
        finally:
            closed.append(current_agent())

    async def work():
        steps = entered_steps(with_agent("generator"), items())
        await anext(steps)
        await steps.aclose()
        return current_agent()

    assert asyncio.run(work()) is None
    assert closed == ["generator"]


def test_a_runtime_of_the_users_own_keeps_the_context(monkeypatch):
    get, attach, _ = contexts._direct()
    before = get()
    attach(with_agent("reader"))
    assert current_agent() == "reader"
    attach(before)
    monkeypatch.setattr(otel_context, "_RUNTIME_CONTEXT", object())
    assert contexts._direct() == (otel_context.get_current, otel_context.attach, otel_context.detach)


def ended_in_a_copy(scope):
    """Have a scope end as asyncio reports it: in a copy of its context."""
    copy_context().run(scope.leave)


@pytest.mark.parametrize("before", [None, "reader"])
def test_what_a_scope_that_is_over_entered_goes(before):
    def work():
        otel_context.attach(otel_context.set_value("theirs", "kept", with_agent(before)))
        scope = Scope()
        scope.enter(with_attempt(Attempt("r", "a"), with_agent("worker")))
        assert (current_agent(), current_attempt()) == ("worker", Attempt("r", "a"))
        ended_in_a_copy(scope)
        assert otel_context.get_current() is scope.entered
        assert (current_agent(), current_attempt(), current_scope(settle_context())) == (before, None, None)
        assert settle_context()["theirs"] == "kept"

    copy_context().run(work)


def test_what_was_put_on_top_of_a_scope_scopes_when_it_is_over():
    def work():
        otel_context.attach(with_agent("reader"))
        scope = Scope()
        scope.enter(with_agent("worker"))
        tops = {
            "agent": with_agent("judge"),
            "attempt": with_attempt(Attempt("r", "a")),
            "theirs": otel_context.set_value("theirs", 1),
        }
        ended_in_a_copy(scope)
        left = {name: settle_context(top) for name, top in tops.items()}
        assert {name: current_agent(top) for name, top in left.items()} == {
            "agent": "judge",
            "attempt": "reader",
            "theirs": "reader",
        }
        assert current_attempt(left["attempt"]) == Attempt("r", "a")
        assert left["theirs"]["theirs"] == 1
        assert {current_scope(top) for top in left.values()} == {None}

    copy_context().run(work)


@pytest.mark.parametrize("top", [{}, {"theirs": 1}])
def test_scopes_that_are_over_hold_none_before_them(top):
    def work():
        outer = Scope()
        outer.enter(settle_context())
        for _ in range(3):
            scope = Scope()
            scope.enter(settle_context())
            otel_context.attach(otel_context.Context({**otel_context.get_current(), **top}))
            ended_in_a_copy(scope)
            assert current_scope(scope.previous) is outer
            assert scope.outer is outer

    copy_context().run(work)


def test_a_block_that_the_event_loop_closes_logs_nothing(caplog):
    async def pieces():
        with agent("writer"):
            yield 1
            yield 2

    async def leave():
        async for _ in pieces():
            break

    asyncio.run(leave())
    assert not caplog.records
