"""How attempts end counts the same everywhere: programs in workers, calls at a gateway, and a batch made of them."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_trainer.gateway.engine import SampledPiece, Sampling, engine_wait, mark_ended
from lightning_trainer.gateway.upstream.errors import upstream_failure
from lightning_trainer.report import step_metrics
from lightning_trainer.report.step_notes import infrastructure_sentence
from lightning_trainer.rl.batch.batch import Batch
from lightning_trainer.rl.endings import Ending, is_long_wait
from lightning_trainer.rl.rollouts import Outcome
from lightning_trainer.rl.scores import score
from lightning_trainer.session.answers import AnswerSource
from support.fakes import FakeEngine
from support.training.ended_attempts import PATIENT_S, SHORT_S, run_group

pytest.importorskip("openai")


class Scripted(FakeEngine):
    """Answers the first prompts in turn, and never ends one that begins with `~`."""

    def __init__(self, *answers: str) -> None:
        super().__init__(self._answer, delay_s=0.0)
        self._answers = list(answers)

    def _answer(self, prompt: str) -> Any:
        if "fail" in prompt:
            return RuntimeError("out of memory")
        said = self._answers.pop(0) if self._answers and "go on" not in prompt else "good"
        self._delay_s = 0.0
        if said == "~":
            self._delay_s = 0.05
            return "~" * 100_000
        return said


class Restarting(Scripted):
    """An engine that is down for the first call that says `wait`, until this is given up."""

    was_down = False

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[SampledPiece]:
        if "wait" in self.tokenizer.decode(prompt) and not self.was_down:
            self.was_down = True
            with engine_wait():
                await asyncio.Event().wait()
        async for piece in super().generate(prompt, sampling):
            yield piece


class OutOfMemory(Scripted):
    """An engine that fails at the first call that says `wait`."""

    has_failed = False

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[SampledPiece]:
        if "wait" in self.tokenizer.decode(prompt) and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("out of memory")
        async for piece in super().generate(prompt, sampling):
            yield piece


class Ended(Scripted):
    """An engine that ends in the middle of its first answer to a call that says `wait`."""

    has_ended = False

    async def generate(self, prompt: Sequence[int], sampling: Sampling) -> AsyncIterator[SampledPiece]:
        text = self.tokenizer.decode(prompt)
        async for piece in super().generate(prompt, sampling):
            yield piece
            if "refuse" in text:
                raise upstream_failure("answered 500: this prompt is too much")
            if "wait" in text and not self.has_ended:
                self.has_ended = True
                mark_ended(0.0)
                raise upstream_failure("did not answer: ConnectionResetError")


def rolled(folder: Path, target: str, engine: FakeEngine, *args: Any, **options: Any) -> tuple[list[Outcome], Batch]:
    return run_group(folder, target, AnswerSource(model=engine.model, engines=[engine]), *args, **options)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def by_rollout(batch: Batch) -> dict[str, float]:
    """The advantage of each rollout's call."""
    return {call.transition.rollout_id: call.advantage for call in batch.calls if not math.isnan(call.advantage)}


def endings(outcomes: Sequence[Outcome]) -> list[Ending | None]:
    return [outcome.ending for outcome in outcomes]


def test_rollout_that_hangs_after_an_answer_earns_the_lowest_reward_and_stays_in_its_group(folder: Path) -> None:
    outcomes, batch = rolled(folder, "run", Scripted("hang", "good", "poor"), 3, SHORT_S)
    assert endings(outcomes) == [Ending.TIMED_OUT, Ending.SUCCEEDED, Ending.SUCCEEDED]
    assert score(outcomes, "lowest").reward == pytest.approx(0.5)
    advantages = by_rollout(batch)
    assert len(advantages) == 3
    assert min(advantages, key=lambda name: advantages[name]) == outcomes[0].rollout.rollout_id
    assert len(batch.rows) == 3, "the answer after which it hung is learned from"


@pytest.mark.parametrize(
    ("target", "timeout_s", "ending"),
    [("impatient", PATIENT_S, Ending.CALL_CUT), ("run", SHORT_S, Ending.TIMED_OUT)],
    ids=["client", "attempt"],
)
def test_answer_that_takes_too_long_is_a_failure_with_the_tokens_sampled_until_then(
    folder: Path, target: str, timeout_s: float, ending: Ending
) -> None:
    """In a plain function, which no time limit can interrupt: its only call is still answered as the attempt ends."""
    outcomes, batch = rolled(folder, target, Scripted("~", "good"), 2, timeout_s)
    assert endings(outcomes) == [ending, Ending.SUCCEEDED]
    advantages = by_rollout(batch)
    assert advantages[outcomes[0].rollout.rollout_id] < 0 < max(advantages.values())
    [row] = [row for row in batch.rows if row.advantages[row.mask][0] < 0]
    assert set(row.tokens[row.mask]) == {ord("~")}


def test_a_short_wait_for_the_engine_excuses_no_policy_that_runs_out_of_time() -> None:
    assert is_long_wait(30.0, 60.0)
    assert not is_long_wait(30.0, 600.0)
    assert not is_long_wait(0.5, 0.6)


@pytest.mark.parametrize(
    ("target", "timeout_s"), [("twice_impatient", PATIENT_S), ("twice", SHORT_S)], ids=["client", "attempt"]
)
@pytest.mark.parametrize("tries", [1, 2])
def test_time_lost_to_an_engine_that_is_down_is_not_the_policys_failure(
    folder: Path, target: str, timeout_s: float, tries: int
) -> None:
    """The first answer is the policy's; the second call waits until the time is up."""
    [outcome], batch = rolled(folder, target, Restarting("poor", "poor"), 1, timeout_s, tries=tries)
    ended = [outcome.endings[attempt.attempt_id] for attempt in outcome.attempts]
    assert ended == [Ending.ENGINE_DOWN, Ending.SUCCEEDED][:tries]
    assert outcome.crash is None
    metrics = step_metrics.of_endings([outcome])
    assert metrics == {"infrastructure/engine_down": 1.0}
    assert "1 attempt ended by a fault of the infrastructure" in (infrastructure_sentence(metrics) or "")
    counted = outcome.counts("lowest")
    assert (None if counted is None else counted.status) == (None if tries == 1 else "succeeded")
    assert by_rollout(batch) == {}, "the calls of the attempt that lost its time are not learned from"


@pytest.mark.parametrize(
    ("target", "engine"),
    [("calm", Ended), ("calm_impatient", Restarting), ("calm", OutOfMemory)],
    ids=["broken", "late", "out of memory"],
)
@pytest.mark.parametrize("tries", [1, 2])
def test_reward_without_an_answer_that_the_engine_failed_to_give_does_not_count(
    folder: Path, target: str, engine: type[Scripted], tries: int
) -> None:
    """The program catches the error and returns 0, which is not what the policy earned."""
    [outcome], batch = rolled(folder, target, engine("poor", "poor", "poor"), 1, tries=tries)
    ended = [outcome.endings[attempt.attempt_id] for attempt in outcome.attempts]
    assert ended == [Ending.ENGINE_DOWN, Ending.SUCCEEDED][:tries]
    assert [reward.value for reward in outcome.rewards] == [1.0][: tries - 1]
    assert step_metrics.of_endings([outcome]) == {"infrastructure/engine_down": 1.0}
    assert "a call of writer failed and was not answered later" in (outcome.attempts[0].error or "")
    assert (outcome.counts("lowest") is None) == (tries == 1)
    assert not batch.rows or len(batch.rows) == 2, "the calls of the try that counts"


@pytest.mark.parametrize(
    ("task", "reward"),
    [({"tries": 2}, 1.0), ({"text": "refuse"}, 0.0), ({"text": "go" * 60_000}, 0.0)],
    ids=["made again", "refused by a healthy engine", "too long"],
)
def test_reward_counts_if_the_engine_was_not_to_blame_or_answered_later(
    folder: Path, task: Mapping[str, Any], reward: float
) -> None:
    [outcome], _ = rolled(folder, "calm", Ended("poor"), 1, tries=2, task=task)
    assert endings([outcome]) == [Ending.SUCCEEDED]
    assert len(outcome.attempts) == 1
    assert [earned.value for earned in outcome.rewards] == [reward]


def test_timeouts_can_be_left_out(folder: Path) -> None:
    outcomes, batch = rolled(folder, "run", Scripted("hang", "good"), 2, SHORT_S, timeouts="exclude")
    assert [outcome.counts("lowest") is None for outcome in outcomes] == [True, False]
    assert batch.account.dropped == {Ending.TIMED_OUT.text: 1, "group incomplete": 1}


def test_call_that_failed_and_was_made_again_excuses_no_crash(folder: Path) -> None:
    outcomes, _ = rolled(folder, "again", Scripted("poor"), 1)
    assert endings(outcomes) == [Ending.CRASHED]
    assert outcomes[0].crash is not None


@pytest.mark.parametrize(
    ("target", "attempts", "ending"), [("again", 1, Ending.CRASHED), ("unanswered", 2, Ending.ENGINE_DOWN)]
)
def test_only_what_does_not_count_is_tried_again(folder: Path, target: str, attempts: int, ending: Ending) -> None:
    outcomes, _ = rolled(folder, target, Scripted("poor"), 1, tries=2)
    assert len(outcomes[0].attempts) == attempts
    assert endings(outcomes) == [ending]


def test_scorer_that_fails_gets_the_same_answer_again_and_costs_the_policy_nothing(folder: Path) -> None:
    engine = Scripted("good", "bad", "none")
    outcomes, batch = rolled(folder, "answer", engine, 3, reward="slow_agent:score")
    assert endings(outcomes) == [Ending.SUCCEEDED, Ending.SCORER_FAILED, Ending.SCORER_FAILED]
    assert len(engine.prompts) == 3
    assert [outcome.counts("lowest") is None for outcome in outcomes] == [False, True, True]
    assert "the judge is down" in (outcomes[1].error or "")
    assert "reward is None" in (outcomes[2].error or "")
    assert batch.account.dropped == {"scorer failed": 2, "group incomplete": 1}


def test_the_docs_list_every_ending() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/endings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (\w+) \|", page, re.MULTILINE)
    assert [(slug, text.lower(), who) for slug, text, who in rows] == [
        (ending.slug, ending.text.lower(), ending.responsible) for ending in Ending
    ]
