"""Stacks without our frames."""

from __future__ import annotations

import traceback

from lightning_spans.record.instrument.tracebacks import without_our_frames
from lightning_spans.record.replay import run_or_replay


def fail():
    raise ValueError("out of order")


def caught(work):
    try:
        work()
    except Exception as error:
        return error
    return None


def stack_of(error):
    return [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)]


def test_the_stack_of_an_exception_is_as_without_us():
    def through_us():
        return run_or_replay(fail)

    def chained():
        try:
            through_us()
        except ValueError as error:
            raise RuntimeError("the tool failed") from error

    error = caught(through_us)
    assert len(stack_of(error)) > 3
    without_our_frames(error)
    assert stack_of(error) == [(__file__, "caught"), (__file__, "through_us"), (__file__, "fail")]

    error = caught(chained)
    without_our_frames(error)
    assert [name for _, name in stack_of(error)] == ["caught", "chained"]
    assert [name for _, name in stack_of(error.__cause__)] == ["chained", "through_us", "fail"]


def test_frames_of_a_package_that_is_named_go_too():
    error = caught(fail)
    without_our_frames(error, __name__.partition(".")[0])
    assert stack_of(error) == []
