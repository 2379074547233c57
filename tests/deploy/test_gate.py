"""The gate keeps its bounds over 2,000 simulated promotions of known quality, and lets nothing else through."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from lightning_spans.errors import ConfigError
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import open_store
from lightning_spans.store.deployments import Assignment
from lightning_trainer.kits.deploy.gate import Bounds, Sums, decide, half_width, log_ratio, weigh
from lightning_trainer.kits.deploy.outcomes import GateRules, read_evidence, rules_of
from lightning_trainer.kits.deploy.table import read_histories
from support.cli import call, told

PROMOTIONS = 2000
LOOK = 500  # conversations between two looks


def simulate(rate: float, difference: float, share: float, looks: int, seed: int) -> np.ndarray:
    """Whether each of many promotions is made (1), refused (-1) or undecided (0) after so many looks.

    All grows better by ten points half-way, and the share twice as large: a stratum of its own.
    """
    rng, bounds = np.random.default_rng(seed), Bounds()
    decided = np.zeros(PROMOTIONS)
    strata: list[tuple[Sums, Sums]] = []
    for part in range(2):
        now, drift = share * (1 + part), 0.1 * part
        n_c, n_s = np.zeros(PROMOTIONS), np.zeros(PROMOTIONS)
        won_c, won_s = np.zeros(PROMOTIONS), np.zeros(PROMOTIONS)
        for _ in range(looks // 2):
            new = rng.binomial(LOOK, now, PROMOTIONS)
            n_c, n_s = n_c + new, n_s + LOOK - new
            won_c = won_c + rng.binomial(new, rate + drift + difference)
            won_s = won_s + rng.binomial(LOOK - new, rate + drift)
            arms = [*strata, (Sums(n_c, won_c, won_c), Sums(n_s, won_s, won_s))]
            ratio, _, _ = log_ratio(arms, bounds)
            fewest = np.minimum(sum(arm[0].n for arm in arms), sum(arm[1].n for arm in arms))
            decided = np.where(decided == 0, decide(ratio, fewest, bounds), decided)
        strata = [arms[-1]]
    return decided


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("share", [0.05, 0.25])
def test_worse_is_promoted_in_one_percent_at_most_and_better_in_ninety_at_least(rate: float, share: float) -> None:
    looks = round(6 * Bounds().needed(share) / LOOK)
    worse = simulate(rate, -0.02, share, looks, seed=1)
    better = simulate(rate, 0.03, share, looks, seed=2)
    print(
        f"rate {rate:.0%}, share {share:.0%}: {np.mean(worse == 1):.2%} of worse, {np.mean(better == 1):.1%} of better"
    )
    assert np.mean(worse == 1) <= 0.01
    assert np.mean(better == 1) >= 0.9
    assert np.mean(worse == 0) <= 0.01, "nearly all are decided"


def test_the_number_that_is_printed_is_what_is_needed_on_average() -> None:
    rng, share, bounds, look = np.random.default_rng(3), 0.25, Bounds(), 100
    blocks = rng.binomial(look, share, (PROMOTIONS, 300))
    won_c, won_s = rng.binomial(blocks, 0.53), rng.binomial(look - blocks, 0.5)
    n_c, n_s, won_c, won_s = (np.cumsum(one, axis=1) for one in (blocks, look - blocks, won_c, won_s))
    ratio, _, _ = log_ratio([(Sums(n_c, won_c, won_c), Sums(n_s, won_s, won_s))], bounds)
    decided = decide(ratio, np.minimum(n_c, n_s), bounds) != 0
    assert decided.any(axis=1).all()
    mean = look * float(np.mean(1 + np.argmax(decided, axis=1)))
    assert bounds.needed(share) == pytest.approx(mean, rel=0.2)


def test_the_interval_holds_at_all_looks_at_once() -> None:
    rng, bounds = np.random.default_rng(4), Bounds()
    won_c, won_s = (np.cumsum(rng.binomial(250, 0.5, (PROMOTIONS, 60)), axis=1) for _ in range(2))
    n = np.broadcast_to(250.0 * np.arange(1, 61), won_c.shape)
    _, difference, information = log_ratio([(Sums(n, won_c, won_c), Sums(n, won_s, won_s))], bounds)
    half = np.vectorize(lambda one: half_width(one, bounds))(information[0])
    assert np.mean(np.any(np.abs(difference) > half, axis=1)) <= 0.05


def test_few_outcomes_decide_nothing_and_strange_bounds_are_refused() -> None:
    assert weigh([([1.0] * 99, [0.0] * 5000)], Bounds()).decision == "wait"
    assert weigh([], Bounds()).decision == "wait"
    with pytest.raises(ConfigError, match="power is 1"):
        Bounds(power=1.0)


def fill(path: Path, good: float, *, candidate: int, stable: int, source: str = "user", most: float = 1.0) -> None:
    """Give conversations to both policies of the canary, and rewards to most of them."""
    with closing(open_store(str(path))) as store:
        number = read_histories(store)["writer"][-1].number
        for policy, size, rate in (("new", candidate, good), ("old", stable, 0.5)):
            ids = [f"conversation:{policy}{place}" for place in range(size)]
            store.add_assignments([Assignment(agent="writer", attempt_id=i, policy=policy, number=number) for i in ids])
            values = [most if place < rate * size else 0.0 for place in range(size)]
            store.add_rewards(
                [
                    Reward(rollout_id=i, attempt_id=i, value=value, source=source, reward_id=i)
                    for i, value in zip(ids, values, strict=True)
                ]
            )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with a canary."""
    path = tmp_path / "lightning.db"
    open_store(str(path)).close()
    for words in ("candidate --model new --stable old", "canary --share 25% --outcome user"):
        result = call("deploy", *words.split(), "--agent", "writer", "--store", path)
        assert result.exit_code == 0, result.output
    return path


def gate(path: Path) -> dict:
    found = json.loads(call("deploy", "status", "--store", path, "--json").stdout)
    return found["agents"]["writer"]["gate"]


def test_the_status_says_that_a_candidate_has_no_outcome_although_its_share_has_some(path: Path) -> None:
    fill(path, 0.5, candidate=0, stable=100)
    status = call("deploy", "status", "--store", path).stdout
    assert "no outcome yet, although about 25 were expected" in " ".join(status.split())


def test_promote_waits_for_the_gate_or_for_a_person_who_says_why(path: Path) -> None:
    def promote(*more: str):
        return call("deploy", "promote", "--agent", "writer", "--store", path, *more)

    told(promote(), "0 outcomes of new", "--override")
    told(promote("--override"), "--reason")
    fill(path, 0.9, candidate=400, stable=1200)
    assert gate(path) | {"low": 0, "high": 0} == {
        "n": 1600, "candidate": 400, "stable": 1200, "difference": pytest.approx(0.4), "low": 0, "high": 0,
        "decision": "promote", "needed": Bounds().needed(0.25),
    }  # fmt: skip
    assert promote().exit_code == 0
    with closing(open_store(str(path))) as store:
        assert read_histories(store)["writer"][-1].details["evidence"]["decision"] == "promote"


def test_a_candidate_that_is_worse_is_not_promoted_by_itself(path: Path) -> None:
    fill(path, 0.3, candidate=400, stable=1200)
    assert gate(path)["decision"] == "reject"
    told(call("deploy", "promote", "--agent", "writer", "--store", path), "reject", "rollback")
    made = call(
        "deploy", "promote", "--agent", "writer", "--store", path, "--override", "--reason", "outcomes were wrong"
    )
    assert made.exit_code == 0
    with closing(open_store(str(path))) as store:
        assert read_histories(store)["writer"][-1].details["override"] is True


def test_check_rolls_back_what_the_gate_rejects_and_nothing_else(path: Path) -> None:
    def check() -> str:
        found = call("deploy", "check", "--store", path, "--json")
        assert found.exit_code == 0, found.output
        return json.loads(found.stdout)["agents"]["writer"]["stage"]

    assert check() == "canary"
    fill(path, 0.3, candidate=400, stable=1200)
    assert check() == check() == "rolled_back"
    with closing(open_store(str(path))) as store:
        newest = read_histories(store)["writer"][-1]
    assert (newest.number, newest.actor, newest.stable) == (3, "gate", "old")
    assert newest.reason.startswith("the gate rejects it: -0.200 [-0.")
    assert newest.details["evidence"]["candidate"] == 400


def test_at_a_share_of_all_there_is_nothing_to_compare_with(path: Path) -> None:
    assert call("deploy", "canary", "--share", "100%", "--agent", "writer", "--store", path).exit_code == 0
    assert gate(path)["needed"] is None
    told(call("deploy", "promote", "--agent", "writer", "--store", path), "nothing to compare with")


def test_outcomes_of_different_periods_are_not_compared(path: Path) -> None:
    fill(path, 0.5, candidate=0, stable=150)
    assert call("deploy", "canary", "--share", "100%", "--agent", "writer", "--store", path).exit_code == 0
    fill(path, 0.5, candidate=150, stable=0)
    assert (gate(path)["n"], gate(path)["difference"], gate(path)["decision"]) == (300, None, "wait")


@pytest.mark.parametrize("option", ["--guard failed=2%", "--outcome other", "--worse 0.02", "--wait-days 1"])
def test_a_running_canary_takes_another_share_and_refuses_another_gate(path: Path, option: str) -> None:
    again = ("deploy", "canary", "--share", "50%", "--agent", "writer", "--store", path)
    told(call(*again, *option.split()), "fixed since the candidate's canary began. Only the share can change")
    assert call(*again).exit_code == 0
    with closing(open_store(str(path))) as store:
        history = read_histories(store)["writer"]
    assert [one.share for one in history] == [0.0, 0.25, 0.5]
    assert rules_of(history) == GateRules(bounds=Bounds(), sources=("user",))


def test_only_the_rewards_that_were_named_count_and_they_must_fit(path: Path) -> None:
    fill(path, 0.9, candidate=400, stable=1200, source="latency", most=7.0)
    assert gate(path)["n"] == 0
    with closing(open_store(str(path))) as store:
        store.add_rewards([Reward(rollout_id="r", attempt_id="conversation:new0", value=7.0, source="user")])
        history = read_histories(store)["writer"]
        with pytest.raises(ConfigError, match="not between 0 and 1"):
            read_evidence(store, history)


def test_a_reward_that_does_not_fit_hides_no_other_agent_and_no_transition(path: Path) -> None:
    fill(path, 0.9, candidate=1, stable=1, most=7.0)
    for words in ("candidate --agent reader --model new --stable old", "canary --agent writer --share 50%"):
        assert call("deploy", *words.split(), "--store", path).exit_code == 0
    status = call("deploy", "status", "--store", path, "--json")
    assert status.exit_code == 0, status.output
    agents = json.loads(status.stdout)["agents"]
    assert (agents["reader"]["problem"], agents["writer"]["share"]) == (None, 0.5)
    assert "reward 7 of user for conversation:new0 is not between 0 and 1" in agents["writer"]["problem"]
    shown = " ".join(call("deploy", "status", "--agent", "writer", "--store", path).stdout.split())
    assert "writer, candidate: the reward 7 of user" in shown
    assert "Roll the candidate back, name it again" in shown
