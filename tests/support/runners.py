"""A runner in a thread, and what became of its work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_spans.schema.attempts import Attempt, AttemptRecord, Rollout
from lightning_spans.store import Store
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job
from lightning_trainer.runner.worker.command_agent import command_agent, wait_for_spans


def enqueue(store: Store, tasks: list[dict[str, Any]], **options: Any) -> list[str]:
    ids = [f"r{len(store.rollouts()) + number}" for number in range(len(tasks))]
    store.enqueue(
        [Rollout(rollout_id=i, group_id="g", task=task, **options) for i, task in zip(ids, tasks, strict=True)]
    )
    return ids


@contextmanager
def running(store: Store, job: Job, folder: Path, **options: Any) -> Iterator[Runner]:
    settings: dict[str, Any] = {"workers": 1, "concurrency": 8, "grace_s": 0.3, **options}
    runner = Runner(job, logs=folder / "logs", **settings)
    runner.start()
    runner.serve(store)
    try:
        yield runner
    finally:
        runner.stop()


def until(done: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def results(store: Store, ids: list[str]) -> list[list[AttemptRecord]]:
    """Wait until these rollouts have ended; give the attempts of each."""
    until(lambda: all(r.status not in {"queued", "running"} for r in store.rollouts(rollout_ids=ids)))
    attempts = store.attempts(rollout_ids=ids)
    return [[a for a in attempts if a.rollout.rollout_id == i] for i in ids]


async def run_agent(job: Job, task: dict[str, Any], attempt: Attempt) -> Any:
    """Run the job's command on a task, wait for its spans to be sent, and return its result."""
    try:
        return await command_agent(job)(task, attempt)
    finally:
        assert await wait_for_spans(30.0)
