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
from lightning_trainer.kits.deploy.estimate.recorded import estimate_from_records
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


def recorded(number: int, logprob: float = -1.0, **how: Any) -> Call:
    made = Call(
        call_id=f"{number}", response_id=f"{number}", start_ns=number, end_ns=number + 1, policy="old",
        policy_version=0, agent="writer", attempt_id=f"a{number}", prompt_token_ids=(1, 2),
        choices=(Choice(0, (3, 4), (logprob, logprob), "stop", {"role": "assistant", "content": "x"}),),
        sampling={"temperature": 1.0},
    )  # fmt: skip
    return replace(made, **how)


def test_only_calls_whose_probabilities_are_the_policys_own_count() -> None:
    store = MemoryStore()
    calls = [recorded(number) for number in range(200)]
    calls += [recorded(300, sampling={"temperature": 0.7}), recorded(301, sampling={"top_p": 0.5})]
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
