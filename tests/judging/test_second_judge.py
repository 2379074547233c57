"""A second judge that is not learned from: how often it agrees, what it leaves in the store, and its alarm."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_spans.errors import ConfigError
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import open_store
from lightning_trainer.kits.judging.asking import JudgeAnswer, JudgeScore
from lightning_trainer.kits.judging.judge import GroupJudge
from lightning_trainer.kits.judging.options import JudgeOptions, read_options
from lightning_trainer.kits.judging.second import SecondJudge, SecondJudgeKind, agreement
from lightning_trainer.report.alarms import active_alarms
from lightning_trainer.report.history import History
from lightning_trainer.report.progress import Silent
from support.training.judged import options, rolled

TEXTS = ["a", "abcd", "ab", "abcdefg"]


def step_of(outcomes: Any) -> Any:
    return SimpleNamespace(outcomes=outcomes, step=3)


def by_length(sign: int) -> Any:
    """Send nothing: longer answers are better, or shorter ones."""

    def send(_options: JudgeOptions, attempts: Any) -> JudgeAnswer:
        scores = tuple(JudgeScore(0.5 + sign * len(str(entries)) / 10_000, "") for entries in attempts)
        return JudgeAnswer({}, "", scores, None, 1, 2)

    return send


@pytest.mark.parametrize(("sign", "share"), [(1, 1.0), (-1, 0.0)])
def test_the_second_judge_is_compared_and_not_learned_from(tmp_path: Path, sign: int, share: float) -> None:
    with closing(open_store(str(tmp_path / "s.db"))) as store:
        with closing(GroupJudge(options(), store, send=by_length(1))) as first:
            judged = first.judge(rolled(store, TEXTS))
        before = store.rewards()
        with closing(GroupJudge(options(), store, send=by_length(sign))) as second:
            extra = SecondJudge(second, 2, 0, Silent()).before_batch(step_of(judged))
        assert extra.metrics == {"judge_agreement": share}
        assert extra.outcomes == ()
        assert store.rewards() == before


def test_a_rollout_that_crashed_and_then_succeeded_is_compared_as_the_first_judge_did(tmp_path: Path) -> None:
    with closing(open_store(str(tmp_path / "s.db"))) as store:
        with closing(GroupJudge(options(), store, send=by_length(1))) as first:
            judged = first.judge([replace(one, crash=one.attempt) for one in rolled(store, TEXTS)])
        with closing(GroupJudge(options(), store, send=by_length(-1))) as second:
            extra = SecondJudge(second, 2, 0, Silent()).before_batch(step_of(judged))
    assert extra.metrics == {"judge_agreement": 0.0}


def test_groups_without_a_preference_or_a_verdict_are_not_counted(tmp_path: Path) -> None:
    def silent(_options: JudgeOptions, _attempts: Any) -> JudgeAnswer:
        return JudgeAnswer({}, "", None, "busy", 1, 2)

    with closing(open_store(str(tmp_path / "s.db"))) as store:
        outcomes = rolled(store, TEXTS)
        with closing(GroupJudge(options(), store, send=silent)) as judge:
            second = SecondJudge(judge, 2, 0, Silent())
            assert second.before_batch(step_of(outcomes)).metrics == {}  # the judge gave them nothing
            given = [
                replace(one, rewards=(Reward(rollout_id="r", attempt_id="a", value=float(n), source="judge"),))
                for n, one in enumerate(outcomes)
            ]
            assert second.before_batch(step_of(given)).metrics == {}


def test_agreement_is_the_share_of_pairs_in_the_same_order() -> None:
    assert agreement([1, 2, 3], [10, 30, 20]) == pytest.approx(2 / 3)
    assert agreement([1, 2, 2], [0, 0, 5]) == pytest.approx(0.75)
    assert agreement([1, 1], [0, 1]) is None


def test_options_of_a_second_judge_are_checked() -> None:
    table = {"endpoint": "http://127.0.0.1:9/v1", "model": "j"}
    assert read_options({**table, "second_model": "k", "second_key_file": "key"}).second_key_file == Path("key")
    for wrong, says in (
        ({"second_groups": 2}, "Name that judge with second_model"),
        ({"second_model": "k", "second_groups": 0}, "second_groups must be at least 1"),
        ({"second_model": "k", "second_endpoint": "here"}, "is not a URL"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_options({**table, **wrong})
    assert SecondJudgeKind().wanted(SimpleNamespace(judge={**table, "second_model": "k"}))  # type: ignore[arg-type]
    assert not SecondJudgeKind().wanted(SimpleNamespace(judge=table))  # type: ignore[arg-type]


def steps(**numbers: Any) -> list[dict[str, Any]]:
    return [
        {"kind": "train", "step": step, **{name.replace("__", "/"): of(step) for name, of in numbers.items()}}
        for step in range(10)
    ]


def names(lines: list[dict[str, Any]]) -> set[str]:
    return {alarm.name for alarm in active_alarms(History(lines))} & {
        "judges_part",
        "rule_departs/tool_status",
        "rule_departs/run",
    }


def validations(high: float) -> list[dict[str, Any]]:
    changes = [{}, {"from_best": high - 0.1, "from_best_high": high}]
    return [{"kind": "val", "step": 9 * n, "reward": 0.5, **change} for n, change in enumerate(changes)]


def test_judges_that_part_raise_an_alarm() -> None:
    assert names(steps(judge_agreement=lambda step: 0.9 - 0.05 * step)) == {"judges_part"}
    assert names(steps(judge_agreement=lambda step: 0.6 + 0.05 * (step % 2))) == set()  # as poor as at first
    assert names(steps(judge_agreement=lambda step: 0.95 - 0.02 * step)) == set()


def test_a_rule_that_pays_while_the_outcome_falls_raises_an_alarm() -> None:
    rises: dict[str, Any] = {"reward_source__tool_status": lambda step: 0.02 * step}
    falls: dict[str, Any] = {"reward_source__run": lambda step: 0.9 - 0.05 * step}
    assert names([*steps(**rises), *validations(-0.05)]) == {"rule_departs/tool_status"}
    assert names([*steps(**rises), *validations(0.01)]) == set()
    assert names([*steps(**rises, **falls), *validations(0.01)]) == set()  # what is held out has the last word
    assert names(steps(**rises, **falls)) == {"rule_departs/tool_status"}
    assert names([*steps(reward_source__run=lambda step: 0.1 * step), *validations(-0.05)]) == set()
