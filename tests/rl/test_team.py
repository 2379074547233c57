"""The simulated team: contributions that are known, and assigners that are told apart by them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import team as simulated

from lightning_trainer.rl.credit.assigners import credit_by_name

OTHER = simulated.Team(shares={"a": 1.0, "b": 4.0, "idle": 0.0, "c": 2.0}, states=2, rounds=(1, 3), noise=0.05)


@pytest.mark.parametrize("told", ["team", "agents", "both", "steps"])
def test_rewards_sum_to_what_was_contributed(told):
    policy = simulated.Policy(simulated.Team(noise=0.0))
    calls, transitions, rewards = simulated.roll(policy, told, "x", np.random.default_rng(0))
    shares = policy.team.shares
    rounds = len(calls) // len(shares)
    did = sum(shares[call.agent] * call.good for call in calls) / (rounds * sum(shares.values()))
    assert sum(reward.value for reward in rewards) == pytest.approx(did * (2 if told == "both" else 1))
    assert len(transitions) == len(calls)


def test_rank_correlation_is_spearmans():
    values = np.array([1.0, 2.0, 2.0, 5.0])
    assert simulated.rank_correlation(values, values**3) == pytest.approx(1.0)
    assert simulated.rank_correlation(values, -values) == pytest.approx(-1.0)
    assert simulated.rank_correlation(values, np.zeros(4)) == 0.0


@pytest.mark.parametrize("group", [simulated.Team(), OTHER])
def test_the_more_is_told_the_better_credit_agrees_with_contributions(group):
    def correlation(told, name):
        return simulated.agreement(group, told, credit_by_name(name), range(4))[0]

    assert correlation("team", "identical") > 0.05
    assert correlation("agents", "per-agent") > correlation("team", "per-agent")
    assert correlation("steps", "identical") > correlation("agents", "identical")
    assert correlation("both", "per-agent") > correlation("both", "identical")


@pytest.mark.parametrize("group", [simulated.Team(), OTHER])
def test_a_free_rider_gets_less_from_its_own_reward_than_from_the_teams(group):
    def share(name):
        return simulated.agreement(group, "both", credit_by_name(name), range(4))[1]

    assert share("per-agent") < 0.7 * share("identical")


def test_a_team_learns_and_sooner_from_what_its_agents_did():
    needed = {
        told: simulated.rollouts_to_goal(OTHER, told, credit_by_name("per-agent"), 0) for told in ("team", "agents")
    }
    assert needed["agents"] < needed["team"] < np.inf
