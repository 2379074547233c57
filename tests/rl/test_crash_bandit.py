"""A policy that could win by failing: from attempts in a store to advantages, with a simulated policy."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_conformance.stores.memory import MemoryStore
from lightning_spans.schema.attempts import AttemptRecord, AttemptStatus, Rollout
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import CHAT, Span
from lightning_spans.store import Store
from lightning_spans.store.traces import traces_of
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.reasons.call_errors import CLIENT_GONE, CUT
from lightning_trainer.rl.algorithms import algorithm_by_name
from lightning_trainer.rl.rollouts import Outcome, outcomes, plan
from lightning_trainer.rl.scores import reward_of_failures, score

RISKY, SAFE = 11, 12  # the tokens of the two actions
FAILURES: dict[str, tuple[AttemptStatus, str | None]] = {
    "crash": ("failed", "ValueError: no number in it"),
    "hang": ("timeout", "no result after 10 s, the time limit of an attempt"),
    "long": ("failed", "openai.APITimeoutError: Request timed out."),
}


def config(**options: Any) -> TrainConfig:
    return TrainConfig(target="a:b", data=Path("d.jsonl"), model="m", **options)


class Bandit:
    """Two actions: one fails four times in five and otherwise gives `high`, the other always gives `low`.

    Args:
        seed: of the samples.
        fails: how the risky action fails: the program crashes, hangs until the attempt's time limit, or gives up on
            an answer that takes too long.
        high: reward of the risky action where it does not fail.
        low: reward of the safe action.
        options: of the run.
    """

    def __init__(self, seed: int, *, fails: str = "crash", high: float = 1.0, low: float = 0.5, **options: Any) -> None:
        self.fails = fails
        self.config = config(max_attempts=3, **options)
        self.algorithm = algorithm_by_name(self.config.algorithm)
        self.high, self.low = high, low
        self.numbers = random.Random(seed)
        self.logit = 0.0  # of the risky action against the safe one

    @property
    def risky(self) -> float:
        return 1.0 / (1.0 + math.exp(-self.logit))

    def run(self, store: Store, rollouts: list[Rollout]) -> list[Outcome]:
        store.enqueue(rollouts)
        while claimed := store.claim("worker", limit=100):
            for record in claimed:
                ids = {"rollout_id": record.rollout.rollout_id, "attempt_id": record.attempt_id}
                risky = self.numbers.random() < self.risky
                call = spoke(record.attempt_id, RISKY if risky else SAFE, math.log(self.risky), **ids)
                fails = risky and self.numbers.random() < 0.8
                store.add_calls(
                    [replace(call, error=CLIENT_GONE, sampling={CUT: True}) if fails and self.fails == "long" else call]
                )
                status, error = FAILURES[self.fails] if fails else ("succeeded", None)
                rewards = [] if fails else [Reward(value=self.high if risky else self.low, **ids)]
                store.finish(record.attempt_id, record.fence, status=status, rewards=rewards, error=error)
        return outcomes(store, rollouts, self.config.timeouts)

    def learn(self, steps: int) -> float:
        """Take policy-gradient steps; gives the probability of the risky action after them."""
        for step in range(steps):
            store = MemoryStore()
            rollouts = plan(
                [{"n": n} for n in range(4)], name=f"r:{step}", size=8, mode="train", max_attempts=3, timeout_s=10.0
            )
            ended = self.run(store, rollouts)
            batch = self.algorithm.batch(self.config, ended, lambda ids, store=store: traces_of(store, attempt_ids=ids))
            gradient = 0.0
            for row in batch.rows:
                took_risk = float(row.tokens[row.mask][0] == RISKY)
                gradient += float(row.advantages[row.mask][0]) * (took_risk - self.risky)
            self.logit += 0.5 * gradient / max(len(batch.rows), 1)
        return self.risky


def spoke(name: str, token: int, logprob: float, **ids: str) -> Call:
    return Call(
        call_id=name, response_id=name, start_ns=1, end_ns=2, policy="policy", policy_version=0, agent="actor",
        prompt_token_ids=(1, 2), choices=(Choice(0, (token,), (logprob,), "stop"),), **ids,
    )  # fmt: skip


@pytest.mark.parametrize("fails", FAILURES)
@pytest.mark.parametrize("seed", range(3))
def test_policy_does_not_learn_to_fail(fails: str, seed: int) -> None:
    assert Bandit(seed, fails=fails).learn(60) < 0.2


@pytest.mark.parametrize("seed", range(2))
def test_crash_is_no_way_out_where_rewards_are_negative(seed: int) -> None:
    """Reward 0 would be the best that there is; the lowest of the batch is what a crash earns."""
    assert Bandit(seed, high=-0.5, low=-1.0).learn(60) > 0.5  # a crash costs no more than the safe action
    assert Bandit(seed, high=-1.0, low=-0.5).learn(60) < 0.2


def test_leaving_crashes_out_teaches_to_crash() -> None:
    """Why it is not the default: with only successes counted, the risky action looks twice as good."""
    assert Bandit(0, failed="exclude").learn(60) > 0.8
    assert Bandit(0, fails="hang", timeouts="exclude").learn(60) > 0.8


def one(status: AttemptStatus, *, then: float | None = None, **call: Any) -> Outcome:
    """A rollout whose first attempt made a call and ended so; the second one, where there is one, succeeded."""
    store = MemoryStore()
    [rollout] = plan([{}], name="r:0", size=1, mode="train", max_attempts=2, timeout_s=10.0)
    store.enqueue([rollout])
    [first] = store.claim("worker")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": first.attempt_id}
    if call.get("answered", True):
        store.add_calls([spoke(f"{first.attempt_id}/0", 5, -1.0, **ids)])
    if "status_code" in call:
        store.add_spans([failed_call(int(call["status_code"]), **ids)])
    if "error" in call:
        store.add_calls([replace(empty_call(**ids), error=call["error"])])
    store.finish(first.attempt_id, first.fence, status=status, error=call.get("told", "it broke"))
    while claimed := store.claim("worker"):
        [second] = claimed
        ids["attempt_id"] = second.attempt_id
        if then is None:
            store.finish(second.attempt_id, second.fence, status="timeout", error="too late")
        else:
            store.finish(second.attempt_id, second.fence, status="succeeded", rewards=[Reward(value=then, **ids)])
    [found] = outcomes(store, [rollout])
    return found


def empty_call(**ids: str) -> Call:
    return Call(call_id="x", response_id="x", start_ns=3, end_ns=4, policy="policy", policy_version=0, **ids)


def failed_call(status: int, **ids: str) -> Span:
    return Span(
        trace_id="1" * 32, span_id="2" * 16, operation=CHAT, name="chat", start_ns=3, end_ns=4, status="error",
        status_message=f"Error code: {status}", attributes={"http.response.status_code": status}, **ids,
    )  # fmt: skip


def test_crash_after_an_answer_counts_although_the_retry_succeeded() -> None:
    found = one("failed", then=1.0)
    assert found.crash is not None
    assert found.crash.number == 1
    assert score([found], "lowest").reward == 0.0
    assert score([found], -2.0).reward == -2.0
    assert score([found], "exclude").reward == 1.0
    assert found.error == "it broke"


@pytest.mark.parametrize("status", ["disturbed", "released"])
def test_what_the_machine_did_is_tried_again_and_left_out(status: AttemptStatus) -> None:
    assert one(status, then=1.0).crash is None
    assert score([one(status, then=1.0)], "lowest").reward == 1.0
    assert score([one(status, answered=False)], "lowest").reward is None


def test_crash_before_any_model_answered_is_no_doing_of_the_policys() -> None:
    assert one("failed", answered=False).crash is None


@pytest.mark.parametrize(
    ("status", "policys"), [(400, True), (404, True), (408, True), (429, False), (500, False), (503, False)]
)
def test_server_that_did_not_answer_is_no_doing_of_the_policys(status: int, policys: bool) -> None:
    assert (one("failed", status_code=status).crash is not None) == policys


def test_gateway_that_failed_a_call_is_known_by_its_record_alone() -> None:
    assert one("failed", error="the store can't keep this now: disk full. Try again").crash is None
    assert one("failed", error="the engine failed: RuntimeError: out of memory").crash is None
    assert one("failed", error="this model's context is 512 tokens; the messages have 600").crash is not None


@pytest.mark.parametrize(
    ("record", "claimed", "policys"),
    [(400, 503, True), (429, 503, False), (503, 400, False), (502, None, False), (None, 503, False)],
)
def test_no_span_contradicts_the_gateways_record(record: int | None, claimed: int | None, policys: bool) -> None:
    """None as the record's status: an engine that ended."""
    noted: dict[str, Any] = {"engine_ended": True} if record is None else {"error": {"status": record}}
    ids = {"trace_id": "1" * 32, "span_id": "2" * 16}
    assert (crash_after(claimed, record=replace(empty_call(**ids), error="no", sampling=noted)) is not None) == policys


@pytest.mark.parametrize(
    ("status", "claim", "policys"),
    [
        (503, {"agent": "actor"}, True),
        (429, {"agent": "actor"}, True),
        (503, {"agent": "judge"}, False),  # its endpoint is another one
        (None, {"agent": "actor"}, False),  # no connection
        (503, {"agent": "actor", "error": "openai.InternalServerError: Error code: 503 - no server"}, False),
    ],
    ids=["503", "429", "elsewhere", "unreachable", "raised"],
)
def test_server_error_that_the_gateway_knows_nothing_of_excuses_no_other_crash(
    status: int | None, claim: dict[str, str], policys: bool
) -> None:
    """The agent's process writes its spans: a policy could crash at no cost."""
    assert (crash_after(status, **claim) is not None) == policys


@pytest.mark.parametrize("policys_end", ["failed", "timeout"])
def test_attempt_whose_agents_have_no_name_is_excused_by_no_claim(policys_end: AttemptStatus) -> None:
    assert crash_after(503, agent=None, caller=None, status=policys_end) is not None


def crash_after(
    status_code: int | None,
    *,
    agent: str | None = "actor",
    caller: str | None = "actor",
    record: Call | None = None,
    status: AttemptStatus = "failed",
    error: str = "ValueError: I give up",
) -> AttemptRecord | None:
    """The crash of an attempt after an answer to `caller` and a span of `agent` that says that a call failed."""
    store = MemoryStore()
    [rollout] = plan([{}], name="r:0", size=1, mode="train", max_attempts=1, timeout_s=10.0)
    store.enqueue([rollout])
    [attempt] = store.claim("worker")
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": attempt.attempt_id}
    store.add_calls([replace(spoke("answer", 5, -1.0, **ids), agent=caller)])
    store.add_calls([replace(record, agent=caller, **ids)] if record is not None else [])
    span = replace(failed_call(status_code or 0, **ids), agent=agent, status_message="Error code: 503 - no server")
    store.add_spans([span if status_code is not None else replace(span, status_message="no connection", attributes={})])
    store.finish(attempt.attempt_id, attempt.fence, status=status, error=error)
    [found] = outcomes(store, [rollout])
    return found.crash


def test_lowest_reward_is_zero_or_the_batchs_own() -> None:
    good, bad = one("released", then=1.0), one("released", then=-3.0)
    crashed = one("failed", then=5.0)
    assert reward_of_failures([good, crashed], "lowest") == 0.0
    assert reward_of_failures([good, bad, crashed], "lowest") == -3.0
    assert reward_of_failures([good, bad, crashed], 0.25) == 0.25


def test_default_counts_failures() -> None:
    assert config().failed == "lowest"
    assert config(failed="0.5").failed == 0.5
    assert np.isclose(float(config(failed=-1).failed), -1.0)
