"""Records for tests of stores: plain ones from functions, arbitrary ones from Hypothesis strategies."""

from __future__ import annotations

import uuid
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.replays import Replay
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Span
from lightning_spans.store.deployments import Assignment, Deployment

_FIRST_NS = 1_790_000_000_000_000_000  # a time in 2026, beyond what a float64 can hold to the nanosecond


ANY = settings(
    max_examples=25,
    deadline=None,
    # One store for all examples of a test is safe, because their ids are new. A suite is inherited by several classes.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
"""How the suites run a test on any records."""


def an_id() -> str:
    """Make an id that no other test has."""
    return uuid.uuid4().hex


def a_span(**changes: Any) -> Span:
    """Make a plain span."""
    values: dict[str, Any] = {
        "operation": "chat",
        "name": "chat m",
        "trace_id": an_id(),
        "span_id": an_id()[:16],
        "start_ns": _FIRST_NS,
        "end_ns": _FIRST_NS + 1,
    }
    return Span(**{**values, **changes})


def a_call(**changes: Any) -> Call:
    """Make a plain call of one choice."""
    values: dict[str, Any] = {
        "call_id": an_id(),
        "response_id": an_id(),
        "start_ns": _FIRST_NS,
        "end_ns": _FIRST_NS + 1,
        "policy": "policy",
        "policy_version": 3,
        "prompt_token_ids": (1, 2),
        "choices": (Choice(0, (3, 4), (-0.1, -0.2), "stop", {"role": "assistant", "content": "hi"}),),
    }
    return Call(**{**values, **changes})


def a_reward(**changes: Any) -> Reward:
    """Make a plain reward."""
    return Reward(**{"rollout_id": an_id(), "attempt_id": an_id(), "value": 0.5, **changes})


def a_deployment(**changes: Any) -> Deployment:
    """Make a plain transition of an agent that no other test has."""
    return Deployment(**{"agent": an_id(), "number": 1, "stage": "candidate", "stable": "old", **changes})


def an_assignment(**changes: Any) -> Assignment:
    """Make a plain assignment."""
    return Assignment(**{"agent": "writer", "attempt_id": an_id(), "policy": "old", "number": 1, **changes})


def a_rollout(**changes: Any) -> Rollout:
    """Make a plain rollout."""
    return Rollout(**{"rollout_id": an_id(), "group_id": an_id(), "task": {"question": "1 + 1?"}, **changes})


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
_MAYBE_TEXT = st.none() | _TEXT
_WHOLE = st.integers(-(2**63), 2**63 - 1)
_NUMBER = st.floats(allow_nan=False, allow_infinity=False)
_JSON = st.recursive(
    st.none() | st.booleans() | _WHOLE | _NUMBER | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)
_OBJECT = st.dictionaries(_TEXT, _JSON, max_size=4)
_TIME = st.integers(0, 2**63 - 1)
_TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    """Generate any span; its ids are new."""
    start, end = sorted((draw(_TIME), draw(_TIME)))
    return Span(
        operation=draw(_TEXT),
        name=draw(_TEXT),
        trace_id=an_id(),
        span_id=an_id()[:16],
        parent_id=draw(_MAYBE_TEXT),
        start_ns=start,
        end_ns=end,
        status=draw(st.sampled_from(["ok", "error", "unset"])),
        status_message=draw(_TEXT),
        agent=draw(_MAYBE_TEXT),
        rollout_id=draw(_MAYBE_TEXT),
        attempt_id=draw(_MAYBE_TEXT),
        origin=draw(_TEXT),
        attributes=draw(_OBJECT),
    )


@st.composite
def choices(draw: st.DrawFn, index: int) -> Choice:
    """Generate any choice with this index."""
    return Choice(
        index=index,
        token_ids=draw(st.none() | _TOKENS),
        logprobs=draw(st.none() | st.lists(_NUMBER, max_size=20).map(tuple)),
        finish_reason=draw(_MAYBE_TEXT),
        message=draw(_OBJECT),
    )


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Generate any call of up to four choices; its call and trace ids are new."""
    start, end = sorted((draw(_TIME), draw(_TIME)))
    return Call(
        call_id=an_id(),
        response_id=draw(_TEXT),
        start_ns=start,
        end_ns=end,
        policy=draw(_TEXT),
        policy_version=draw(_WHOLE),
        trace_id=an_id(),
        span_id=draw(_MAYBE_TEXT),
        rollout_id=draw(_MAYBE_TEXT),
        attempt_id=draw(_MAYBE_TEXT),
        agent=draw(_MAYBE_TEXT),
        origin=draw(_TEXT),
        prompt_token_ids=draw(st.none() | _TOKENS),
        choices=tuple(draw(choices(index)) for index in range(draw(st.integers(0, 4)))),
        request=draw(_OBJECT),
        sampling=draw(_OBJECT),
        error=draw(_MAYBE_TEXT),
    )


@st.composite
def rewards(draw: st.DrawFn) -> Reward:
    """Generate any reward; its ids are new."""
    return Reward(
        rollout_id=an_id(),
        attempt_id=an_id(),
        value=draw(_NUMBER),
        agent=draw(_MAYBE_TEXT),
        span_id=draw(_MAYBE_TEXT),
        source=draw(_TEXT),
        given_ns=draw(st.none() | _TIME),
        choice=draw(st.none() | st.integers(0, 9)),
    )


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    """Generate any transition, of a new agent."""
    return Deployment(
        agent=an_id(),
        number=draw(st.integers(1, 2**31 - 1)),
        stage=draw(st.sampled_from(["candidate", "shadow", "canary", "stable", "rolled_back"])),
        stable=draw(_TEXT),
        candidate=draw(_MAYBE_TEXT),
        previous=draw(_MAYBE_TEXT),
        share=draw(st.floats(0, 1)),
        checkpoint=draw(_MAYBE_TEXT),
        base=draw(_MAYBE_TEXT),
        reason=draw(_TEXT),
        actor=draw(_TEXT),
        at_ns=draw(_TIME),
        details=draw(_OBJECT),
    )


@st.composite
def replays(draw: st.DrawFn) -> Replay:
    """Generate any replay."""
    names = st.lists(_TEXT, max_size=2).map(tuple)
    return Replay(
        attempt_id=draw(_TEXT),
        call=draw(st.none() | st.integers(0, 99)),
        coupled=draw(st.booleans()),
        beyond=draw(st.sampled_from(["end", "sample"])),
        fresh=draw(names),
        tools=draw(st.sampled_from(["replay", "run", "refuse"])),
        run_tools=draw(names),
        refuse_tools=draw(names),
        say=draw(_MAYBE_TEXT),
        model=draw(_MAYBE_TEXT),
        draw=draw(st.integers(0, 99)),
    )


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """Generate any rollout that can be queued; its ids are new."""
    return Rollout(
        rollout_id=an_id(),
        group_id=an_id(),
        task=draw(_OBJECT),
        mode=draw(_TEXT),
        origin=draw(_TEXT),
        max_attempts=draw(st.integers(1, 2**31 - 1)),
        timeout_s=draw(st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False)),
        replay=draw(st.none() | replays()),
    )
