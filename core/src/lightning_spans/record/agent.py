"""`agent()`: who is at work in a plain program, or wherever a framework gives no name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_spans.hooks import OpenSpan
from lightning_spans.record.context import entered, with_agent
from lightning_spans.record.pipeline import live_recorder
from lightning_spans.schema import spans as names


@contextmanager
def agent(name: str) -> Iterator[OpenSpan | None]:
    """Say that this agent is at work inside the block: for plain programs, and wherever a framework gives no name.

    Model calls made inside carry the name. While attached, the block is also an ``invoke_agent`` span, which is given;
    otherwise None.
    """
    recorder = live_recorder()
    span = None
    if recorder is not None:
        with recorder.guard("agent"):
            span = recorder.start(names.INVOKE_AGENT, name, agent=name)
    if recorder is None or span is None:
        with entered(with_agent(name)):
            yield None
        return
    failed: BaseException | None = None
    try:
        with entered(span.context):
            yield span
    except BaseException as error:
        failed = error
        raise
    finally:
        with recorder.guard("agent", span):
            span.end(error=failed)
