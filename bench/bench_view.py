"""Opening the viewer on a store of a million spans: seconds until each page of its interface is answered.

`python bench/bench_view.py [--spans 1000000] [--store PATH]`. A store that is there already is used again.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from figures import Figure, choose_size
from starlette.testclient import TestClient

from lightning_spans.schema.attempts import End, Rollout
from lightning_spans.schema.json import dumps
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import Span
from lightning_spans.store import Store, open_store
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.kits.view.pages import create_view
from lightning_trainer.kits.view.routes import Views
from lightning_trainer.kits.view.runs import Runs

PER_ROLLOUT = 10  # spans, of 1.5 KB each
GROUP, GROUPS = 8, 25  # a step has 200 rollouts
AT_ONCE = 2000  # rollouts


def fill(store: Store, spans: int) -> None:
    """Write steps of rollouts with agents, calls, tools and rewards."""
    body = dumps({"messages": [{"role": "user", "content": "word " * 250}]}).decode()
    done = 0
    while done < spans // PER_ROLLOUT:
        numbers = range(done, min(done + AT_ONCE, spans // PER_ROLLOUT))
        groups = [f"bench-0:t{n // (GROUP * GROUPS)}-{n // GROUP % GROUPS}" for n in numbers]
        ids = [f"{group}-{n % GROUP}" for group, n in zip(groups, numbers, strict=True)]
        task = {"question": "How far?"}
        store.enqueue([Rollout(rollout_id=i, group_id=g, task=task) for i, g in zip(ids, groups, strict=True)])
        made: list[Span] = []
        ends: list[End] = []
        for attempt in store.claim("bench", limit=AT_ONCE, lease_s=3600):
            own = {"rollout_id": attempt.rollout.rollout_id, "attempt_id": attempt.attempt_id}
            for place in range(PER_ROLLOUT):
                tool = place % 3 == 2
                start = attempt.fence * 10**9 + place * 10**6
                made.append(
                    Span(
                        operation="execute_tool" if tool else "chat", name="search" if tool else "policy",
                        trace_id=f"{attempt.fence:032x}", span_id=f"{attempt.fence:010x}{place:06x}",
                        start_ns=start, end_ns=start + 10**6, agent=("writer", "critic")[place % 2],
                        attributes={"lightning.request": body, "gen_ai.tool.call.arguments": "{}"}, **own,
                    )
                )  # fmt: skip
            rewards = (Reward(value=attempt.fence % 7 / 6, agent="writer", **own),)
            ends.append(End(attempt.attempt_id, attempt.fence, "succeeded", rewards))
        store.add_spans(made)
        store.finish_all(ends)
        done += len(numbers)


def measure() -> list[Figure]:
    """Open a new store: seconds until each page is answered."""
    spans = choose_size(200_000, 4_000)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lightning.db"
        write(path, spans)
        seconds, memory = open_pages(path)
    note = f"a store of {spans:,} spans, wall"
    return [
        *(Figure(what=f"the page's {name}", value=1e3 * took, unit="ms", note=note) for name, took in seconds.items()),
        Figure(what="memory, grown by all of them", value=memory, unit="MiB", note=note),
    ]


def write(path: Path, spans: int) -> None:
    store = open_store(str(path))
    fill(store, spans)
    store.close()


def open_pages(path: Path) -> tuple[dict[str, float], float]:
    """Ask for what each page shows, as a browser does: seconds by name, and by how many MiB the process grew."""
    keys = Keys.fresh()
    client = TestClient(create_view(Views(Runs(store=str(path))), keys))
    client.headers["Authorization"] = f"Bearer {keys.issue('viewer')}"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    group = "bench-0:t0-4"
    rollouts = [f"{group}-{member}" for member in range(GROUP)]
    pages: list[tuple[str, dict[str, object]]] = [
        ("run", {}), ("step", {"step": 0}), ("facts", {"rollout": rollouts}), ("group", {"group": group}),
        ("rollout", {"rollout": rollouts[0]}), ("tools", {"step": 0}), ("rewards", {"step": 0}), ("fleet", {}),
        ("loose", {}), ("search", {"text": "nowhere in it"}),
    ]  # fmt: skip
    seconds: dict[str, float] = {}
    for name, params in pages:
        began = time.perf_counter()
        answer = client.get(f"/api/view/{name}", params={"run": "store", **params})
        seconds[name] = time.perf_counter() - began
        if answer.status_code != 200:
            raise RuntimeError(f"{name}: {answer.text}")
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spans", type=int, default=1_000_000)
    parser.add_argument("--store", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = args.store or Path(folder) / "lightning.db"
        if not path.exists():
            began = time.perf_counter()
            write(path, args.spans)
            print(f"written in {time.perf_counter() - began:.0f} s, {path.stat().st_size / 1e9:.2f} GB")
        seconds, memory = open_pages(path)
        print(json.dumps({"spans": args.spans, "seconds": seconds, "memory_mib": round(memory)}))


if __name__ == "__main__":
    main()
