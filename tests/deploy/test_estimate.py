"""The off-policy estimate: right where it is given, and refused where recorded calls say nothing of the candidate."""

from __future__ import annotations

import json
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_conformance import MemoryStore
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import open_store
from lightning_trainer.kits.deploy.estimate.off_policy import estimate
from lightning_trainer.kits.deploy.estimate.recorded import RecordedEstimate, estimate_from_records
from lightning_trainer.kits.deploy.transitions import Policy, begin_canary, name_candidate
from support.cli import call, told
from support.gateway.deployed import NOTE

RATES = np.array([0.2, 0.8])  # mean outcome of two answers
OLD, NEW = np.array([0.5, 0.5]), np.array([0.3, 0.7])  # how often each policy gives them


def sampled(rng: np.random.Generator, count: int, new: np.ndarray = NEW) -> tuple[np.ndarray, np.ndarray]:
    answers = rng.choice(2, size=count, p=OLD)
    return (rng.random(count) < RATES[answers]).astype(float), np.log(new / OLD)[answers]


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng, truth = np.random.default_rng(0), float((NEW - OLD) @ RATES)
    found = [estimate(*sampled(rng, 400)) for _ in range(500)]
    held = [one.low <= truth <= one.high for one in found if one.low is not None and one.high is not None]
    assert len(held) == 500
    assert 0.92 <= np.mean(held) <= 0.98
    assert np.mean([one.difference for one in found]) == pytest.approx(truth, abs=0.01)


def test_equal_policies_have_no_difference_and_lose_no_conversation() -> None:
    found = estimate([0.0, 1.0] * 100, [0.0] * 200)
    assert (found.effective, found.difference, found.low, found.high) == (200.0, 0.0, 0.0, 0.0)


def test_what_is_uninformative_is_refused() -> None:
    rng = np.random.default_rng(0)
    assert "at least 100 is needed" in str(estimate(*sampled(rng, 90)).refused)
    ratios = np.where(np.arange(1000) < 10, 0.0, -50.0)  # the candidate gives nearly none of these answers
    few = estimate(np.ones(1000), ratios)
    assert (few.candidate, few.low) == (None, None)
    assert few.effective == pytest.approx(10.0)
    clipped = estimate(np.ones(1000), np.where(np.arange(1000) < 300, math.log(400.0), 0.0))
    assert "clipped" in str(clipped.refused)
    assert estimate([], []).refused is not None


# what the gateway records for an attempt whose request leaves all of this open
PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def recorded(number: int, logprob: float = -1.0, **how: Any) -> Call:
    made = Call(
        call_id=f"{number}", response_id=f"{number}", start_ns=number, end_ns=number + 1, policy="old",
        policy_version=0, agent="writer", attempt_id=f"a{number}", prompt_token_ids=(1, 2),
        choices=(Choice(0, (3, 4), (logprob, logprob), "stop", {"role": "assistant", "content": "x"}),),
        sampling=PLAIN,
    )  # fmt: skip
    return replace(made, **how)


def test_only_calls_whose_probabilities_are_the_policys_own_count() -> None:
    store = MemoryStore()
    calls = [recorded(number) for number in range(200)]
    calls += [recorded(300, sampling={**PLAIN, "temperature": 0.7}), recorded(301, sampling={**PLAIN, "top_p": 0.5})]
    calls += [recorded(302, policy="other"), recorded(303, agent="reader"), recorded(304, error="no answer")]
    calls += [recorded(305, choices=(Choice(0, None, None, "stop", {}),)), recorded(306)]
    store.add_calls(calls)
    store.add_calls([recorded(400, attempt_id="a0", error="no answer")])  # so the whole conversation is left out
    store.add_rewards([Reward(rollout_id="r", attempt_id=f"a{n}", value=n % 2) for n in (*range(200), 300, 301)])
    current = name_candidate(None, "writer", Policy("new"), NOTE, stable="old")
    seen: list[int] = []

    def score(rows: Any) -> Any:
        seen.append(len(rows))
        assert all(
            (row.tokens.tolist(), row.mask.tolist()) == ([1, 2, 3, 4], [False, False, True, True]) for row in rows
        )
        return [np.array([-1.0, -1.0]) for _ in rows]

    found = estimate_from_records(store, current, score)
    assert (seen, found.calls, found.estimate.n, found.estimate.difference) == ([199], 199, 199, 0.0)
    assert sum(found.left_out.values()) == 7


def read(store: MemoryStore, *, most: int = 2000) -> RecordedEstimate:
    """Estimate a candidate that gives the recorded tokens the same probabilities."""
    current = name_candidate(None, "writer", Policy("new"), NOTE, stable="old")
    return estimate_from_records(store, current, lambda rows: [row.logprobs[row.mask] for row in rows], most=most)


@pytest.mark.parametrize(
    ("sampling", "request_", "reason"),
    [
        ({}, {}, "its sampling was not recorded"),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": -1}, {}, "its sampling was not recorded"),
        ({**PLAIN, "temperature": 0.7}, {}, "it was not sampled at temperature 1"),
        ({**PLAIN, "min_p": 0.2}, {}, "min_p changed what could be sampled"),
        ({**PLAIN, "presence_penalty": 1.5}, {}, "presence_penalty changed what could be sampled"),
        ({**PLAIN, "tool_choice": "required"}, {}, "tool_choice changed what could be sampled"),
        (PLAIN, {"structured_outputs": {"regex": "a+"}}, "structured_outputs changed what could be sampled"),
        (PLAIN, {"tool_choice": "auto", "response_format": {"type": "text"}}, None),
        ({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seeds": [7]}, {}, None),  # sampled by the gateway's engine
    ],
)
def test_a_call_counts_if_the_policy_alone_decided_what_was_sampled(
    sampling: dict[str, Any], request_: dict[str, Any], reason: str | None
) -> None:
    store = MemoryStore()
    store.add_calls([recorded(1, sampling=sampling, request={"messages": [], **request_})])
    store.add_rewards([Reward(rollout_id="r", attempt_id="a1", value=1.0)])
    found = read(store)
    assert (found.calls, found.left_out) == ((1, {}) if reason is None else (0, {reason: 1}))


def test_a_conversation_counts_only_if_all_of_its_calls_were_read_and_the_stable_policys() -> None:
    store = MemoryStore()
    store.add_calls([recorded(1, attempt_id="long"), recorded(2, attempt_id="short")])
    store.add_calls([recorded(3, attempt_id="long"), recorded(4, attempt_id="both", policy="rolled back")])
    store.add_calls([recorded(5, attempt_id="both"), recorded(6, attempt_id="new")])
    store.add_rewards([Reward(rollout_id="r", attempt_id=one, value=1.0) for one in ("long", "short", "both", "new")])
    another = {"another policy answered a call of its conversation": 1}
    found = read(store)
    assert (found.estimate.n, found.calls, found.left_out) == (3, 4, another)
    found = read(store, most=4)
    assert (found.estimate.n, found.calls) == (2, 2)
    assert found.left_out == {**another, "its conversation has older calls, which were not read": 1}


def test_the_command_wants_a_candidate_that_answers_nobody(tmp_path: Path) -> None:
    path = tmp_path / "lightning.db"
    open_store(str(path)).close()
    words = ("deploy", "estimate", "--agent", "writer", "--server", "http://127.0.0.1:9/v1", "--store", path)
    told(call(*words), "no candidate")
    with closing(open_store(str(path))) as store:
        named = name_candidate(None, "writer", Policy("new"), NOTE, stable="old")
        store.add_deployments([named])
        found = json.loads(call(*words, "--json").stdout)
        assert (found["policy"], found["n"], found["candidate"]) == ("new", 0, None)
        assert "no estimate of new" in call(*words).stdout
        store.add_deployments([begin_canary(named, "writer", 0.1, NOTE)])
    told(call(*words), "in a canary")
