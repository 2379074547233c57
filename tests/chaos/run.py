"""Kill server, runner, agents and trainer at random moments, start them again, and see that nothing was lost.

`python tests/chaos/run.py --kills 300 --seed 0`; with --store URL on another database than SQLite, with --only PART for
one part, with --pauses N to stop the parts one after the other for --pause-s seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import httpx
from model import batch_problems, lost, queue_problems, trace_problems
from parts import PARTS, Run

from lightning_conformance.stores.samples import a_span
from lightning_spans.record.delivery.outbox import Spool
from lightning_spans.schema.calls import Call
from lightning_spans.schema.json import to_json
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import open_store

WEIGHTS = {"server": 3, "runner": 1, "agent": 8, "trainer": 2}
MOST_WITHOUT_BATCH = 10  # kills
NEVER = 1_000_000  # steps: more than a disturbed run takes


class Sender:
    """Sends spans, calls and rewards all the time, and remembers those of which it was told that they are kept."""

    def __init__(self, run: Run) -> None:
        self._url, self._headers = run.url, {"authorization": f"Bearer {run.admin}"}
        self.kept: dict[str, list[str]] = {"spans": [], "calls": [], "rewards": []}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _send(self) -> None:
        number = 0
        with httpx.Client(base_url=self._url, headers=self._headers, timeout=5.0, trust_env=False) as client:
            while not self._stop.wait(0.02):
                number += 1
                span = a_span()
                call = Call(
                    call_id=f"probe{number}", response_id="", start_ns=1, end_ns=2, policy="p", policy_version=0
                )
                reward = Reward(
                    value=1.0, rollout_id="probe", attempt_id="probe", source="probe", reward_id=f"p{number}"
                )
                for what, record, name in (
                    ("spans", span, span.span_id), ("calls", call, call.call_id), ("rewards", reward, reward.reward_id),
                ):  # fmt: skip
                    try:
                        answer = client.post(f"/api/{what}", json={what: [to_json(record)]})
                    except httpx.HTTPError:
                        continue
                    if answer.status_code == 200:
                        self.kept[what].append(name)


def disturb(run: Run, kills: int, seed: int, until: float, parts: list[str]) -> Counter[str]:
    """Kill at random moments; but let the trainer make a batch before there were too many without one."""
    draw, killed, since, seen = random.Random(seed), Counter[str](), 0, 0
    while (done := killed.total()) < kills and time.monotonic() < until:
        time.sleep(draw.uniform(0.02, 1.0))
        made = len(lines(run.folder / "batches.jsonl"))
        since, seen = (since, seen) if made == seen else (0, made)
        if since >= MOST_WITHOUT_BATCH and time.monotonic() < until:
            run.look()
            continue
        [part] = draw.choices(parts, [WEIGHTS[part] for part in parts])
        if run.kill(part):
            killed[part] += 1
            since += 1
            if (done + 1) % 50 == 0:
                print(f"{done + 1} kills, {made} batches, {until - time.monotonic():.0f} s to the limit", flush=True)
        run.look()
    return killed


def pause(run: Run, times: int, seconds: float, parts: list[str]) -> int:
    """Stop parts in turn, each for so long, and wait for a batch after each."""
    done = 0
    for number in range(times):
        part = parts[number % len(parts)]
        run.look()
        done += run.pause(part, seconds)
        made, until = len(lines(run.folder / "batches.jsonl")), time.monotonic() + 120.0
        while len(lines(run.folder / "batches.jsonl")) == made:
            if time.monotonic() > until:
                run.failures.append(f"no batch came in 120 s after the {part} was stopped for {seconds:g} s")
                break
            run.look()
            time.sleep(0.25)
    return done


def settle(run: Run, limit_s: float = 180.0) -> None:
    """Let everything that was begun come to its end: no more kills, no trainer, the queue empty, the spool too."""
    run.look()
    run.ready()
    run.stop("trainer")
    store = open_store(run.store)
    until = time.monotonic() + limit_s
    left: Any = "?"
    while time.monotonic() < until and left:
        run.look()
        queued = [r.rollout_id for status in ("queued", "running") for r in store.rollouts(status=status)]
        left = {"rollouts": len(queued), "spooled": Spool(run.folder / "spool").pending()}
        left = left if any(left.values()) else None
        time.sleep(0.25)
    store.close()
    if left:
        print(f"not settled after {limit_s:.0f} s: {left}")
    run.stop("runner", "server")


def check(run: Run, sender: Sender, undisturbed: list[Any]) -> list[str]:
    """Compare what is there with what must be."""
    store = open_store(run.store)
    try:
        spans, calls, rewards = store.spans(), store.calls(), store.rewards()
        rollouts, attempts = store.rollouts(), store.attempts()
    finally:
        store.close()
    told = run.folder / "acks"
    acks = [line.split() for line in told.read_text().splitlines()] if told.exists() else []
    batches = lines(run.folder / "batches.jsonl")
    print(f"{len(rollouts)} rollouts, {len(attempts)} attempts: {dict(Counter(a.status for a in attempts))}")
    print(
        f"{len(batches)} batches of {len({b['step'] for b in batches})} steps; {len(calls)} calls, {len(spans)} spans"
    )
    print(
        f"acknowledged: {Counter(a[0] for a in acks)}, by the sender { ({k: len(v) for k, v in sender.kept.items()}) }"
    )
    return [
        *lost("sent spans", sender.kept["spans"], [s.span_id for s in spans]),
        *lost("sent calls", sender.kept["calls"], [c.call_id for c in calls]),
        *lost("sent rewards", sender.kept["rewards"], [r.reward_id for r in rewards]),
        *lost("answers", [a[2] for a in acks if a[0] == "call"], [c.response_id for c in calls if c.response_id]),
        *lost("spans of agents", [a[2] for a in acks if a[0] == "span"], [s.span_id for s in spans]),
        *queue_problems(rollouts, attempts, rewards),
        *trace_problems(attempts, calls, spans),
        *batch_problems(batches, undisturbed, attempts),
        *run.failures,
    ]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def undisturbed(folder: Path, steps: int, limit_s: float) -> list[Any]:
    """Take the same steps without a kill."""
    run = Run(folder, steps)
    run.start("server")
    run.ready()
    run.start("runner")
    run.start("trainer")
    until = time.monotonic() + limit_s
    while not run.done():
        if time.monotonic() > until:
            raise SystemExit(f"the undisturbed run was not done after {limit_s:.0f} s; see {folder}")
        time.sleep(0.1)
    run.stop("trainer", "runner", "server")
    return lines(folder / "batches.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=36_000.0, help="most seconds of kills")
    parser.add_argument("--store", help="database of the server; SQLite by default")
    parser.add_argument("--only", action="append", choices=PARTS, help="disturb this part alone; may be repeated")
    parser.add_argument("--pauses", type=int, default=0, help="times that a part is stopped, after the kills")
    parser.add_argument("--pause-s", type=float, default=60.0)
    parser.add_argument("--keep", action="store_true", help="leave the folder for a look")
    given = parser.parse_args()
    folder, began = Path(tempfile.mkdtemp(prefix="chaos-")), time.monotonic()
    run = Run(folder / "disturbed", NEVER, given.store)
    run.start("server")
    run.ready()
    run.start("runner")
    run.start("trainer")
    sender = Sender(run)
    try:
        parts = given.only or list(PARTS)
        killed = disturb(run, given.kills, given.seed, time.monotonic() + given.limit, parts)
        paused = pause(run, given.pauses, given.pause_s, parts)
        settle(run)
    finally:
        sender.stop()
        run.stop(*PARTS)
    batches = lines(run.folder / "batches.jsonl")
    steps = max((batch["step"] for batch in batches), default=-1) + 1
    expected = undisturbed(folder / "undisturbed", steps, 60.0 + 10.0 * steps) if steps else []
    problems = check(run, sender, expected)
    took_s = time.monotonic() - began
    print(
        f"{killed.total()} kills {dict(killed)}, {paused} pauses, starts {run.starts}, {took_s:.0f} s,"
        f" seed {given.seed}"
    )
    if not steps:
        problems.append("not one batch was made")
    for problem in problems[:20]:
        print(f"PROBLEM: {problem}")
    if problems or given.keep:
        print(f"see {folder}")
    else:
        shutil.rmtree(folder)
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
