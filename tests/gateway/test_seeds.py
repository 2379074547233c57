"""Seeds of calls in training: repeatable, and never the same for the rollouts of a group."""

from __future__ import annotations

from lightning_trainer.gateway.calls.seeds import PromptCounter

IDS = (1, 2, 3)


def seed(
    rollout: str,
    attempt: int = 1,
    *,
    failures: int = 0,
    asked: int | None = None,
    counter: PromptCounter | None = None,
) -> int:
    drawing = counter or PromptCounter()
    return drawing.seed(7, rollout, f"{rollout}.{attempt}", "writer", IDS, failures=failures, asked=asked)


def test_rollouts_of_a_group_draw_differently_although_the_program_asks_for_one_seed() -> None:
    assert len({seed(f"run:t0-0-{member}", asked=42) for member in range(8)}) == 8


def test_run_that_is_done_again_draws_the_same_under_a_seed_of_the_programs() -> None:
    assert seed("run-a:t0-0-1", asked=42) == seed("run-b:t0-0-1", asked=42)
    assert seed("run-a:t0-0-1", asked=42) != seed("run-a:t0-0-1", asked=43)


def test_equal_prompts_under_one_seed_draw_the_same_and_without_one_differently() -> None:
    counter = PromptCounter()
    assert seed("run:t0-0-0", asked=42, counter=counter) == seed("run:t0-0-0", asked=42, counter=counter)
    assert seed("run:t0-0-0", counter=counter) != seed("run:t0-0-0", counter=counter)


def test_attempt_after_a_failure_samples_anew_and_repeatably() -> None:
    tries = [seed("run:t0-0-0", 1 + failures, failures=failures) for failures in (0, 1, 2)]
    assert len(set(tries)) == 3
    assert tries == [seed("other:t0-0-0", 1 + failures, failures=failures) for failures in (0, 1, 2)]
    assert len({seed("run:t0-0-0", failures=failures, asked=5) for failures in (0, 1, 2)}) == 3


def test_attempt_after_one_that_was_given_back_draws_the_same() -> None:
    assert seed("run:t0-0-0", 1) == seed("run:t0-0-0", 2)
