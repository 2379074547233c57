"""Populations of past weights, in a game whose only equilibrium is known: rock, paper, scissors.

`python tests/rl/test_opponents.py` prints the table of docs/how-to/teams.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_trainer.kits.schedules.opponents import OPPONENTS, OpponentsCallback
from lightning_trainer.kits.schedules.population import FrozenVersion, Population, choose_opponent
from lightning_trainer.run.state import State, find, read_state, save

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


class Learner:
    """Has one policy, `white`, whose weights are the number of its updates."""

    def __init__(self, version: int) -> None:
        self.engines = [SimpleNamespace(model="white", version=version)]

    def save_policy(self, policy: str, folder: Path) -> None:
        (folder / "weights").write_text(str(self.engines[0].version))

    def restore_policy(self, policy: str, folder: Path) -> None: ...

    def slow_policy(self, policy: str, factor: float) -> None: ...

    def load_copy(self, copy: str, policy: str, folder: Path, version: int) -> None:
        assert (folder / "weights").read_text() == str(version)


@dataclass(frozen=True)
class Routing:
    opponents: dict[str, Any]


def opened(run: Path, state: State) -> OpponentsCallback:
    """Keep one frozen version of `white`, and freeze its weights before each step."""
    config = SimpleNamespace(
        policies={"white": "lora", "black": "lora"}, opponents={"white": 1}, opponents_every=1, schedule=None, seed=0
    )
    session = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(routing=Routing({}))))
    context: Any = SimpleNamespace(
        run=SimpleNamespace(config=config, folder=run), learner=Learner(state.step), session=session, kept=state.kept
    )
    return OpponentsCallback(context)


def frozen_steps(callback: OpponentsCallback) -> list[int]:
    return [step for step, _ in callback.kept[OPPONENTS]["white"]["versions"]]


def test_a_run_stopped_in_a_step_that_replaced_frozen_weights_can_be_resumed(tmp_path: Path) -> None:
    def checkpoint(callback: OpponentsCallback, state: State) -> State:
        save(tmp_path, state, lambda folder: callback.after_save(folder, state.step), keep=1)
        return read_state(find(tmp_path)[1])

    state = State(step=0, identity={})
    callback = opened(tmp_path, state)
    callback.before_step(0)
    while frozen_steps(callback) == [0]:  # until a step begins with another frozen version
        state = replace(state, step=state.step + 1, kept=dict(callback.kept))
        callback = opened(tmp_path, state)
        callback.before_step(state.step)
    resumed = opened(tmp_path, checkpoint(callback, state))
    resumed.before_step(state.step)
    assert frozen_steps(resumed) == [state.step]
    for step in (state.step + 1, state.step + 2):
        checkpoint(resumed, replace(state, step=step, kept=dict(resumed.kept)))
        resumed.before_step(step)
    assert not (tmp_path / OPPONENTS / "white" / "step-000000").exists(), "no checkpoint needs it any more"


if __name__ == "__main__":
    for coefficient in (ENTROPY, 0.05):
        for size in (0, 10, 20):
            gaps = [f"{exploitability(size, seed=seed, entropy=coefficient):.2f}" for seed in range(4)]
            print(f"entropy {coefficient}, population {size}:", *gaps)
