from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_spans import Attempt, emit_reward, use_attempt
from lightning_spans.errors import RewardError
from lightning_spans.record.program.emit import collecting
from lightning_spans.schema.rewards import as_reward, as_rewards


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_kept_exactly(value):
    assert as_reward(value) == value


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "0.5", b"1", [1.0], object()])
def test_what_is_not_a_finite_number_is_refused(value):
    with pytest.raises(RewardError):
        as_reward(value)


class Unwilling:
    def __float__(self) -> float:
        raise RuntimeError("one of several values is ambiguous")

    def __repr__(self) -> str:
        raise OSError


@pytest.mark.parametrize("value", [None, "an answer of many words " * 1000, [1.0], 10**400, Unwilling()])
def test_what_is_no_number_is_told_shortly_and_with_what_to_do(value):
    with pytest.raises(RewardError, match=r"Return a number from run\(\).*--reward") as told:
        as_reward(value)
    assert len(str(told.value)) < 250


def test_a_number_of_more_digits_than_python_writes_is_refused():
    with pytest.raises(RewardError, match="can't be written"):
        as_reward(10**9999)


def test_numbers_of_other_libraries_and_truth_values_are_taken():
    numpy = pytest.importorskip("numpy")
    assert as_reward(numpy.float32(0.5)) == 0.5
    assert as_reward(True) == 1.0
    assert as_reward(numpy.array([0.25])[0]) == 0.25
    with pytest.raises(RewardError, match=r"array\(\[1\., 2\.\]\) \(ndarray\), not a number"):
        as_reward(numpy.array([1.0, 2.0]))


def test_rewards_by_agent_keep_their_names():
    assert as_rewards({"writer": 1, "checker": 0.5}) == {"writer": 1.0, "checker": 0.5}
    assert as_rewards(2) == {None: 2.0}


@pytest.mark.parametrize("value", [{}, {1: 1.0}, {"writer": None}, {"writer": float("nan")}])
def test_a_broken_dictionary_of_rewards_is_refused(value):
    with pytest.raises(RewardError):
        as_rewards(value)


def test_emitted_rewards_are_collected_for_their_own_attempt():
    with use_attempt(Attempt("r1", "a1")), collecting() as rewards:
        emit_reward(0.25)
        emit_reward(1, agent="writer")
    assert [(r.rollout_id, r.attempt_id, r.value, r.agent, r.source) for r in rewards] == [
        ("r1", "a1", 0.25, None, "emit_reward"),
        ("r1", "a1", 1.0, "writer", "emit_reward"),
    ]


def test_a_reward_in_none_of_a_runners_attempts_is_an_error_and_not_lost_in_silence():
    with (
        use_attempt(Attempt("r1", "a1")),
        collecting(),
        ThreadPoolExecutor(1) as pool,
    ):  # threads of a pool inherit nothing
        refused = pool.submit(emit_reward, 1.0).exception()
    assert isinstance(refused, RewardError)
    assert "outside an attempt" in str(refused)


def test_a_reward_from_a_spawned_process_of_a_worker_is_an_error_and_not_lost_in_silence(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("LIGHTNING_WORKER", "a worker")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        refused = pool.submit(emit_reward, 0.5).exception()
    assert isinstance(refused, RewardError)


def test_a_program_that_nobody_measures_goes_on_after_a_reward_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("lightning_spans.record.program.emit._Process.has_warned", False)
    emit_reward(1.0)
    emit_reward(0.5, agent="writer")
    assert [record.message for record in caplog.records if "no reward is kept" in record.message] == [
        "emit_reward(): no reward is kept, because nothing runs attempts of this program"
    ]
    with pytest.raises(RewardError, match="finite"):
        emit_reward(float("nan"))


def test_an_agent_with_only_its_own_key_can_not_reward_itself():
    with use_attempt(Attempt("r1", "a1", endpoint="http://127.0.0.1:1", key="k")), pytest.raises(RewardError):
        emit_reward(1.0)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no process is forked here")
def test_a_reward_from_a_forked_process_is_an_error_and_not_lost_in_silence():
    with use_attempt(Attempt("r1", "a1")), collecting() as rewards:
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            refused = pool.submit(emit_reward, 0.5).exception()
        emit_reward(0.25)
    assert isinstance(refused, RewardError)
    assert "another process" in str(refused)
    assert [reward.value for reward in rewards] == [0.25]


def test_an_emitted_reward_says_when_it_was_given():
    with use_attempt(Attempt("r1", "a1")), collecting() as rewards:
        before = time.time_ns()
        emit_reward(0.25)
        after = time.time_ns()
    assert before <= rewards[0].given_ns <= after
