"""Rollouts that do nothing, through the durable queue over HTTP: claimed under a lease, ended with a reward."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from agl import others
from figures import Figure, choose_size
from served import DATABASES, RunningServer, server

from lightning_spans.schema.attempts import End, Rollout
from lightning_spans.schema.rewards import Reward
from lightning_spans.store.http import HttpStore

ROLLOUTS = choose_size(2_000, 200)
WORKERS = 16
CLAIMED = 64
ELSEWHERE = "57 (agent-lightning, MongoDB, 32 cores)"


def measure() -> list[Figure]:
    found = []
    for kind in DATABASES:
        with server(kind) as served:
            store = HttpStore(served.url, key=served.key)
            for together in (True, False):
                found += over_http(kind, served, store, together=together)
            store.close()
    return found


def over_http(kind: str, served: RunningServer, store: HttpStore, *, together: bool) -> list[Figure]:
    ids = [f"r{together} {number}" for number in range(ROLLOUTS)]
    store.enqueue([
        Rollout(rollout_id=name, group_id=f"g{number // 8}", task={"question": f"What is {number} + 7?"})
        for number, name in enumerate(ids)
    ])  # fmt: skip
    cpu, wall = served.cpu_s(), time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as pool:
        ended = sum(pool.map(lambda worker: work(store, worker, together=together), range(WORKERS)))
    cpu, wall = served.cpu_s() - cpu, time.perf_counter() - wall
    check(store, ids, ended)
    told = f"ended {CLAIMED} at a time" if together else "each ended by a call of its own"
    how = f"{WORKERS} threads of one client, claimed {CLAIMED} at a time, {told}; CPU of server and database"
    return [
        Figure(
            what=f"{kind}, {told}: rollouts for each second of CPU",
            value=ROLLOUTS / cpu,
            unit="rollouts/s",
            goal=1_000,
            more_is_better=True,
            others=others("rollouts_cpu", "rollouts/s", ELSEWHERE),
            note=how,
        ),
        Figure(
            what="the same by the clock",
            value=ROLLOUTS / wall,
            unit="rollouts/s",
            others=others("rollouts", "rollouts/s", ELSEWHERE),
            note="wall; client, server and database share the machine",
        ),
    ]


def work(store: HttpStore, worker: int, *, together: bool) -> int:
    ended = 0
    while claimed := store.claim(f"worker-{worker}", limit=CLAIMED):
        ends = [
            End(
                one.attempt_id,
                one.fence,
                "succeeded",
                [Reward(rollout_id=one.rollout.rollout_id, attempt_id=one.attempt_id, value=1.0)],
            )
            for one in claimed
        ]
        if together:
            ended += store.finish_all(ends).count("succeeded")
        else:
            for end in ends:
                told = store.finish(end.attempt_id, end.fence, status="succeeded", rewards=end.rewards)
                ended += told == "succeeded"
    return ended


def check(store: HttpStore, ids: list[str], ended: int) -> None:
    rewards = len(store.rewards(rollout_ids=ids))
    if (ended, rewards) != (ROLLOUTS, ROLLOUTS):
        raise RuntimeError(f"{ended} rollouts ended with {rewards} rewards, not {ROLLOUTS}")
