"""The model that chaos checks against goes red for whatever it is there to find. The kills run in `nox -s chaos`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))

from model import batch_problems, lost, queue_problems, trace_problems

from lightning_conformance.stores.samples import a_span
from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward

ROLLOUT = Rollout(rollout_id="r", group_id="g", task={}, status="succeeded")
LOST = AttemptRecord(attempt_id="r.1", rollout=ROLLOUT, number=1, fence=1, worker="w", status="lost")
GOOD = replace(LOST, attempt_id="r.2", number=2, fence=2, status="succeeded")
REWARD = Reward(value=1.0, rollout_id="r", attempt_id="r.2", source="run")
SPANS = [a_span(attempt_id="r.2"), a_span(attempt_id="r.2")]
CALLS = [
    Call(call_id=s.span_id, response_id=s.span_id, start_ns=1, end_ns=2, policy="p", policy_version=0,
         attempt_id="r.2", span_id=s.span_id)
    for s in SPANS
]  # fmt: skip
BATCH: dict[str, Any] = {"step": 0, "hash": "abc", "attempts": ["r.2"]}


def test_what_is_as_it_must_be_raises_no_problem() -> None:
    assert lost("spans", ["a"], ["a", "b"]) == []
    assert queue_problems([ROLLOUT], [LOST, GOOD], [REWARD]) == []
    assert trace_problems([LOST, GOOD], CALLS, SPANS) == []
    assert batch_problems([BATCH, BATCH], [BATCH], [LOST, GOOD]) == []


@pytest.mark.parametrize(
    ("problems", "word"),
    [
        (lost("spans", ["a", "b"], ["a"]), "not there"),
        (lost("spans", ["a"], ["a", "a"]), "twice"),
        (queue_problems([replace(ROLLOUT, status="running")], [LOST], []), "still running"),
        (queue_problems([ROLLOUT], [LOST], []), "with 0 ends"),
        (queue_problems([ROLLOUT], [replace(GOOD, attempt_id="r.1", fence=1), GOOD], [REWARD]), "with 2 ends"),
        (queue_problems([ROLLOUT], [replace(LOST, fence=2), GOOD], [REWARD]), "fencing"),
        (queue_problems([ROLLOUT], [GOOD], []), "has 0 rewards"),
        (queue_problems([ROLLOUT], [GOOD], [REWARD, REWARD]), "has 2 rewards"),
        (queue_problems([ROLLOUT], [LOST, GOOD], [REWARD, replace(REWARD, attempt_id="r.1")]), "lost, has 1"),
        (trace_problems([GOOD], CALLS[:1], SPANS), "without both"),
        (trace_problems([GOOD], CALLS, SPANS[:1]), "without both"),
        (batch_problems([{**BATCH, "hash": "x"}], [BATCH], [GOOD]), "undisturbed abc"),
        (batch_problems([{**BATCH, "attempts": ["r.2", "r.3"]}], [BATCH], [GOOD]), "twice in the batch"),
        (batch_problems([BATCH], [BATCH], [LOST]), "did not succeed"),
        (batch_problems([{**BATCH, "step": 1}], [{**BATCH, "step": 1}], [GOOD]), "missing"),
    ],
)
def test_whatever_is_wrong_is_told(problems: list[str], word: str) -> None:
    assert any(word in problem for problem in problems), problems
