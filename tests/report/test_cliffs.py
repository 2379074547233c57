"""Cliffs of simulated teams: what raises an alarm, what returns to its best weights, and how often noise does."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_trainer.report.alarms import active_alarms
from lightning_trainer.report.history import History
from lightning_trainer.report.log.lines import PROMPTS
from lightning_trainer.report.teams.cliffs import (
    best_step_of,
    fall_of,
    from_best,
    new_prompts,
    rewarded_names,
)
from lightning_trainer.report.teams.shares import policies_of
from lightning_trainer.rl.scores import BY_TASK
from lightning_trainer.run.cliffs import ROLLBACK, SLOWER, CliffGuard, replace_weights
from lightning_trainer.run.state import State
from support.kills import killed_after

TASKS = 40


def validation(step: int, **rewards: Sequence[float]) -> dict[str, Any]:
    """A line of held-out tasks; ``team`` is the reward that no agent has for itself."""
    by_task = {
        name.replace("team", ""): {f"{n}": value for n, value in enumerate(values)} for name, values in rewards.items()
    }
    return {"kind": "val", "step": step, BY_TASK: by_task}


def test_a_fall_is_below_the_best_and_the_second_best_validation() -> None:
    high, low = [1.0] * TASKS, [0.0] * 30 + [1.0] * 10
    lines = [validation(0, team=low), validation(5, team=high), validation(10, team=high), validation(15, team=low)]
    fall = fall_of(lines, "team", [""])
    assert fall is not None
    assert (fall.best_step, fall.best, fall.now, fall.difference.mean) == (5, 1.0, 0.25, -0.75)
    assert best_step_of(lines, [""]) == 5
    assert fall_of([lines[0], lines[1], lines[3]], "team", [""]) is None  # one lucky validation is no level
    assert from_best(lines)["from_best"] == -0.75
    assert from_best(lines)["from_best_high"] < 0


def test_a_policy_falls_by_the_rewards_of_its_own_agents() -> None:
    high, low = [1.0] * TASKS, [0.0] * TASKS
    lines = [validation(0, writer=high, checker=high), validation(5, writer=high, checker=low)]
    names = rewarded_names(lines, {"writer": "writer", "checker": "checker", "router": "router"})
    assert names == {"writer": ["writer"], "checker": ["checker"], "router": [""]}
    assert fall_of(lines, "writer", names["writer"]) is None
    assert fall_of(lines, "checker", names["checker"]) is not None


def test_noise_around_a_level_is_rarely_taken_for_a_fall() -> None:
    """In 5 of 150 runs with 20 comparisons each. With intervals that do not widen it would be in 49."""
    numbers, fallen = random.Random(0), 0
    for _ in range(150):
        difficulty = [numbers.random() for _ in range(TASKS)]
        lines = [validation(n, team=[float(numbers.random() < each) for each in difficulty]) for n in range(21)]
        fallen += any(fall_of(lines[:end], "team", [""]) is not None for end in range(2, 22))
    assert fallen <= 7


def test_new_prompts_are_those_that_the_validation_before_did_not_have() -> None:
    known = [{PROMPTS: {"writer": ["01", "02"], "checker": ["aa", "bb", "cc", "dd"]}}]
    assert new_prompts({"writer": ["01", "02"], "checker": ["aa", "ee"]}, known) == {
        "new_prompts/writer": 0.0,
        "new_prompts/checker": 0.5,
    }
    many = [f"{n:04x}" for n in range(600)]
    half = [{PROMPTS: {"writer": many[:512:2][:256]}}]
    assert new_prompts({"writer": many[:256]}, half)["new_prompts/writer"] == pytest.approx(0.5)


# A simulated team: a writer chooses one of several styles, and the checker must know how to read the style.

STYLES = 6
HELD_OUT = 200


class Softmax:
    """Preferences among actions that learn by policy gradient."""

    def __init__(self, actions: int) -> None:
        self.scores = [0.0] * actions

    def chances(self) -> list[float]:
        highest = max(self.scores)
        raw = [math.exp(score - highest) for score in self.scores]
        return [each / sum(raw) for each in raw]

    def learn(self, action: int, advantage: float, rate: float) -> None:
        for n, chance in enumerate(self.chances()):
            self.scores[n] += rate * advantage * ((n == action) - chance)


class Team:
    """A learner with two policies. The writer earns by writing in ever newer styles, which the checker can't read.

    Attributes:
        rates: learning rate of each policy.
    """

    def __init__(self, seed: int) -> None:
        self.numbers = random.Random(seed)
        self.policies: dict[str, Any] = {"writer": Softmax(STYLES), "checker": [Softmax(2) for _ in range(STYLES)]}
        self.policies["writer"].scores[0] = 4.0
        for each in self.policies["checker"][1:]:
            each.scores = [4.0, 0.0]  # sure of the wrong reading of a style that it has not met
        self.rates = {"writer": 1.0, "checker": 1.0}
        self.engine = SimpleNamespace(model="base")
        self.saved: dict[Path, Any] = {}

    def play(self) -> tuple[int, int]:
        style = self.numbers.choices(range(STYLES), self.policies["writer"].chances())[0]
        return style, self.numbers.choices(range(2), self.policies["checker"][style].chances())[0]

    def step(self, late: bool) -> None:
        """Learn from 32 rollouts; `late` in training, the writer is paid for the newest style."""
        for _ in range(32):
            style, reading = self.play()
            self.policies["checker"][style].learn(reading, reading - 0.5, 0.05 * self.rates["checker"])
            paid = float(style == STYLES - 1) if late else 0.0
            self.policies["writer"].learn(style, paid - 0.1 * late, 0.12 * self.rates["writer"])

    def validate(self, step: int) -> dict[str, Any]:
        styles = self.policies["writer"].chances()
        exact = sum(share * its.chances()[1] for share, its in zip(styles, self.policies["checker"], strict=True))
        played = [self.play() for _ in range(HELD_OUT)]
        right = [float(reading) for _, reading in played]
        prompts = sorted({f"{n:03x}{style}" for n, (style, _) in enumerate(played)})
        return {
            **validation(step, team=right),
            PROMPTS: {"checker": prompts},
            "reward": sum(right) / HELD_OUT,
            "exact": exact,
        }

    def save_policy(self, policy: str, folder: Path) -> None:
        self.saved[folder.parent / policy] = copy.deepcopy(self.policies[policy])

    def restore_policy(self, policy: str, folder: Path) -> None:
        self.policies[policy] = copy.deepcopy(self.saved[folder])

    def slow_policy(self, policy: str, factor: float) -> None:
        self.rates[policy] = factor


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def validations(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == "val"]

    def add_event(self, kind: str, step: int, facts: dict[str, Any]) -> None:
        self.lines.append({"kind": kind, "step": step, **facts})


def opened(folder: Path, *, rollback: bool) -> Any:
    config = SimpleNamespace(rollback_on_cliff=rollback, schedule=None, policies={"writer": "lora", "checker": "lora"})
    progress = SimpleNamespace(note=lambda text: None)
    return SimpleNamespace(config=config, val=[{}], log=Log(), folder=folder, progress=progress)


def train(team: Team, folder: Path, *, rollback: bool, late_from: int = 30) -> list[dict[str, Any]]:
    """Sixty steps with a validation before every third; from one of them on, the writer is paid for the last style."""
    run, state = opened(folder, rollback=rollback), State(step=0, identity={})
    guard = CliffGuard(run, team, state)  # type: ignore[arg-type]
    for step in range(61):
        state = State(step=step, identity={}, slowed=state.slowed)
        if step % 3 == 0:
            line, earlier = team.validate(step), run.log.validations()
            line |= new_prompts(line[PROMPTS], earlier) | from_best([*earlier, line])
            run.log.lines.append(line)
            state = guard.watch(state)
        team.step(late=step >= late_from)
        run.log.lines.append({"kind": "train", "step": step, "policy_of": {"writer": "writer", "checker": "checker"}})
    lines: list[dict[str, Any]] = run.log.lines
    return lines


def first_raised(lines: list[dict[str, Any]], name: str) -> int:
    """Return after how many steps an alarm was raised first."""
    ends = [n + 1 for n, line in enumerate(lines) if line["kind"] == "val"]
    raised = ({alarm.name for alarm in active_alarms(History(lines[:end]))} for end in ends)
    return next(lines[end - 1]["step"] for end, names in zip(ends, raised, strict=True) if name in names)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_team_returns_from_the_cliff_to_which_one_agent_leads_it(tmp_path: Path, seed: int) -> None:
    fallen, kept = (train(Team(seed), tmp_path / f"{rollback}", rollback=rollback) for rollback in (False, True))
    curves = [[line["exact"] for line in lines if line["kind"] == "val"] for lines in (fallen, kept)]
    assert curves[0][-1] < 0.3 * max(curves[0])
    assert curves[1][-1] >= 0.95 * max(curves[1])
    back = [line for line in kept if line["kind"] == ROLLBACK]
    assert {line["policy"] for line in back} == {"writer", "checker"}
    assert all(line["learning_rate_factor"] <= SLOWER for line in back)
    bottom = next(line["step"] for line in fallen if line["kind"] == "val" and line["step"] and line["exact"] < 0.3)
    assert max(first_raised(fallen, name) for name in ("cliff/writer", "inputs_drift/checker")) < bottom


@pytest.mark.parametrize(
    ("turns", "alarms"),
    [
        pytest.param([], {"cliff"}, id="no agent has a name"),
        pytest.param(["writer"], {"cliff/writer"}, id="one agent is trained"),
        pytest.param(["writer", "checker"], {"cliff/writer", "cliff/checker"}, id="one agent at a time"),
    ],
)
def test_a_fall_raises_an_alarm_also_if_no_step_trains_two_agents(turns: list[str], alarms: set[str]) -> None:
    rows = [SimpleNamespace(agent=name, policy=name) for name in turns or [""]]
    trained = [{"kind": "train", "step": n, **policies_of([row])} for n, row in enumerate(rows)]  # type: ignore[list-item]
    held_out = [validation(0, team=[1.0] * TASKS), validation(5, team=[0.0] * TASKS)]
    raised = active_alarms(History([held_out[0], *trained, held_out[1]]))
    found = [alarm for alarm in raised if alarm.name.startswith("cliff")]
    assert {alarm.name for alarm in found} == alarms
    whose = " of the team" if turns else ""
    assert all(f"reward{whose} has fallen from 1.00 after 0 steps to 0.00" in alarm.text for alarm in found)


def test_an_agent_that_only_hurts_returns_to_what_it_was_at_the_start(tmp_path: Path) -> None:
    team = Team(0)
    team.policies["checker"][0].scores = [0.0, 4.0]  # there is nothing left to learn
    began = list(team.policies["writer"].scores)
    lines = train(team, tmp_path, rollback=True, late_from=0)
    back = [line for line in lines if line["kind"] == ROLLBACK and line["policy"] == "writer"]
    assert back
    assert back[0]["to_step"] == 0
    exact = [line["exact"] for line in lines if line["kind"] == "val"]
    assert exact[-1] >= 0.95 * exact[0]
    assert team.policies["writer"].scores == pytest.approx(began, abs=0.5)


def test_a_policy_that_was_slowed_stays_slow_when_the_run_goes_on(tmp_path: Path) -> None:
    team, run = Team(0), opened(tmp_path, rollback=True)
    CliffGuard(run, team, State(step=9, identity={}, slowed={"writer": 0.1}))  # type: ignore[arg-type]
    assert team.rates == {"writer": 0.1, "checker": 1.0}


class NamedWeights:
    """A learner of one policy, whose weights are a text."""

    def __init__(self, weights: str) -> None:
        self.weights = weights
        self.engine = SimpleNamespace(model="m")

    def save_policy(self, policy: str, folder: Path) -> None:
        (folder / "weights").write_text(self.weights)

    def restore_policy(self, policy: str, folder: Path) -> None:
        self.weights = (folder / "weights").read_text()

    def slow_policy(self, policy: str, factor: float) -> None: ...


@pytest.mark.parametrize(
    ("rewards", "best"),
    [
        pytest.param([0.3, 0.4, 0.5, 0.6, 0.9], "first, 2", id="best at the checkpoint"),
        pytest.param([0.3, 0.6, 0.5, 0.4, 0.5], "first, 1", id="best before it"),
        pytest.param([0.3, 0.6, 0.5, 0.4, 0.9], None, id="best before it and replaced after it"),
    ],
)
def test_a_resumed_run_returns_to_no_weights_of_steps_that_it_takes_again(
    tmp_path: Path, rewards: list[float], best: str | None
) -> None:
    config = SimpleNamespace(rollback_on_cliff=True, policies={}, schedule=None)
    run: Any = SimpleNamespace(
        config=config, val=[{}], log=Log(), folder=tmp_path, progress=SimpleNamespace(note=lambda text: None)
    )

    def take(name: str, checkpoint: int, rewards: list[float]) -> str:
        learner: Any = NamedWeights(f"first, {checkpoint}")
        guard = CliffGuard(run, learner, State(step=checkpoint, identity={}))
        guard.resume(checkpoint)
        for step, reward in enumerate(rewards, len(run.log.lines)):
            learner.weights = f"{name}, {step}"
            run.log.lines.append(validation(step, team=[reward] * TASKS))
            guard.watch(State(step=step, identity={}))
        return str(learner.weights)

    take("first", 0, rewards)
    del run.log.lines[3:]
    fallen = take("second", 2, [0.1])
    weights = tmp_path / "best" / "m" / "weights"
    assert (weights.read_text() if weights.exists() else None) == best
    assert fallen == (best or "second, 3")


def test_a_run_that_is_killed_while_best_weights_are_replaced_returns_to_whole_ones(tmp_path: Path) -> None:
    config = SimpleNamespace(rollback_on_cliff=True, policies={}, schedule=None)
    for calls in count():
        folder = tmp_path / str(calls) / "best" / "m"
        replace_weights(NamedWeights("old"), "m", folder, 1)
        with killed_after(calls) as late:
            replace_weights(NamedWeights("new"), "m", folder, 2)
        run: Any = SimpleNamespace(config=config, val=[{}], log=Log(), folder=folder.parent.parent)
        resumed: Any = NamedWeights("resumed")
        CliffGuard(run, resumed, State(step=2, identity={})).resume(2)
        assert [path.name for path in folder.parent.iterdir()] == ["m"]
        resumed.restore_policy("m", folder)
        assert (resumed.weights, json.loads((folder / "step.json").read_text())["step"]) in {("old", 1), ("new", 2)}
        if not late:
            break
    assert calls > 3
