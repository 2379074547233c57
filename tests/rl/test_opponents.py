"""Populations of past weights, in a game whose only equilibrium is known: rock, paper, scissors.

`python tests/rl/test_opponents.py` prints the table of docs/how-to/teams.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lightning_trainer.kits.schedules.population import FrozenVersion, Population, choose_opponent

BEATS = np.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])  # payoff of the row against the column
TURN, GROUPS, ENTROPY = 20, 8, 0.2


def exploitability(size: int, *, seed: int, turns: int = 120, entropy: float = ENTROPY) -> float:
    """Let two players take turns of policy gradients; return what a best response earns from them, at the end of turns.

    Args:
        size: of each player's population; 0: each meets the newest weights of the other.
        seed: of the first weights, and of who meets what.
        turns: of both players; the second half is measured.
        entropy: coefficient of the entropy bonus.
    """
    numbers = np.random.default_rng(seed)
    logits = {name: numbers.normal(size=3) for name in ("black", "white")}
    populations = {name: Population(name, size, seed, {}) for name in logits}
    weights: dict[FrozenVersion | None, Any] = {}
    gaps = []
    for turn in range(turns):
        for name, population in populations.items():
            if size and (member := population.add(turn, turn)) is not None:
                weights[member] = logits[name].copy()
        own, other = sorted(logits) if turn % 2 else sorted(logits, reverse=True)
        past = {other: populations[other].members} if size else {}
        for step in range(TURN):
            met = [choose_opponent(past, f"{seed}/{turn}/{step}/{group}") for group in range(GROUPS)]
            faced = [softmax(logits[other] if it is None or it.frozen is None else weights[it.frozen]) for it in met]
            policy = softmax(logits[own])
            values = BEATS @ np.mean(faced, axis=0) - entropy * np.log(policy)
            logits[own] = logits[own] + policy * (values - policy @ values)
        gaps.append(np.mean([(BEATS @ softmax(each)).max() for each in logits.values()]))
    return float(np.mean(gaps[turns // 2 :]))


def softmax(logits: Any) -> Any:
    exps = np.exp(logits - logits.max())
    return exps / exps.sum()


def test_players_go_round_in_cycles_against_the_newest_weights_and_not_against_a_population() -> None:
    newest, population = ([exploitability(size, seed=seed) for seed in range(4)] for size in (0, 10))
    assert min(newest) > 0.8
    assert max(population) < 0.5


def test_a_population_is_a_uniform_sample_of_all_frozen_weights() -> None:
    kept = np.zeros(40)
    for seed in range(500):
        population = Population("white", 4, seed, {})
        for step in range(40):
            population.add(step, step)
        assert len({member.copy for member in population.members}) == 4
        kept[[member.step for member in population.members]] += 1
    assert kept.sum() == 2000
    assert kept.reshape(4, 10).sum(axis=1) == pytest.approx([500] * 4, abs=90)  # four deviations


def test_each_opponent_is_equally_likely_and_the_same_for_the_same_name() -> None:
    population = Population("white", 3, 0, {})
    for step in range(3):
        population.add(step, step + 1)
    past = {"white": population.past(3), "black": []}
    found = [choose_opponent(past, f"0/1/{group}") for group in range(3000)]
    counts = {name: sum(it is not None and it.name == name for it in found) for name in
              ("white@newest", "white@1", "white@2", "black@newest")}  # fmt: skip
    assert list(counts.values()) == pytest.approx([500, 500, 500, 1500], abs=120)
    assert found == [choose_opponent(past, f"0/1/{group}") for group in range(3000)]
    assert choose_opponent({}, "") is None


if __name__ == "__main__":
    for coefficient in (ENTROPY, 0.05):
        for size in (0, 10, 20):
            gaps = [f"{exploitability(size, seed=seed, entropy=coefficient):.2f}" for seed in range(4)]
            print(f"entropy {coefficient}, population {size}:", *gaps)
