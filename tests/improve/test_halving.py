"""Successive halving and the decision: what is chosen, and how seldom the base is replaced by nothing better."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from lightning_trainer.config.train import TrainConfig
from lightning_trainer.intervals import estimate_difference
from lightning_trainer.kits.evaluation.config import EvalConfig
from lightning_trainer.kits.evaluation.folder import write_samples
from lightning_trainer.kits.evaluation.samples import Sample, Usage
from lightning_trainer.kits.improve import measuring, selection
from lightning_trainer.kits.improve.config import ImproveConfig
from lightning_trainer.kits.improve.decision import decide
from lightning_trainer.kits.improve.halving import (
    MethodResult,
    Rewards,
    Spending,
    States,
    halve,
    rung_count,
    share_of,
)
from lightning_trainer.kits.improve.improve import improve, plan_search
from lightning_trainer.kits.improve.plan import SearchPlan
from lightning_trainer.kits.improve.selection import StatesOfAgent, equivalent_comparisons
from lightning_trainer.kits.improve.tasks import TaskFiles
from lightning_trainer.kits.prompts.result import write as write_prompts
from lightning_trainer.report.progress import Progress, Silent
from lightning_trainer.run.data import load_tasks

METHODS = ("prompts", "sft", "rl", "distil")
Skill = Callable[[str, int], float]  # success rate of a method after that many tokens
BUDGET = 12_000
TASKS, SAMPLES = 24, 4


@pytest.fixture
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of searches are simulated: a correction that is known to a tenth is enough for each."""
    monkeypatch.setattr(selection, "_DRAWS", 4_000)


def measured(base: Rewards, rewards: Callable[[str, int], Rewards]) -> Callable[[str, int], tuple[Rewards, States]]:
    """Return what `halve` measures with, if no state changes how another counts."""
    states: dict[tuple[str, int], Rewards] = {}

    def measure(method: str, rung: int) -> tuple[Rewards, States]:
        states[method, rung] = rewards(method, rung)
        return base, states

    return measure


class Simulation:
    """Agents whose rewards are 0 or 1, on tasks of different difficulty."""

    def __init__(self, seed: int, skill: Skill) -> None:
        self.random = random.Random(seed)
        self.skill = skill
        self.spent: dict[str, int] = {}
        self.easy = {half: [self.random.betavariate(2, 2) for _ in range(TASKS)] for half in ("choose", "decide")}
        self.base = {half: self.rewards(half, 0.0) for half in ("choose", "decide")}

    def rewards(self, half: str, gain: float) -> Rewards:
        """Rewards of an agent that solves each task more often by `gain` of what it fails."""
        rates = [easy + gain * (1 - easy) for easy in self.easy[half]]
        return {
            place: sum(self.random.random() < rate for _ in range(SAMPLES)) / SAMPLES
            for place, rate in enumerate(rates)
        }

    def spend(self, method: str, rung: int, limit: int) -> Spending:
        """Spend all that may be spent."""
        del rung
        self.spent[method] = limit
        return Spending(tokens=limit, changed=True)

    def search(self, methods: Sequence[str] = METHODS, budget: int = BUDGET) -> dict[str, MethodResult]:
        """Search for one agent."""
        measure = measured(
            self.base["choose"], lambda method, _: self.rewards("choose", self.skill(method, self.spent[method]))
        )
        return halve(methods, budget, self.spend, measure)

    def improve(self, methods: Sequence[str] = METHODS, agents: int = 1) -> tuple[dict[str, float], tuple[str, ...]]:
        """Return the true gain of each agent's candidate, and whose candidates are kept."""
        gains, chosen, tried = {}, {}, {}
        for agent in range(agents):
            found = self.search(methods)
            method = max(found, key=lambda name: found[name].gain)
            best = found[method].best
            if best is not None and best.gain > 0:
                name = f"agent-{agent}"
                gains[name], chosen[name] = self.skill(method, best.tokens), best.rewards
                states = [stage.rewards for each in found.values() for stage in each.stages]
                tried[name] = StatesOfAgent(states=states, possible=len(methods) * rung_count(len(methods)))

        def measure(agents: Sequence[str]) -> tuple[Rewards, Rewards]:
            gain = sum(map(gains.get, agents))
            known = chosen[agents[0]] if len(agents) == 1 else self.rewards("choose", gain)
            return join(self.base["choose"], self.base["decide"]), join(known, self.rewards("decide", gain))

        decision = decide(
            list(gains), measure,
            choices=lambda names: equivalent_comparisons(self.base["choose"], [tried[name] for name in names], TASKS),
        )  # fmt: skip
        return gains, decision.kept


def join(known: Rewards, fresh: Rewards) -> Rewards:
    """Return the rewards of both halves, the second numbered after the first."""
    return {**known, **{TASKS + task: reward for task, reward in fresh.items()}}


def test_the_budget_is_divided_by_rungs_and_then_by_methods_and_the_best_gets_most() -> None:
    simulation = Simulation(0, lambda method, tokens: 0.9 * (method == "rl"))
    found = simulation.search()
    assert [rung_count(count) for count in (1, 2, 3, 4)] == [1, 2, 3, 3]
    assert share_of(12_000, 4_000, 2, 2) == 2_000
    assert {name: result.tokens for name, result in found.items() if result.rung == 1} == dict.fromkeys(
        [name for name in METHODS if found[name].rung == 1], 1_000
    )
    assert found["rl"].rung == 3
    assert found["rl"].tokens > BUDGET / 2
    assert sum(result.tokens for result in found.values()) == BUDGET
    assert {"another method did better in rung 1"} == {found[name].ended for name in METHODS if found[name].rung == 1}


@pytest.mark.parametrize(("best", "last"), [("sft", "sft+rl"), ("rl", "rl")])
def test_the_last_rung_is_of_the_winner_or_of_the_method_that_continues_from_its_weights(best: str, last: str) -> None:
    simulation = Simulation(0, lambda method, tokens: 0.9 * (method == best))
    measure = measured(
        simulation.base["choose"], lambda method, _: simulation.rewards("choose", 0.9 * (method in (best, last)))
    )
    found = halve(METHODS, BUDGET, simulation.spend, measure, followers={"sft": "sft+rl"})
    assert found[last].rung == 3
    assert sum(result.tokens for result in found.values()) == BUDGET
    assert list(found) == [*METHODS, *[last] * (best != last)]
    if best != last:
        assert (found[best].ended, found[best].rung) == ("sft+rl continues from its weights", 2)
        assert found[best].best is not None  # and can be the candidate, if RL made it worse


def test_a_winner_that_can_not_continue_is_followed_too() -> None:
    simulation = Simulation(0, lambda method, tokens: 0.9)

    def spend(method: str, rung: int, limit: int) -> Spending:
        return Spending(tokens=limit, changed=method != "rl", ended=None if "+" in method else "nothing to learn")

    measure = measured(simulation.base["choose"], lambda method, _: simulation.rewards("choose", 0.9))
    found = halve(["sft", "rl"], BUDGET, spend, measure, followers={"sft": "sft+rl"})
    assert (found["sft+rl"].tokens, found["sft+rl"].rung) == (BUDGET // 2, 2)


def test_a_method_that_has_ended_gets_no_more_and_one_that_changed_nothing_is_not_measured() -> None:
    asked, tried = [], []

    def spend(method: str, rung: int, limit: int) -> Spending:
        asked.append((method, rung))
        flat = method == "rl"
        return Spending(
            tokens=limit // 2 if flat else limit, changed=not flat, ended="all rewards equal" * flat or None
        )

    def measure(method: str, rung: int) -> Rewards:
        tried.append((method, rung))
        return dict.fromkeys(range(9), 1.0)

    found = halve(("rl", "sft"), 1000, spend, measured(dict.fromkeys(range(9), 0.5), measure))
    assert asked == [("rl", 1), ("sft", 1), ("sft", 2)]
    assert tried == [("sft", 1), ("sft", 2)]
    assert (found["rl"].best, found["rl"].ended, found["rl"].tokens) == (None, "all rewards equal", 125)
    assert found["sft"].tokens == 875  # what the other did not spend is not lost
    assert found["sft"].best is not None
    assert found["sft"].best.rung == 1  # the first of equal ones


@pytest.mark.parametrize("barren", [("rl", "sft"), ("rl", "sft", "prompts")])
def test_methods_that_find_nothing_take_no_place_of_one_that_can_continue(barren: tuple[str, ...]) -> None:
    def spend(method: str, _rung: int, limit: int) -> Spending:
        return Spending(tokens=limit, changed=method not in barren, ended="nothing" if method in barren else None)

    equal = dict.fromkeys(range(9), 0.5)  # no gain yet
    found = halve(("rl", "sft", "prompts"), 900, spend, measured(equal, lambda *_: equal))
    assert {name for name, result in found.items() if result.ended == "nothing"} == set(barren)
    assert sum(result.tokens for result in found.values()) == (900 if len(barren) == 2 else 300)
    assert found["prompts"].rung == (3 if len(barren) == 2 else 1)


def test_a_method_that_grows_worse_is_returned_as_it_was_before() -> None:
    gains = {1: 0.6, 2: -0.4, 3: -0.5}
    measure = measured(
        dict.fromkeys(range(20), 0.5),
        lambda method, rung: dict.fromkeys(range(20), 0.5 + gains[rung] * (method == "rl")),
    )
    found = halve(
        ("rl", "sft", "prompts"), 900, lambda _method, _rung, limit: Spending(tokens=limit, changed=True), measure
    )
    assert found["rl"].best is not None
    assert (found["rl"].best.rung, found["rl"].tokens > found["rl"].best.tokens) == (1, True)


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("agents", [1, 2])
def test_arms_that_do_nothing_replace_the_base_in_at_most_the_stated_share(agents: int) -> None:
    kept = [bool(Simulation(seed, lambda *_: 0.0).improve(agents=agents)[1]) for seed in range(300)]
    assert sum(kept) / len(kept) <= 0.025 + 0.02  # 2.5 %, and two standard errors of 300 searches


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("alike", [False, True])
def test_the_correction_for_a_choice_holds_its_level(alike: bool) -> None:
    """The best of seven states, none of them better: chosen on 30 tasks, compared on these and on 30 others."""
    numbers, wrong, found = np.random.default_rng(alike), 0, []
    for _ in range(400):
        base, own = numbers.normal(0, 1, 60), numbers.normal(0, 1, (7, 60))
        states = own[:1] + 0.1 * own if alike else own
        rewards = [dict(enumerate(base + state)) for state in states]
        best = max(rewards, key=lambda state: sum(state[task] - base[task] for task in range(30)))
        tried = StatesOfAgent(states=[{task: state[task] for task in range(30)} for state in rewards], possible=7)
        found.append(equivalent_comparisons(dict(enumerate(base[:30])), [tried], 30))
        interval = estimate_difference(list(best.values()), base.tolist(), comparisons=found[-1])
        wrong += interval.low is not None and interval.low > 0
    assert wrong / 400 <= 0.025 + 0.016  # two standard errors of 400 choices
    assert all(1 <= each <= 7 for each in found)
    assert (sum(found) / 400 < 4) or not alike  # states that are alike are less of a choice


def test_a_candidate_that_sometimes_crashes_is_not_kept_before_it_has_crashed() -> None:
    """It is better by 0.03 on every task and crashes on 5 %, so that it is a little worse than the base."""
    numbers, kept = np.random.default_rng(2), 0
    for _ in range(200):
        base = numbers.beta(20, 8, 40)
        rewards = np.where(numbers.random(40) < 0.05, 0.0, np.minimum(base + 0.03, 1.0))
        pair = dict(enumerate(base.tolist())), dict(enumerate(rewards.tolist()))
        kept += bool(decide(["agent"], lambda _agents, pair=pair: pair, choices=lambda _: 3.0).kept)
    assert kept / 200 <= 0.025


def test_nothing_to_choose_needs_no_correction_and_more_agents_need_a_larger_one() -> None:
    numbers = random.Random(0)
    base, *states = ({task: numbers.random() for task in range(20)} for _ in range(8))
    one = StatesOfAgent(states=states[:1], possible=1)
    several, unmeasured = StatesOfAgent(states=states, possible=7), StatesOfAgent(states=states, possible=12)
    assert equivalent_comparisons(base, [one], 20) == 1.0
    narrow, wide = (equivalent_comparisons(base, [each], 20) for each in (several, unmeasured))
    assert 2 < narrow < wide < equivalent_comparisons(base, [unmeasured] * 2, 20) < 24
    assert equivalent_comparisons(base, [several], 200) < narrow  # the choice weighs less the more tasks are fresh
    equal = StatesOfAgent(states=[base] * 7, possible=7)
    assert 1 <= equivalent_comparisons(base, [equal], 20) <= 7
    assert 1 <= equivalent_comparisons({0: 1.0}, [StatesOfAgent(states=[{0: 0.5}] * 3, possible=4)], 1) <= 4


def test_deciding_by_the_tasks_of_the_choice_would_replace_the_base_more_often() -> None:
    """The control: without fresh tasks, the best of four that do nothing looks better than the base too often."""
    wrong = 0
    for seed in range(200):
        simulation = Simulation(seed, lambda *_: 0.0)
        best = max((each.best for each in simulation.search().values() if each.best), key=lambda stage: stage.gain)
        wrong += best.difference.low is not None and best.difference.low > 0
    assert wrong / 200 > 0.04


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("helps", METHODS)
def test_the_method_that_helps_is_found_and_comes_close_to_it_alone_at_equal_tokens(helps: str) -> None:
    def skill(method: str, tokens: int) -> float:  # needs a third of the budget for two thirds of what it can
        return 0.8 * (1 - 3 ** (-3 * tokens / BUDGET)) if method == helps else 0.0

    alone, found = skill(helps, BUDGET), []
    for seed in range(40):
        simulation = Simulation(seed, skill)
        gains, kept = simulation.improve()
        found.append(max(gains.values()) if kept else 0.0)
    assert sum(found) / len(found) >= 0.75 * alone
    others = [skill(name, BUDGET) for name in METHODS if name != helps]
    assert max(others) == 0.0  # whoever had chosen another method would have nothing


def test_several_agents_are_kept_together_only_if_together_they_are_better() -> None:
    base = dict.fromkeys(range(30), 0.5)
    good = {place: 0.7 + 0.01 * (place % 3) for place in base}

    def measure(agents: Sequence[str]) -> tuple[Rewards, Rewards]:
        if len(agents) > 1:
            return base, {place: 0.2 + 0.01 * (place % 2) for place in base}
        alone = {"writer": good, "checker": {place: 0.6 + 0.01 * (place % 2) for place in base}, "idle": base}
        return base, alone[agents[0]]

    decision = decide(["writer", "checker", "idle"], measure)
    assert decision.kept == ("writer",)
    assert decision.comparisons == 4
    assert decision.together == decision.differences["writer"]
    assert decide([], measure).kept == ()


def test_how_an_earlier_state_counts_may_change_with_a_later_one() -> None:
    def measure(method: str, _rung: int) -> tuple[Rewards, States]:
        low = -1.0 if method == "rl" else 0.0  # with which the base and `sft` fail on every second task
        values = {"base": (0.5, low), "sft": (0.75, low), "rl": (0.5, 0.0)}
        base, sft, rl = ({task: values[name][task % 2] for task in range(20)} for name in ("base", "sft", "rl"))
        return base, {("sft", 1): sft, ("rl", 1): rl, ("rl", 2): rl}

    def spend(_method: str, rung: int, limit: int) -> Spending:
        return Spending(tokens=limit, changed=True, ended="enough" if rung == 2 else None)

    found = halve(("sft", "rl"), 1000, spend, measure)
    assert [found[name].gain for name in ("sft", "rl")] == [0.125, 0.5]
    assert [stage.rewards[1] for name in ("sft", "rl") for stage in found[name].stages] == [-1.0, 0.0, 0.0]


def evaluation_of(sample: Callable[[int, bool], Sample]) -> Callable[[EvalConfig, Progress], None]:
    """Return an evaluation without a model: the sample of each task, with the program's own prompts or others."""

    def evaluate(config: EvalConfig, _: Progress) -> None:
        assert config.out is not None
        config.out.mkdir()
        tasks = range(len(load_tasks(config.data)))
        write_samples(config.out, [sample(task, config.prompts is not None) for task in tasks])

    return evaluate


def improve_config(folder: Path) -> ImproveConfig:
    """Return the options of a search for a model without weights."""
    (folder / "model").mkdir()
    empty = "\2" + "\0" * 7 + "{}"
    for name, content in (("config.json", "{}"), ("tokenizer.json", "{}"), ("model.safetensors", empty)):
        (folder / "model" / name).write_text(content)
    for name, count in (("data", 2), ("val", 40)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({name: place}) + "\n" for place in range(count)))
    train = TrainConfig(
        target="program:run", data=folder / "data.jsonl", val=folder / "val.jsonl", model=str(folder / "model"),
        lora_rank=4,
    )  # fmt: skip
    return ImproveConfig(train=train, budget=10_000_000, methods=("rl",))


def test_an_agent_with_rewards_and_without_calls_gets_no_share_of_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(task: int, _: bool) -> Sample:
        return Sample(
            task=task, sample=0, rollout_id=f"{task}", attempt_id=f"{task}", status="succeeded", reward=1.0,
            rewards={"writer": 1.0, "fixer": 1.0}, usage={"writer": Usage(calls=1, prompt_tokens=30)},
        )  # fmt: skip

    class Notes(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    notes = list[str]()
    monkeypatch.setattr(measuring, "evaluate", evaluation_of(sample))
    assert plan_search(improve_config(tmp_path), Notes()).agents == ["writer"]
    assert notes[-1] == "fixer has rewards, but no call in 2 rollouts, so it is not improved"


def test_a_crash_counts_as_the_same_reward_for_the_base_and_for_a_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base crashes on every second task. The candidate never does, and has the reward -1 for every seventh."""

    def sample(task: int, prompted: bool) -> Sample:
        crashes, reward = not prompted and task % 2 == 1, -1.0 if prompted and task % 7 == 0 else 0.5
        return Sample(
            task=task, sample=0, rollout_id=f"{task}", attempt_id=f"{task}", reward=None if crashes else reward,
            status="crashed" if crashes else "succeeded", usage={"writer": Usage(calls=1, prompt_tokens=30)},
        )  # fmt: skip

    monkeypatch.setattr(measuring, "evaluate", evaluation_of(sample))
    config = improve_config(tmp_path)
    config.write(tmp_path)
    TaskFiles(tmp_path / "tasks").write(config, Silent())
    made = tmp_path / "agents" / "writer" / "rl" / "rung-1"
    made.mkdir(parents=True)
    (made / "checkpoint").symlink_to(tmp_path / "model")
    write_prompts(made / "prompts.json", {"writer": "Write."}, {"writer": "Write well."}, {})
    made.with_suffix(".json").write_text(json.dumps({"tokens": 100, "changed": True}))
    found = improve(config, resume=tmp_path)
    best = found.agents["writer"].methods["rl"].best
    assert best is not None
    differences = [best.difference.mean, found.decision.differences["writer"].mean]
    assert differences == [pytest.approx(0.525)] * 2
    assert found.decision.kept == ("writer",)
    assert found.base is not None
    assert found.kept is not None
    assert [each.reward.mean for each in (found.base, found.kept)] == [-0.25, pytest.approx(0.275)]


def test_intervals_of_several_comparisons_are_wider() -> None:
    this, other = [0.0, 1.0, 1.0, 0.5, 0.8, 0.9], [0.0, 0.2, 0.4, 0.5, 0.3, 0.1]
    widths = [
        found.high - found.low
        for count in (1, 2, 8)
        if (found := estimate_difference(this, other, comparisons=count)).low is not None and found.high is not None
    ]
    assert widths == sorted(widths)
    assert widths[0] < widths[1]


def test_a_budget_that_is_too_small_is_refused_with_the_least_that_works() -> None:
    from lightning_spans.errors import ConfigError

    def plan(budget: int) -> SearchPlan:
        return SearchPlan(
            agents=("a", "b"), methods=("sft", "rl"), budget=budget, least={"sft": 100, "rl": 640}, rollout_tokens=20.0,
            to_choose=40, to_decide=44,
        )  # fmt: skip

    assert plan(5200).rungs == [(2, 650), (1, 1300)]
    plan(5120).check()
    with pytest.raises(ConfigError, match="Give 5120 or more"):
        plan(5100).check()
