"""What a step waited for, and the sentence that names the bottleneck."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.schema.calls import Call
from lightning_trainer import TrainConfig
from lightning_trainer.report.progress import one_line
from lightning_trainer.report.speed.waits import RolloutTime, divide_step, name_bottleneck, time_rollouts
from lightning_trainer.rl.rollouts import Outcome

S = 10**9
PLAYERS: dict[str, Any] = {"concurrency": 4, "policies": "a=lora,b=lora"}
CALL = Call(call_id="c", response_id="r", start_ns=0, end_ns=0, policy="p", policy_version=0)


def outcome(begin: int, end: int | None) -> Outcome:
    rollout = Rollout(rollout_id="r", group_id="g", task={})
    attempt = AttemptRecord(
        attempt_id="a", rollout=rollout, number=1, fence=1, worker="w", started_ns=begin, ended_ns=end
    )
    return Outcome(rollout=rollout, attempt=attempt, attempts=(attempt,))


def trace(*calls: tuple[int, int]) -> Trace:
    made = [
        replace(CALL, call_id=f"c{n}", response_id=f"r{n}", start_ns=begin, end_ns=end)
        for n, (begin, end) in enumerate(calls)
    ]
    return Trace.build([], made)


def test_waiting_is_divided_by_what_the_running_attempts_are_at() -> None:
    """Two attempts of 10 s: one is always in a call, the other in none after 2 s; the last 3 s are a judge's."""
    ended = [outcome(0, 10 * S), outcome(0, 10 * S)]
    found = time_rollouts(ended, [trace((0, 10 * S)), trace((0, 2 * S))], [(0, 13 * S)])
    assert found == RolloutTime(sampling=6.0, program=4.0, sampled=10.0)


def test_what_ran_before_the_step_waited_is_not_waited_for() -> None:
    found = time_rollouts([outcome(0, 10 * S)], [trace((0, 10 * S))], [(4 * S, 5 * S), (9 * S, 12 * S)])
    assert found == RolloutTime(sampling=2.0, program=0.0, sampled=10.0)


def test_the_parts_of_a_step_add_up() -> None:
    rolled = RolloutTime(sampling=3.0, program=1.0, sampled=4.0)
    metrics = {"seconds": 7.0, "update_seconds": 2.0, "weights_seconds": 0.5, "tokens_generated": 800.0}
    found = divide_step(rolled, metrics)
    assert found == {
        "waited_for/sampling": 3.0, "waited_for/program": 1.0, "waited_for/learner": 1.5, "waited_for/weights": 0.5,
        "waited_for/other": 1.0, "tokens_per_second": 200.0,
    }  # fmt: skip
    assert one_line({**metrics, **found}) == "seconds 7.0  waited for sampling 3.0"


def steps(count: int, part: str) -> list[dict[str, Any]]:
    metrics = {"seconds": 10.0}
    zero = divide_step(RolloutTime(sampling=0.0, program=0.0, sampled=0.0), {"seconds": 0.0})
    return [{**metrics, **zero, f"waited_for/{part}": 8.0, "waited_for/other": 2.0} for _ in range(count)]


@pytest.mark.parametrize(
    ("part", "options", "apart", "advice"),
    [
        ("sampling", {}, False, "--engine vllm;"),
        ("sampling", {"lora_rank": 8}, True, "--staleness 1"),
        ("sampling", {"lora_rank": 8, "staleness": 1}, True, "--engine-gpus"),
        ("program", {"concurrency": 4}, False, "--concurrency (4)"),
        ("program", {"concurrency": 4, "resample": 1}, False, "s. Raise --concurrency (4)."),
        ("program", {**PLAYERS, "schedule": "alternate:1"}, False, "s. Raise --concurrency (4)."),
        ("program", {**PLAYERS, "opponents": {"a": 1}}, False, "s. Raise --concurrency (4)."),
        ("program", {"concurrency": 4, "task_order": "curriculum"}, False, "s. Raise --concurrency (4)."),
        ("sampling", {"backend": "tinker"}, True, "--staleness 1"),
        ("sampling", {"backend": "tinker"}, False, "s. Lower --max-tokens or --group-size."),
        ("learner", {}, False, "--lora-rank 16"),
        ("learner", {"lora_rank": 8}, True, "--staleness 1"),
        ("weights", {"lora_rank": 8}, True, "--lora-rank"),
    ],
)
def test_the_fifth_step_names_the_bottleneck_and_the_option(
    part: str, options: dict[str, Any], apart: bool, advice: str
) -> None:
    config = TrainConfig(target="app:run", data=Path("t.jsonl"), model="m", **options)
    said = [name_bottleneck(steps(count, part), config, samples_apart=apart) for count in (4, 5, 6)]
    assert said[0] is None
    assert said[2] is None
    assert said[1] is not None
    assert "takes 80% of a step of 10.0 s" in said[1]
    assert advice in said[1]
