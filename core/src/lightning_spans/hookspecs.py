"""Every hook, in the order an attempt meets them.

Three kinds, never mixed: *whose is it?* (``firstresult``; answer None unless the thing is yours), *it happened* (all
are called, each guarded on its own), *register by name* (``register(name, thing)``; a second claim to a name is an
error).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from lightning_spans.recorder import OpenSpan, Recorder
    from lightning_spans.rewards import Reward
    from lightning_spans.spans import Span
    from lightning_spans.trace import Trace
    from lightning_spans.transitions import Transition

PROJECT = "lightning_spans"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def lightning_attach(framework: str, recorder: Recorder) -> Callable[[], None] | None:
    """Whose: bind a framework's events to the recorder, once per live `attach()`, in the agent's process.

    Args:
        framework: the name given to `attach()`; answer None unless it is yours.
        recorder: begins and ends spans.

    Returns:
        A callable that undoes everything done here.
    """


@hookspec(firstresult=True)
def lightning_agent_name(span: OpenSpan) -> str | None:
    """Whose: name the agent of a span that has ended, in the agent's process; it is stored on the span.

    Called only for spans that have no agent, before they are delivered, in a thread of its own: what was current when
    the span began is in `span.context`. An answer that takes longer than 5 s is not waited for; until it comes, spans
    go without.
    """


@hookspec
def lightning_span_ended(span: Span) -> None:
    """It happened: a span ended and was handed to the sink. In the agent's process, in a thread of its own.

    Spans come one at a time, in the order in which they ended. A listener that is slow or hangs delays neither the
    agent nor the delivery of spans: up to 16,384 spans wait for it, of more it is not told. One that raises is logged,
    and the others are called. `Attachment.flush` waits for listeners, `detach` for 2 s at most.
    """


@hookspec(firstresult=True)
def lightning_adapt(trace: Trace) -> list[Transition] | None:
    """Whose: turn one finished attempt into transitions, on the training side. The core's own answer comes last."""


@hookspec
def lightning_rewards(trace: Trace, transitions: Sequence[Transition]) -> list[Reward] | None:
    """It happened: an attempt was adapted; give automatic intermediate rewards for it. All answers are added up."""


@hookspec
def lightning_register_credit(register: Callable[[str, Any], None]) -> None:
    """Register by name: credit assigners, callables as in `lightning_spans.credit`."""


@hookspec
def lightning_register_algorithms(register: Callable[[str, Any], None]) -> None:
    """Register by name: algorithms of `lightning_trainer`."""


@hookspec
def lightning_register_backends(register: Callable[[str, Any], None]) -> None:
    """Register by name: backends of `lightning_trainer`."""
