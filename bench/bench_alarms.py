"""How often alarms are raised in healthy simulated runs, and in runs with the fault that each one is for.

A simulated run writes the lines of ``metrics.jsonl`` that a run of two agents would write: rewards of tasks of
different difficulty, held-out rewards of the same tasks each time, and numbers that vary from step to step as much as
in small real runs. A healthy run learns from a reward of 0.02 to 0.4 up to one of 0.5 to 0.9, slowly or fast, soon or
late, with steps of 4 to 16 groups; a quarter of them hardly learn anything. A run with a fault is the same until a
third of it has passed.

The bounds of the alarms were chosen on seeds below 1,000. The figures are from others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from figures import Figure, choose_size

from lightning_trainer import registry
from lightning_trainer.report.history import History
from lightning_trainer.report.teams.cliffs import from_best
from lightning_trainer.rl.scores import BY_TASK

FRESH = 1000  # the first seed of what is reported
RUNS = choose_size(200, 2)
Line = dict[str, Any]
Change = Callable[["SimulatedRun", float], None]  # what a fault does at a time after its beginning, from 0 to 1


class SimulatedRun:
    """One run, step by step.

    Attributes:
        values: what the next line is sampled from: rates and levels by name; faults change them.
        lines: of the log so far.
    """

    def __init__(self, seed: int, fault: str | None = None) -> None:
        self.numbers = numbers = np.random.default_rng(seed)
        self.fault = fault
        self.steps = int(numbers.choice([16, 30, 60, 100]))
        self.groups, self.size = int(numbers.choice([4, 8, 16])), int(numbers.choice([4, 8]))
        self.first, self.last = numbers.uniform(0.02, 0.4), numbers.uniform(0.5, 0.9)
        if numbers.random() < 0.25:  # learns next to nothing, and nothing is wrong with it
            self.first = numbers.uniform(0.05, 0.7)
            self.last = self.first + numbers.uniform(0.0, 0.1)
        self.middle, self.width = numbers.uniform(0.1, 0.6), numbers.uniform(0.05, 0.25)
        self.spread = numbers.uniform(0.5, 2.0)  # of the tasks' difficulty, in logits
        self.val_every = int(numbers.choice([2, 5]))
        self.difficulty = numbers.normal(0, self.spread, int(numbers.choice([24, 32, 64])))
        self.shared = numbers.random() < 0.5
        self.begins = self.steps // 3
        self.lines: list[Line] = []
        self.values: dict[str, float] = {
            "entropy": numbers.uniform(0.4, 1.2), "entropy_left": numbers.uniform(0.1, 0.6),
            "length": numbers.uniform(15, 200), "length_left": numbers.uniform(0.5, 1.6),
            "truncated": numbers.choice([0.0, 0.05, 0.3]), "left_out": numbers.choice([0.0, 0.01, 0.03]),
            "failed": numbers.choice([0.0, 0.02, 0.1]), "gap": numbers.uniform(0.003, 0.04),
            "tool_errors": numbers.uniform(0.02, 0.4), "tools": numbers.choice([0.1, 0.5, 2.0]),
            "unread": numbers.choice([0.0, 0.002, 0.005]), "malformed": numbers.choice([0.0, 0.05, 0.2]),
            "rule_fails": 0.0, "rule": 0.1, "agreement": numbers.uniform(0.65, 0.85),
            "share": numbers.uniform(0.3, 0.75), "kl": numbers.uniform(0.0, 0.6), "kl_more": 1.0,
            "yes": numbers.uniform(0.4, 0.7), "copies": numbers.uniform(0.01, 0.2), "reward": 0.0, "overfits": 0.0,
            "new": numbers.uniform(0.0, 0.15),
        }  # fmt: skip

    def skill(self, t: float) -> float:
        """Return how far the run has learned at a time from 0 to 1."""
        low, high, now = (1 / (1 + math.exp((self.middle - x) / self.width)) for x in (0.0, 1.0, t))
        return (now - low) / (high - low)

    def play(self) -> list[Line]:
        """Return all lines of the run."""
        for step in range(self.steps + 1):
            t = step / self.steps
            if self.fault is not None and step > self.begins:
                FAULTS[self.fault](self, (step - self.begins) / (self.steps - self.begins))
            if step % self.val_every == 0:
                self.lines.append(self.validate(step, t))
            if step < self.steps:
                self.lines.append(self.train(step, t))
        return self.lines

    def chances(self, t: float, difficulty: np.ndarray) -> np.ndarray:
        """Return the chance of success for tasks of these difficulties."""
        mean = min(max(self.first + (self.last - self.first) * self.skill(t) + self.values["reward"], 0.004), 0.996)
        return 1 / (1 + np.exp(difficulty - math.log(mean / (1 - mean))))

    def validate(self, step: int, t: float) -> Line:
        numbers, chances = self.numbers, self.chances(t, self.difficulty)
        chances = np.clip(chances - self.values["overfits"], 0.0, 1.0)
        by_task = numbers.binomial(2, chances) / 2
        reward = float(by_task.mean())
        error = 1.96 * float(by_task.std(ddof=1)) / math.sqrt(len(by_task))
        line: Line = {"kind": "val", "step": step, "reward": reward, "reward_high": reward + error}
        line |= {"rollouts": 2.0 * len(by_task), "tasks": float(len(by_task)), "reward_all": reward}
        line[BY_TASK] = {"": {str(n): float(value) for n, value in enumerate(by_task)}}
        earlier = [each for each in self.lines if each["kind"] == "val"]
        new = numbers.binomial(len(by_task), min(self.values["new"] * 2, 1.0), 2) / len(by_task)
        if earlier:
            line |= {"new_prompts/writer": 0.0, "new_prompts/checker": float(new[0])}
            line |= from_best([*earlier, line])
        return line | self.answers(t, len(by_task) * 2)

    def answers(self, t: float, count: int) -> Line:
        """Return the shares of equal answers: the checker says yes or no, and says yes more often to better queries."""
        yes = min(max(self.values["yes"] + 0.25 * self.skill(t), 0.0), 1.0)
        yes, copies = self.numbers.binomial(count, [yes, min(self.values["copies"], 1.0)]) / count
        return {"answers_alike/checker": float(max(yes, 1 - yes)), "answers_alike/writer": float(copies)}

    def share(self, count: float, chance: float) -> float:
        count = max(int(count), 1)
        return float(self.numbers.binomial(count, min(max(chance, 0.0), 1.0)) / count)

    def around(self, level: float, by: float = 0.2) -> float:
        return float(level * self.numbers.lognormal(0.0, by))

    def train(self, step: int, t: float) -> Line:
        v, numbers, rollouts, skill = self.values, self.numbers, self.groups * self.size, self.skill(t)
        chances = self.chances(t, numbers.normal(0, self.spread, self.groups))
        rewards = numbers.random((self.groups, self.size)) < chances[:, None]
        counted = numbers.random((self.groups, self.size)) >= v["left_out"]
        reward = float(rewards[counted].mean()) if counted.any() else 0.0
        dead = float(np.mean((rewards == rewards[:, :1]).all(axis=1)))
        calls = 2.0 * rollouts
        line: Line = {"kind": "train", "step": step, "reward": reward, "reward_all": float((rewards & counted).mean())}
        line |= {"rollouts": float(rollouts), "groups": float(self.groups), "groups_without_signal": dead}
        line |= {"failed": float(numbers.binomial(rollouts, min(v["failed"], 1.0))), "calls_seen": calls}
        tools = max(1.0, round(v["tools"] * rollouts))
        line |= {
            "tool_calls/search": tools,
            "tool_error_rate/search": self.share(tools, v["tool_errors"] * (1 - 0.7 * skill)),
        }
        line |= {"calls_unread/mistral": self.share(calls, v["unread"])}
        line |= {"calls_malformed": self.share(calls, v["malformed"] * (1 - 0.8 * skill))}
        line |= {"rule_failures/brief": 1.0} if v["rule_fails"] > 0 else {}
        line |= {"reward_source/run": reward, "reward_source/brief": self.around(v["rule"] * (1 + skill))}
        pairs = max(1, int(self.groups * self.size * (self.size - 1) / 2 * (1 - dead)))
        line |= {"judge_agreement": self.share(min(pairs, 20 * self.groups), v["agreement"])}
        line |= self.of_policies(t) | self.answers(t, rollouts)
        return line

    def of_policies(self, t: float) -> Line:
        v, skill = self.values, self.skill(t)
        policies = ["team"] if self.shared else ["writer", "checker"]
        line: Line = {"policy_of": dict(zip(("writer", "checker"), policies * 2, strict=False))}
        entropy = v["entropy"] * (1 - (1 - v["entropy_left"]) * skill)
        odds = v["share"] / (1 - v["share"]) * self.around(1.0, 0.8)
        share = odds / (1 + odds)
        line |= {"gradient_share/writer": share, "gradient_share/checker": 1 - share, "token_share/writer": v["share"]}
        line |= {"token_share/checker": 1 - v["share"]}
        for policy in policies:
            line[f"entropy/{policy}"] = self.around(entropy, 0.25)
            line[f"response_tokens/{policy}"] = self.around(v["length"] * (1 + (v["length_left"] - 1) * skill), 0.1)
            line[f"truncated/{policy}"] = self.share(2 * self.groups * self.size, v["truncated"] * (1 - 0.5 * skill))
            line[f"engine_gap/{policy}"] = self.around(v["gap"] * (0.3 + 0.7 * entropy), 0.3)
            line[f"kl_base/{policy}"] = self.around(v["kl"] * t * v["kl_more"], 0.2)
        return line


def level(name: str, to: float) -> Change:
    """Return a fault that moves a value to another one within the first third of its time."""

    def change(run: SimulatedRun, t: float) -> None:
        first = run.values.setdefault(f"first {name}", run.values[name])
        run.values[name] = first + (to - first) * min(1.0, 3 * t)

    return change


def both(*changes: Change) -> Change:
    def change(run: SimulatedRun, t: float) -> None:
        for each in changes:
            each(run, t)

    return change


def forget(run: SimulatedRun, t: float) -> None:
    """Take the reward back to that of the first step."""
    began = run.begins / run.steps
    gained = (run.last - run.first) * run.skill(began + t * (1 - began))
    run.values["reward"] = -gained * min(1.0, 3 * t)


def fall(run: SimulatedRun, t: float) -> None:
    """Let the reward fall to a tenth."""
    run.values["reward"] = -0.9 * min(1.0, 3 * t)


def departs(run: SimulatedRun, t: float) -> None:
    """Let the divergence double every three steps, and the reward fall back."""
    forget(run, t)
    run.values["kl"] = max(run.values["kl"], 0.1)
    run.values["kl_more"] = 2.0 ** min(t * (run.steps - run.begins) / 3, 8.0)


FAULTS: Final[Mapping[str, Change]] = {
    "entropy_collapsed": both(level("entropy", 0.01), forget),
    "length_collapsed": both(level("length", 1500.0), forget),
    "answers_cut": level("truncated", 1.5),
    "rollouts_left_out": level("left_out", 0.5),
    "groups_dead": level("reward", -1.0),
    "held_out_falls": level("overfits", 0.5),
    "answers_alike": level("copies", 1.0),
    "engine_gap_widens": level("gap", 1.5),
    "tools_fail": level("tool_errors", 3.0),
    "calls_unread": level("unread", 0.2),
    "calls_malformed": level("malformed", 1.5),
    "rollouts_fail": level("failed", 0.5),
    "rules_fail": level("rule_fails", 1.0),
    "rule_departs": both(level("rule", 0.6), fall),
    "judges_part": level("agreement", 0.45),
    "agent_captures": both(level("share", 0.97), lambda run, _: setattr(run, "shared", True)),
    "cliff": fall,
    "inputs_drift": both(level("new", 0.5), fall),
    "policy_departs": departs,
}


def first_alarms(run: SimulatedRun, names: Sequence[str]) -> dict[str, int]:
    """Return in which step each of these alarms was raised first, where a run shows them after each line."""
    history, found = History(), dict[str, int]()
    checks = {name: check for name, check in registry.registrations("alarm").items() if name in names}
    for line in run.play():
        history.append(line)
        for name, check in checks.items():
            if name not in found and any(True for _ in check(history)):
                found[name] = int(line["step"])
    return found


def rates(names: Sequence[str], seeds: Sequence[int]) -> dict[str, tuple[float, float, float]]:
    """Return for each alarm: the share of healthy and of faulty runs that raise it, and the steps until then."""
    healthy = [first_alarms(SimulatedRun(seed), names) for seed in seeds]
    found = {}
    for name in names:
        runs = [SimulatedRun(seed, name) for seed in seeds]
        after = [(first_alarms(run, [name]).get(name), run.begins) for run in runs]
        late = [step - begins for step, begins in after if step is not None and step >= begins]
        false = sum(name in alarms for alarms in healthy) / len(seeds)
        found[name] = (false, len(late) / len(seeds), float(np.median(late)) if late else math.inf)
    return found


def measure() -> list[Figure]:
    figures = []
    for name, (false, true, late) in rates(list(FAULTS), range(FRESH, FRESH + RUNS)).items():
        note = f"{RUNS} healthy runs and {RUNS} with the fault; half of those raised it within {late:.0f} steps"
        figures += [
            Figure(what=f"{name}: raised in healthy runs", value=100 * false, unit="%", goal=5.0, note=note),
            Figure(what=f"{name}: raised in runs with its fault", value=100 * true, unit="%", note=note),
        ]
    return figures
