"""Turns of policies and baselines of agents, by exact arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_spans.errors import ConfigError
from lightning_spans.schema.transitions import Tokens, Transition
from lightning_trainer.kits.schedules.alternate import FROZEN, AlternateCallback, without_rows
from lightning_trainer.kits.schedules.role_baselines import RAE, RoleBaselines
from lightning_trainer.rl.account import Account
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.batch.calls import CountedCall
from lightning_trainer.rl.rows import make_rows
from lightning_trainer.rl.scores import BY_TASK
from lightning_trainer.run.cliffs import BEST_WEIGHTS, CliffGuard
from lightning_trainer.run.state import State
from lightning_trainer.run.turns import turn_of, turn_steps
from support.rl.world import options_of


def batch_of_calls(*calls: tuple[str, str, float]) -> Batch:
    """A batch of one call for each (agent, attempt, credit), which is its policy's too."""
    made = [
        Transition(
            rollout_id=attempt, attempt_id=attempt, agent=agent, policy=agent, turn=turn, span_id=f"{turn}",
            tokens=Tokens((1, turn + 2), (5,), (-1.0,)),
        )
        for turn, (agent, attempt, _) in enumerate(calls)
    ]  # fmt: skip
    credit = np.array([value for *_, value in calls])
    rows, account = make_rows(made, credit, {call.rollout_id: "g" for call in made})
    judged = tuple(CountedCall(call, "g", float(own), float(own)) for call, own in zip(made, credit, strict=True))
    return Batch(rows, Account() + account, {}, calls=judged)


def advantages(batch: Batch) -> dict[tuple[str, str], float]:
    return {(row.agent, row.attempt_id): float(row.advantages[row.mask][0]) for row in batch.rows}


def test_an_agents_baseline_is_the_running_mean_of_its_own_rewards() -> None:
    baselines = RoleBaselines()
    baselines.before_batch(SimpleNamespace(kept={}))
    step = batch_of_calls(("white", "a", 1.0), ("black", "a", -1.0), ("white", "b", 0.0))
    learned, metrics = baselines.after_batch(step, SimpleNamespace())
    white = 0.95 * 0.05
    assert advantages(learned) == pytest.approx({("white", "a"): 0.95, ("black", "a"): -0.95, ("white", "b"): -white})
    assert metrics == pytest.approx({"baseline/white": white, "baseline/black": -0.05})
    resumed = RoleBaselines()
    resumed.before_batch(SimpleNamespace(kept=baselines.kept))
    learned, _ = resumed.after_batch(batch_of_calls(("white", "c", 1.0)), SimpleNamespace())
    assert advantages(learned)["white", "c"] == pytest.approx(1.0 - (0.95 * white + 0.05))
    assert set(resumed.kept[RAE]) == {"white", "black"}


def test_policies_take_turns_of_k_steps() -> None:
    assert [turn_of(step, ["white", "black"], 2) for step in range(6)] == [
        "white", "white", "black", "black", "white", "white"
    ]  # fmt: skip
    assert turn_steps("alternate:5") == 5
    for wrong in ("alternate", "alternate:0", "alternate:x", "round:2"):
        with pytest.raises(ConfigError, match="write alternate:K"):
            turn_steps(wrong)


def test_a_policy_without_best_weights_keeps_its_newest_ones(tmp_path: Path) -> None:
    restored: list[str] = []
    notes: list[str] = []
    turns: list[Any] = []
    keeper = SimpleNamespace(
        save_policy=print, slow_policy=print, restore_policy=lambda policy, folder: restored.append(policy)
    )
    run = SimpleNamespace(
        config=options_of(policies="white=lora,black=lora", schedule="alternate:2"),
        folder=tmp_path,
        progress=SimpleNamespace(note=notes.append),
        log=SimpleNamespace(add_event=lambda kind, step, facts: turns.append(facts)),
    )
    callback = AlternateCallback(SimpleNamespace(run=run, learner=keeper))
    callback.before_step(2)
    assert (restored, turns) == ([], [{"policy": "black"}])
    assert notes[0].startswith("white keeps its newest weights: ")
    (tmp_path / BEST_WEIGHTS / "black").mkdir(parents=True)
    callback.before_step(4)
    assert (restored, turns[1:]) == (["black"], [{"policy": "white", "restored": "black"}])


class Strengths:
    """A learner of two policies. Their weights are one number each, to which a step of their turn adds 1."""

    def __init__(self) -> None:
        self.of = {"black": 0, "white": 0}
        self.engine = SimpleNamespace(model="base")

    def save_policy(self, policy: str, folder: Path) -> None:
        (folder / "weights").write_text(str(self.of[policy]))

    def restore_policy(self, policy: str, folder: Path) -> None:
        self.of[policy] = int((folder / "weights").read_text())

    def slow_policy(self, policy: str, factor: float) -> None: ...


def win(of: dict[str, int]) -> dict[str, float]:
    """A game in which the stronger one wins more often."""
    black = 1 / (1 + math.exp((of["white"] - of["black"]) / 5))
    return {"black": black, "white": 1 - black}


def share(of: dict[str, int]) -> dict[str, float]:
    """A team that is best with black at 3 and white at 0."""
    return {"": 1 - 0.002 * (of["black"] - 3) ** 2 - 0.002 * of["white"]}


@pytest.mark.parametrize(
    ("reward", "best"),
    [
        pytest.param(win, {"black": 20, "white": 20}, id="a game, in which each is rewarded most against a beginner"),
        pytest.param(share, {"black": 3, "white": 0}, id="a team"),
    ],
)
def test_a_turn_is_compared_with_validations_against_the_same_weights_of_the_others(
    tmp_path: Path, reward: Callable[[dict[str, int]], dict[str, float]], best: dict[str, int]
) -> None:
    learner: Any = Strengths()
    events: list[str] = []
    validations: list[dict[str, Any]] = []
    run: Any = SimpleNamespace(
        config=options_of(
            policies="black=lora,white=lora", schedule="alternate:5", val="val", val_every=1, rollback_on_cliff=True
        ),
        folder=tmp_path,
        val=[{}],
        log=SimpleNamespace(validations=lambda: validations, add_event=lambda kind, *_: events.append(kind)),
        progress=SimpleNamespace(note=print),
    )
    guard = CliffGuard(run, learner, State(step=0, identity={}))
    turns = AlternateCallback(SimpleNamespace(run=run, learner=learner))
    for step in range(41):
        by_task = {name: {str(task): value for task in range(9)} for name, value in reward(learner.of).items()}
        validations.append({"step": step, BY_TASK: by_task})
        guard.watch(State(step=step, identity={}))
        turns.before_step(step)
        if step < 40:
            learner.of[turn_of(step, ["black", "white"], 5)] += 1
    assert learner.of == best
    assert set(events) == {"turn"}


def test_calls_of_frozen_policies_are_in_the_account() -> None:
    batch = batch_of_calls(("white", "a", 1.0), ("black", "a", -1.0), ("black", "b", 0.0))
    account = without_rows(batch, [row for row in batch.rows if row.policy == "black"])
    assert (account.seen, account.trained, account.rows, dict(account.dropped)) == (3, 1, 1, {FROZEN: 2})
    assert (account.tokens, account.tokens_in_rows, account.tokens_in_calls) == (1, 3, 3)
    assert account.rows_without_gradient == 0
