"""Groups of rollouts between the store and TransferQueue, which a dictionary stands for. Without Ray."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("verl.protocol")

from omegaconf import OmegaConf
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from lightning_spans.schema.rewards import Reward
from lightning_trainer.backends.verl.steps import collect
from lightning_trainer.backends.verl.steps.collect import RolloutCollector, as_dicts
from lightning_trainer.lineage.manifest import MANIFEST
from support.training.stores import Made, Said, make_store, says, user

pytestmark = pytest.mark.timeout(300)


class Queue:
    """Stands for TransferQueue, which verl saves with a checkpoint and loads before it resumes."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        self.rows: dict[str, dict[str, Any]] = {}

    def kv_put(self, *, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.tags[key] = self.tags.get(key, {}) | tag

    def kv_batch_put(self, *, keys: list[str], fields: Any, tags: list[dict[str, Any]], partition_id: str) -> None:
        self.rows |= dict(zip(keys, as_dicts(fields), strict=True))
        self.tags |= dict(zip(keys, tags, strict=True))

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        return list_of_dict_to_tensordict([{name: self.rows[key][name] for name in select_fields} for key in keys])


def answer(made: Made) -> list[str]:
    """Run what is queued: one call for each attempt, with rewards that differ. Return the calls' ids."""
    recorded = []
    for number, attempt in enumerate(made.store.claim("worker", limit=10)):
        ids = {"rollout_id": attempt.rollout.rollout_id, "attempt_id": attempt.attempt_id}
        made.count += 1
        call = made.call(Said([user("go")], says("yes"), prompt=(1, 2), response=(3, 4)), 0, **ids)
        made.store.add_calls([call])
        made.store.finish(
            attempt.attempt_id, attempt.fence, status="succeeded", rewards=[Reward(value=float(number), **ids)]
        )
        recorded.append(call.call_id)
    return recorded


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_resumed_run_learns_from_groups_that_ended_before_the_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setattr(collect, "tq", queue := Queue())
    made = make_store(tmp_path)
    (tmp_path / "key").write_text("key")
    run = {"target": "a:b", "data": str(tmp_path / "d.jsonl"), "model": "m", "backend": "verl", "group_size": 2}
    (tmp_path / "run.json").write_text(json.dumps({**run, "batch_size": 1, "staleness": 1}))
    (tmp_path / "d.jsonl").write_text("{}\n")
    files = {"url": str(tmp_path / "lightning.db"), "key_file": tmp_path / "key", "config": tmp_path / "run.json"}
    config = OmegaConf.create({"lightning": {name: str(path) for name, path in files.items()}})
    before = RolloutCollector.create(config=config)
    before.generate_sequences(list_of_dict_to_tensordict([{"uid": "u", "global_steps": 1, "index": 0, "task": {}}]))
    recorded = answer(made)
    until(lambda: queue.tags["u"]["status"] == "finished")

    resumed = RolloutCollector.create(config=config)  # in another process, with what TransferQueue has saved
    resumed.note_step(4, list(queue.rows))
    *_, step = [json.loads(line) for line in (tmp_path / MANIFEST).read_text().splitlines()]
    assert (step["step"], step["calls"]) == (4, sorted(recorded))
    assert len(recorded) == 2
    made.store.close()
