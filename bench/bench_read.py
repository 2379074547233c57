"""Reading a finished batch: 64 rollouts of 20 model calls, each with its span and its call, joined to their traces."""

from __future__ import annotations

import time
from dataclasses import replace

from agl import others
from figures import Figure, choose_size
from records import call_of, chat_span
from served import DATABASES, database

from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.calls import Call
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Span
from lightning_spans.store import Store, open_store

ROLLOUTS, CALLS = choose_size((64, 20), (16, 2))
OLDER = choose_size(10, 1)  # batches that are in the store already
ELSEWHERE = "nothing known"


def measure() -> list[Figure]:
    found = []
    for kind in DATABASES:
        with database(kind) as (url, _):
            store = open_store(url)
            for batch in range(OLDER + 1):
                fill(store, batch)
            ids = [f"b{OLDER // 2} r{number}" for number in range(ROLLOUTS)]
            read(store, ids)  # imports
            cpu, wall = time.process_time(), time.perf_counter()
            read(store, ids)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            store.close()
        how = f"{ROLLOUTS} rollouts of {CALLS} calls with spans, calls, tokens and rewards, of {OLDER + 1} such batches"
        found += [
            Figure(
                what=f"{kind}, by the clock",
                value=wall * 1e3,
                unit="ms",
                others=others("read", "s (spans alone, over HTTP)", ELSEWHERE),
                note=how,
            ),
            Figure(what=f"{kind}, the reader's CPU", value=cpu * 1e3, unit="ms"),
        ]
    return found


def fill(store: Store, batch: int) -> None:
    """Make a batch as runs leave it behind."""
    names = [f"b{batch} r{number}" for number in range(ROLLOUTS)]
    store.enqueue([Rollout(rollout_id=name, group_id=f"b{batch} g{n // 8}", task={}) for n, name in enumerate(names)])
    spans: list[Span] = []
    calls: list[Call] = []
    for attempt in store.claim("worker", limit=ROLLOUTS):
        place = names.index(attempt.rollout.rollout_id)
        ids = {"rollout_id": attempt.rollout.rollout_id, "attempt_id": attempt.attempt_id}
        for number in range(CALLS):
            span = chat_span((batch * ROLLOUTS + place) * CALLS + number, trace=1 + batch * ROLLOUTS + place)
            spans.append(replace(span, **ids))
            calls.append(replace(call_of(span), **ids))
        store.finish(attempt.attempt_id, attempt.fence, status="succeeded", rewards=[Reward(value=1.0, **ids)])
    store.add_spans(spans)
    store.add_calls(calls)


def read(store: Store, rollout_ids: list[str]) -> None:
    from lightning_spans.store.traces import traces_of

    traces = traces_of(store, rollout_ids=rollout_ids)
    calls = sum(chat.call is not None for trace in traces for chat in trace.chats)
    if (len(traces), calls) != (ROLLOUTS, ROLLOUTS * CALLS):
        raise RuntimeError(f"{len(traces)} traces with {calls} calls were read")
