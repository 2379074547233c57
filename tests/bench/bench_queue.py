"""Rollouts through the durable queue: put in, claimed under a lease, ended with a reward, each step on disk."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from figures import Figure

from lightning_spans.rewards import Reward
from lightning_spans.store import Rollout, open_store

ROLLOUTS = 4_000
WORKERS = 16
OTHERS = "57 (agent-lightning, MongoDB, 32 cores)"
BATCH = 64  # rollouts queued at once, as a training step does


def measure() -> list[Figure]:
    rollouts = [
        Rollout(rollout_id=f"r{number}", group_id=f"g{number // 8}", task={"question": f"What is {number} + 7?"})
        for number in range(ROLLOUTS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(str(Path(folder) / "bench.db"))

        def work(worker: int) -> int:
            ended = 0
            while claimed := store.claim(f"worker-{worker}", limit=4):
                for attempt in claimed:
                    reward = Reward(rollout_id=attempt.rollout.rollout_id, attempt_id=attempt.attempt_id, value=1.0)
                    store.finish(attempt.attempt_id, attempt.fence, status="succeeded", rewards=[reward])
                ended += len(claimed)
            return ended

        cpu, wall = time.process_time(), time.perf_counter()
        for start in range(0, ROLLOUTS, BATCH):
            store.enqueue(rollouts[start : start + BATCH])
        with ThreadPoolExecutor(WORKERS) as pool:
            ended = sum(pool.map(work, range(WORKERS)))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        rewards = len(store.rewards())
        store.close()
    if (ended, rewards) != (ROLLOUTS, ROLLOUTS):
        raise RuntimeError(f"{ended} rollouts ended with {rewards} rewards, not {ROLLOUTS}")
    how = f"SQLite, {WORKERS} workers that claim 4 at a time, each step on disk"
    return [
        Figure(
            what="rollouts queued, claimed and ended, for each second of CPU",
            value=ROLLOUTS / cpu,
            unit="rollouts/s",
            goal=1_000,
            more_is_better=True,
            others=OTHERS,
            note=how,
        ),
        Figure(what="the same by the clock", value=ROLLOUTS / wall, unit="rollouts/s", others=OTHERS, note="wall"),
    ]
