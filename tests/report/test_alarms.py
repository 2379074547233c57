"""Alarms on made-up histories: those that must speak, and those that must stay silent."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_trainer.report.alarms import active_alarms
from lightning_trainer.report.history import History

STEPS = 20


def history(**numbers: Sequence[float] | Callable[[float], float]) -> list[dict[str, Any]]:
    """Lines of training steps; a function is asked with the progress from 0 to 1. ``val`` gives validations."""
    lines: list[dict[str, Any]] = []
    for step in range(STEPS):
        line: dict[str, Any] = {"kind": "train", "step": step}
        for name, values in numbers.items():
            if name == "val":
                continue
            key = name.replace("__", "/")
            line[key] = values(step / (STEPS - 1)) if callable(values) else values[step % len(values)]
        lines.append(line)
    for number, value in enumerate(numbers.get("val", ())):  # type: ignore[arg-type]
        lines.append({"kind": "val", "step": number * 5, "reward": value})
    return lines


def team(*, writer: float, talker: float, talkers: str = "team") -> list[dict[str, Any]]:
    """Lines of a run in which the talker has ten times as many tokens, and these shares of the gradient."""
    shares = {"gradient_share/writer": [writer], "gradient_share/talker": [talker]}
    tokens = {"token_share/writer": [1 / 11], "token_share/talker": [10 / 11]}
    policies = [{"writer": "team", "talker": talkers}]
    return history(**shares, **tokens, policy_of=policies, reward=rising)  # type: ignore[arg-type]


def uncertain(lines: list[dict[str, Any]], by: float) -> list[dict[str, Any]]:
    """The same lines, with intervals of held-out rewards."""
    return [{**line, "reward_high": line["reward"] + by} if line["kind"] == "val" else line for line in lines]


def names(lines: list[dict[str, Any]]) -> set[str]:
    return {alarm.name for alarm in active_alarms(History(lines))}


class CountedLine(dict[str, Any]):
    """A line that counts how often something is looked up in any line."""

    lookups = 0

    def __getitem__(self, name: str) -> Any:
        CountedLine.lookups += 1
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        CountedLine.lookups += 1
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        CountedLine.lookups += 1
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        for name in super().__iter__():
            CountedLine.lookups += 1
            yield name


def lines_of_a_team(steps: int, noise: float = 0.0) -> list[CountedLine]:
    """Lines of a run of two agents, which share a policy, with a validation every five steps."""
    draw = random.Random(0)

    def value() -> float:
        return 0.5 + noise * draw.random()

    numbers = [
        "reward", "reward_all", "entropy", "response_tokens", "truncated", "groups_without_signal", "tool_error_rate",
        "answers_alike/a", "answers_alike/b", "engine_gap/p", "kl_base/p", "failed", "rollouts", "calls_seen",
        "calls_unread/other", "calls_malformed", "rule_failures/r", "reward_source/r", "reward_source/run",
        "judge_agreement", "gradient_share/a", "gradient_share/b", "token_share/a", "token_share/b",
    ]  # fmt: skip
    lines = []
    for step in range(steps):
        if step % 5 == 0:
            by_task = {name: {str(task): value() for task in range(8)} for name in ("", "a", "b")}
            held_out = {"reward": value(), "reward_all": value(), "by_task": by_task, "from_best": -0.1}
            lines.append(CountedLine(kind="val", step=step, **held_out))
        values = {name: value() for name in numbers}
        lines.append(CountedLine(kind="train", step=step, policy_of={"a": "p", "b": "p"}, **values))
    return lines


def stuck(x: float) -> float:
    return 0.2 + 0.05 * math.sin(40 * x)


def rising(x: float) -> float:
    return 0.1 + 0.8 * x + 0.03 * math.sin(40 * x)


def falling_to(end: float, start: float = 1.2) -> Callable[[float], float]:
    return lambda x: start * (end / start) ** x


def test_an_alarm_quotes_no_answer_but_the_one_that_most_prompts_get():
    """Where nearly all answers are empty, the most frequent answer with a text is a rare one."""
    lines = history(answers_alike__router=rising, reward=rising)
    for share, quoted in ((0.06, "one answer"), (0.9, 'the answer "\'"')):
        lines[-1]["most_frequent"] = {"router": ("'", share)}
        [alarm] = active_alarms(History(lines))
        assert f"router gives {quoted} to" in alarm.text


@pytest.mark.parametrize(
    ("lines", "name", "words"),
    [
        (history(entropy=falling_to(0.01), reward=stuck), "entropy_collapsed", "has fallen from 0.9"),
        (history(answers_alike__router=rising, reward=rising), "answers_alike/router", "router gives one answer to 8"),
        (
            history(entropy=[1.0], entropy__writer=falling_to(0.01), entropy__rewriter=[1.0], reward=stuck),
            "entropy_collapsed/writer",
            "entropy of writer",
        ),
        (history(response_tokens=falling_to(3, 60), reward=stuck), "length_collapsed", "have shrunk from"),
        (history(response_tokens=falling_to(400, 60), reward=stuck), "length_collapsed", "have grown from"),
        (history(truncated=lambda x: 0.9 * x, reward=rising), "answers_cut", "cut at their limit, 5% were at first"),
        (history(reward=[0.9], reward_all=[0.7]), "rollouts_left_out", "0.90 over the rollouts that count, and 0.70"),
        (history(groups_without_signal=[0.95], reward=[1.0]), "groups_dead", "95% of the groups .* at a mean of 1.00"),
        (history(reward=rising, val=[0.2, 0.5, 0.4, 0.3]), "held_out_falls", "fallen from 0.50 after 5 steps to 0.30"),
        (uncertain(history(reward=rising, val=[0.2, 0.9, 0.3, 0.3]), 0.2), "held_out_falls", "fallen from 0.90"),
        (history(logprob_gap=lambda x: 0.01 + 0.3 * x, reward=rising), "engine_gap_widens", "has widened from"),
        (history(logprob_gap=[0.01] * 19 + [2.5]), "engine_gap_widens", "differ from the trainer's by 2.50"),
        (history(tool_error_rate__search=lambda x: x, reward=stuck), "tools_fail/search", "tool calls of search fail"),
        (history(calls_unread__mistral=lambda _: 0.3), "calls_unread/mistral", "30% .*--tool-format mistral"),
        (history(calls_unread__other=lambda _: 0.3), "calls_unread/other", "30% .*in a format that is not recognised"),
        (history(calls_malformed=lambda _: 0.3, reward=stuck), "calls_malformed", "30% .*, 30% were at first"),
        (history(**{"rule_failures/tool_arguments": [2.0]}), "rules_fail/tool_arguments", "failed on 2 attempts"),
        (
            team(writer=0.05, talker=0.95),
            "agent_captures/team",
            "talker makes 95% of the gradient of the policy that it shares with writer, with 91% of the trained tokens",
        ),
        (history(failed=lambda x: 40 * x, rollouts=[64], reward=rising), "rollouts_fail", "rollouts fail, .*--failed"),
    ],
)
def test_what_goes_wrong_is_said_in_a_sentence(lines: list[dict[str, Any]], name: str, words: str) -> None:
    [alarm] = active_alarms(History(lines))
    assert alarm.name == name
    assert re.search(words, alarm.text)
    assert alarm.text.endswith((".", "?"))


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([], id="nothing yet"),
        pytest.param([{"kind": "val", "step": 0, "reward": 0.1}], id="only a validation"),
        pytest.param(history(entropy=falling_to(0.02), reward=rising), id="a policy that learns grows sure"),
        pytest.param(history(response_tokens=falling_to(8, 44), reward=rising), id="it learns to be short"),
        pytest.param(history(response_tokens=falling_to(400, 60), reward=rising), id="it learns to think"),
        pytest.param(history(entropy=[1.0, 0.7, 1.3], response_tokens=[40, 60, 30], reward=stuck), id="noise"),
        pytest.param(history(truncated=[0.9], reward=stuck), id="answers were always cut"),
        pytest.param(history(groups_without_signal=[0.9, 0.9, 0.5]), id="some groups live"),
        pytest.param(history(reward=rising, val=[0.2, 0.4, 0.38, 0.37]), id="held-out noise"),
        pytest.param(history(reward=rising, val=[0.2, 0.4, 0.2, 0.5]), id="held-out falls once"),
        pytest.param(
            uncertain(history(reward=rising, val=[0.22, 0.2, 0.11, 0.09]), 0.16), id="held-out within its interval"
        ),
        pytest.param(history(reward=lambda x: 1 - x, val=[0.2, 0.9, 0.5, 0.2]), id="both fall: not by heart"),
        pytest.param(history(logprob_gap=[0.03, 0.02, 0.04]), id="a gap that stays"),
        pytest.param(history(logprob_gap=falling_to(0.002, 0.03)), id="a gap that closes"),
        pytest.param(history(logprob_gap=lambda x: 1e-5 + 1e-3 * x), id="a gap too small to matter"),
        pytest.param(history(tool_error_rate__search=lambda x: 1 - x), id="tools that learn to work"),
        pytest.param(history(calls_malformed=lambda x: 0.3 * (1 - x)), id="calls that it learns to write"),
        pytest.param(history(calls_unread__other=[0.03]), id="what a model says that has not learned the form yet"),
        pytest.param(history(failed=[3, 0, 5], rollouts=[64], reward=stuck), id="some rollouts always fail"),
        pytest.param(history(entropy=[math.nan], reward=stuck), id="what is not a number is left out"),
        pytest.param(team(writer=0.3, talker=0.7), id="agents of which one says more"),
        pytest.param(team(writer=0.05, talker=0.95, talkers="own"), id="agents with a policy each"),
        pytest.param(history(policy_of=[{"writer": "team", "talker": "team"}]), id="no gradient is measured"),
        pytest.param(history(answers_alike__router=[0.9, 0.95]), id="one answer from the start"),
        pytest.param(history(answers_alike__router=[0.4, 0.9, 0.5]), id="prompts of one class in a step"),
    ],
)
def test_healthy_runs_are_left_in_peace(lines: list[dict[str, Any]]) -> None:
    assert active_alarms(History(lines)) == []


def test_first_steps_raise_nothing_but_what_is_certain() -> None:
    short = history(
        entropy=falling_to(0.001), response_tokens=falling_to(1, 90), tool_error_rate=lambda x: x, reward=stuck
    )
    assert active_alarms(History(short[:5])) == []
    assert names(history(logprob_gap=[3.0])[:1]) == {"engine_gap_widens"}


def test_steps_without_a_gradient_do_not_hide_a_captured_policy() -> None:
    lines = team(writer=0.0, talker=1.0)
    flat = [{key: value for key, value in lines[-1].items() if not key.startswith("gradient_share")}]
    assert "agent_captures/team" in names([*lines, *flat])


def test_a_later_line_takes_no_more_lookups_than_an_early_one() -> None:
    def lookups(steps: int) -> int:
        *earlier, newest = lines_of_a_team(steps)
        lines = History(earlier)
        active_alarms(lines)
        CountedLine.lookups = 0
        lines.append(newest)
        active_alarms(lines)
        return CountedLine.lookups

    assert lookups(42) == lookups(162)


def test_alarms_of_a_history_that_grows_are_those_of_its_lines() -> None:
    lines, grown = lines_of_a_team(60, noise=0.5), History()
    for end, line in enumerate(lines, 1):
        grown.append(line)
        assert active_alarms(grown) == active_alarms(History(lines[:end]))


def test_alarm_stands_only_as_long_as_its_reason() -> None:
    dead = history(groups_without_signal=[1.0])
    assert names(dead) == {"groups_dead"}
    alive = {"kind": "train", "step": STEPS, "groups_without_signal": 0.1}
    assert names([*dead, alive]) == set()


def test_healthy_runs_rarely_raise_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alarm is raised in at most two of these simulated healthy runs; `bench/run.py alarms` has the rates."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "bench")
    from bench_alarms import FAULTS, SimulatedRun, first_alarms

    short = [seed for seed in range(60) if SimulatedRun(seed).steps <= 30]
    raised_in = [name for seed in short for name in first_alarms(SimulatedRun(seed), list(FAULTS))]
    assert len(short) > 20
    assert {name: raised_in.count(name) for name in raised_in if raised_in.count(name) > 2} == {}


def test_a_single_unread_call_is_chance() -> None:
    few = history(calls_unread__mistral=lambda _: 1 / 40, calls_seen=[40.0])
    assert names(few) == set()
    assert names(history(calls_unread__mistral=lambda _: 1 / 40, calls_seen=[400.0])) == {"calls_unread/mistral"}


def test_a_checker_that_says_yes_to_better_answers_raises_no_alarm() -> None:
    says_yes = {"answers_alike__checker": lambda x: 0.6 + 0.32 * x}
    assert names(history(**says_yes, reward=rising)) == set()
    assert names(history(answers_alike__checker=lambda x: 0.6 + 0.4 * min(2 * x, 1.0), reward=stuck)) == {
        "answers_alike/checker"
    }


def test_a_divergence_that_grows_steadily_raises_no_alarm() -> None:
    assert names(history(kl_base__writer=lambda x: 3 * x, reward=stuck)) == set()
    assert names(history(kl_base__writer=lambda x: 0.001 * 2 ** (12 * x), reward=stuck)) == {"policy_departs/writer"}


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000))
def test_noise_around_a_level_is_never_called_a_collapse(seed: int) -> None:
    """Entropy, length and gap that wander by a third around their level, and rewards that go nowhere."""
    draw = random.Random(seed)

    def around(level: float) -> list[float]:
        return [level * draw.uniform(0.67, 1.33) for _ in range(STEPS)]

    lines = history(
        entropy=around(0.8), response_tokens=around(50), logprob_gap=around(0.03), truncated=around(0.2),
        groups_without_signal=around(0.4), tool_error_rate=around(0.2), reward=around(0.4),
    )  # fmt: skip
    assert active_alarms(History(lines)) == []


def test_groups_from_which_prompts_taught_are_not_dead() -> None:
    dead = {"groups_without_signal": [0.95], "reward": [0.0]}
    assert names(history(**dead, distilled_calls=[0.0])) == {"groups_dead"}
    assert names(history(**dead, distilled_calls=[4.0])) == set()
