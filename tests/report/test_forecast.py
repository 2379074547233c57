"""The forecast against runs that were measured, and what it says plainly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_trainer.report.forecast import (
    MeasuredUpdate,
    Plan,
    Probe,
    TaskTrial,
    forecast,
    learning_seconds,
    lines,
    sampling_seconds,
    verdict,
)

HALF = TaskTrial(place=0, rewards=(1.0, 0.0), contrast=True)
NEVER = TaskTrial(place=1, rewards=(0.0, 0.0), contrast=False)
ALWAYS = TaskTrial(place=2, rewards=(1.0, 1.0), contrast=False)


def probe(tried: list[TaskTrial], **numbers: object) -> Probe:
    updates = (MeasuredUpdate(3, 3375, 2.0),)
    known = {"rollouts": 64, "rollout_seconds": 8.0, "updates": updates, "tokens_prompt": 18_000}
    return Probe(tried=tried, **{**known, "tokens_generated": 1700, "tokens_in_rows": 9000, **numbers})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tried", "says"),
    [
        ([HALF, NEVER, ALWAYS], "1 of 3 tried tasks has a signal: RL can learn from it"),
        ([NEVER, NEVER], "no rollout earned a reward above 0"),
        ([ALWAYS], "solved already"),
        ([NEVER, ALWAYS], "no signal: in each task all rollouts earn the same"),
        ([replace(HALF, contrast=False)], "no signal: in each task each trained agent earns the same in all rollouts"),
        ([TaskTrial(place=0, rewards=(), contrast=False, failed=2)], "no rollout has a reward"),
    ],
)
def test_verdict_is_plain(tried: list[TaskTrial], says: str) -> None:
    assert verdict(tried).startswith(says)


def test_forecast_of_the_demo_is_within_a_quarter_of_what_was_measured() -> None:
    """Two steps of `nox -s demo` on one machine, in use: the first is what a dry run measures."""
    first = probe(
        [*[HALF] * 3, *[NEVER] * 5], rollout_seconds=123.25, updates=(MeasuredUpdate(3, 3375, 140.16),),
        tokens_prompt=18241, tokens_generated=1612,
    )  # fmt: skip
    found = forecast(first, Plan(step_rollouts=64, steps=2, val_rollouts=64, validations=1))
    measured = (263.67 + 379.34) / 2
    assert found["seconds_step"] == pytest.approx(measured, rel=0.25)
    assert found["seconds_rollouts"] == pytest.approx(111.32, rel=0.25)
    assert found["seconds_run"] == pytest.approx(131.46 + 263.67 + 379.34, rel=0.25)


def test_forecast_grows_with_the_step_and_the_model() -> None:
    small = forecast(probe([HALF]), Plan(step_rollouts=64, steps=10))
    large = forecast(probe([HALF]), Plan(step_rollouts=128, steps=10))
    assert large["seconds_step"] == pytest.approx(2 * small["seconds_step"], abs=0.1)
    hours = [gpu["gpu_hours_run"] for gpu in small["gpu"].values()]
    assert hours == sorted(hours)
    assert [gpu["gpus"] for gpu in small["gpu"].values()] == [1, 2, 16]
    assert any("GPU-hours" in line for line in lines(small))


def test_a_forecast_includes_the_rollouts_that_replace_groups_without_a_signal() -> None:
    quarter = probe([HALF, NEVER, NEVER, NEVER])
    plain = forecast(quarter, Plan(step_rollouts=72, forks=8, steps=10))
    found = forecast(quarter, Plan(step_rollouts=72, forks=8, steps=10, resample=3))
    sampled = 8 + 64 * (1 + 0.75 + 0.75**2 + 0.75**3)
    for name in ("seconds_rollouts", "tokens_prompt_step", "tokens_generated_step"):
        assert found[name] == pytest.approx(plain[name] * sampled / 72, rel=0.01), name
    assert found["signal_step"] == pytest.approx(1 - 0.75**4, abs=1e-4)
    assert found["seconds_update"] > plain["seconds_update"]
    assert any(f"{round(sampled)} rollouts per step" in line for line in lines(found))
    assert not any("replace" in line for line in lines(plain))


def test_rollouts_that_ran_at_once_in_smaller_numbers_are_forecast_at_the_steps_own() -> None:
    """A round of c rollouts at once takes 1 + c / 16 s."""
    two = probe([HALF], rollouts=40, rollout_seconds=4.5, phases=((8, 1.5), (32, 3.0)))
    assert sampling_seconds(two, 64, 64) == pytest.approx(5.0)
    assert sampling_seconds(two, 96, 32) == pytest.approx(9.0)
    judged = replace(two, rollout_seconds=4.5 + 40 * 0.1)
    assert sampling_seconds(judged, 64, 64) == pytest.approx(5.0 + 6.4)
    noisy = replace(two, phases=((8, 1.5), (32, 1.2)), rollout_seconds=2.7)
    assert sampling_seconds(noisy, 64, 64) == pytest.approx(1.2)


def test_a_forecast_says_what_it_rests_on() -> None:
    updates = (MeasuredUpdate(0.5, 600, 2.0), MeasuredUpdate(1, 1125, 2.5))
    one = probe([HALF], rollouts=8, phases=((8, 8.0),), updates=updates)
    said = "\n".join(lines(forecast(one, Plan(step_rollouts=64, steps=10, at_once=32))))
    assert (
        "measured: 8 rollouts, 8 at once (in a step 32, so a step may be faster), and an update on 1,125 packed tokens"
        in said
    )
    assert sampling_seconds(one, 64, 32) == pytest.approx(64.0)
    assert learning_seconds(one, 2175) == pytest.approx(3.5), "the optimiser's step does not grow with the rows"


def test_an_update_is_forecast_by_tokens_that_the_learner_computes() -> None:
    """Eight rows share a prompt of 1,200 tokens and add 50 each. A packed token takes 1 ms, a step 1 s."""
    half, whole = (MeasuredUpdate(rows / 8, 1200 + 50 * rows, 1.0 + (1200 + 50 * rows) / 1000) for rows in (4, 8))
    plan = Plan(step_rollouts=32, steps=1)
    one = probe([HALF], rollouts=8, updates=(half, whole), tokens_in_rows=8 * 1250)
    found = forecast(one, plan)
    assert (found["rows_tokens_step"], found["packed_tokens_step"]) == (40_000, 4 * 1600)
    assert found["seconds_update"] == pytest.approx(1.0 + 6.4)
    begun_alike = replace(whole, groups=3, tokens=200 + 3 * 1400, seconds=1.0 + 4.4)
    three = probe([HALF] * 3, rollouts=24, updates=(whole, begun_alike), tokens_in_rows=24 * 1250)
    assert forecast(three, plan)["packed_tokens_step"] == 200 + 4 * 1400


def test_each_agent_is_told_with_what_it_earned_where_it_was_given_its_own() -> None:
    calls = {"judge": 64, "tagger": 64, "clerk": 8}
    earned = {"judge": 0.25, "tagger": 0.0}
    measured = probe([HALF], calls=calls, earned=earned, trained=["judge", "tagger"], constant={"tagger": 0.0})
    said = lines(forecast(measured, Plan(step_rollouts=64, steps=10)))
    assert "judge: 64 calls, reward 0.250, would be trained" in said
    assert "tagger: 64 calls, reward 0.000 in all 64 rollouts: no signal so far, would be trained" in said
    assert "clerk: 8 calls, not trained" in said
