"""The first stage: live traces newer than those of the last round become tasks, some of them held out."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_spans.adapter.trace import Trace
from lightning_spans.schema.agents import selects
from lightning_spans.store import Store
from lightning_spans.store.traces import each_trace
from lightning_trainer.kits.loop.config import LoopConfig
from lightning_trainer.kits.loop.methods.method import RoundInput
from lightning_trainer.kits.loop.methods.names import find_method
from lightning_trainer.kits.loop.record import LoopRound, StageResult, Waiting
from lightning_trainer.lineage.permits import tenants_of
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.rl.usage import tokens_of
from lightning_trainer.run.data import check_storable
from lightning_trainer.run.live_tasks import tasks_of

TRAIN_NAME: Final = "train.jsonl"
HELD_OUT_NAME: Final = "held-out.jsonl"


@dataclass(frozen=True, slots=True)
class RoundTasks:
    """The tasks of a round.

    Attributes:
        train: tasks to train on.
        held_out: tasks to evaluate on.
        until_ns: start of the newest trace, in Unix nanoseconds.
        tokens: mean tokens of the model calls of a trace; 0 if none was counted.
        left_out: number of new traces that may not be used, by reason.
    """

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    until_ns: int
    tokens: float
    left_out: Mapping[str, int]

    @property
    def count(self) -> int:
        """Number of tasks."""
        return len(self.train) + len(self.held_out)


def select(config: LoopConfig, store: Store, current: LoopRound, since_ns: int) -> StageResult | Waiting:
    """Write the tasks of a round, unless there are too few.

    Raises:
        ConfigError: the method can't work with so many tasks, or see `find_tasks`.
    """
    found = find_tasks(config, store, since_ns)
    if found.count < config.select.least:
        left_out = "".join(f"; {count} left out: {reason}" for reason, count in found.left_out.items())
        return Waiting(f"{found.count} new tasks of {config.agent}, {config.select.least} are needed{left_out}")
    cost_of_training(config, len(found.train))
    for name, tasks in ((TRAIN_NAME, found.train), (HELD_OUT_NAME, found.held_out)):
        write_atomically(current.folder / name, "".join(json.dumps(task) + "\n" for task in tasks).encode())
    return StageResult(
        {
            "tasks": len(found.train),
            "held_out": len(found.held_out),
            "until_ns": found.until_ns,
            "left_out": dict(found.left_out),
        }
    )


def cost_of_training(config: LoopConfig, tasks: int) -> Mapping[str, int]:
    """Return what training on so many tasks takes.

    Raises:
        ConfigError: the method can't work with so many tasks.
    """
    return find_method(config.method).cost(config, RoundInput(data=Path(TRAIN_NAME), out=Path("run")), tasks)


def find_tasks(config: LoopConfig, store: Store, since_ns: int) -> RoundTasks:
    """Read the new tasks. Traces with the same messages are one task, so no task is both trained on and held out.

    Raises:
        ConfigError: the traces belong to several tenants, and none was chosen.
    """
    permits = config.select.permits
    left_out: Counter[str] = Counter()
    tenants: set[str] = set()
    tasks: dict[str, dict[str, Any]] = {}
    newest, tokens, traces = since_ns, 0, 0
    for trace in _new_traces(config, store, since_ns):
        if (reason := permits.reason_against(trace)) is not None:
            left_out[reason] += 1
            continue
        tenants |= tenants_of(trace)
        newest, traces = max(newest, _start_of(trace)), traces + 1
        tokens += sum(sum(tokens_of(node)) for node in trace.chats)
        for task in tasks_of([trace], field=config.select.task_field):
            if _is_storable(task):
                tasks[hashlib.sha256(json.dumps(task["messages"]).encode()).hexdigest()] = task
    permits.check_tenants(tenants)
    ordered = [tasks[digest] for digest in sorted(tasks)]
    size = held_out_count(config, len(ordered))
    return RoundTasks(ordered[size:], ordered[:size], newest, tokens / max(1, traces), left_out)


def held_out_count(config: LoopConfig, count: int) -> int:
    """Return how many of the tasks are held out: at least one, and not all."""
    return min(max(1, round(config.select.held_out * count)), max(1, count - 1))


def _new_traces(config: LoopConfig, store: Store, since_ns: int) -> Iterator[Trace]:
    until_ns = time.time_ns() - int(config.select.min_age_minutes * 60e9)
    for trace in each_trace(store, origin=config.select.origin):
        known = bool(trace.chats) and any(selects((config.agent,), path) for path in trace.agent_paths)
        if known and since_ns < _start_of(trace) <= until_ns:
            yield trace


def _start_of(trace: Trace) -> int:
    return min(node.span.start_ns for node in trace.nodes)


def _is_storable(task: dict[str, Any]) -> bool:
    try:
        check_storable(task)
    except ValueError:
        return False
    return True
