"""Workers on a Ray cluster of two nodes. Runs in the nox session `ray`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed; `nox -s ray` has it")

from lightning_spans.schema.attempts import Rollout
from support.fakes import Served, served
from support.runners import until

AGENTS = """
import asyncio, os, time
import ray

async def run(task):
    if task.get("how") == "exit":
        os._exit(3)
    if task.get("how") == "secret":
        return float(any(name in os.environ for name in ("LIGHTNING_KEY", "LIGHTNING_KEY_FILE")))
    if task.get("how") == "raise":
        raise ValueError("no good answer")
    await asyncio.sleep(task.get("sleep", 0.0))
    return 1.0

def plain(task):
    time.sleep(task.get("sleep", 0.0))
    return 1.0
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of two cores each, as separate raylets with their own workers."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    (tmp_path / "ray_agents.py").write_text(AGENTS)
    monkeypatch.chdir(tmp_path)
    with served(tmp_path) as server:
        yield server


def enqueue(server: Served, tasks: list[dict[str, Any]], **options: Any) -> list[str]:
    ids = [f"r{len(server.store.rollouts()) + number}" for number in range(len(tasks))]
    server.store.enqueue(
        [Rollout(rollout_id=i, group_id="g", task=task, **options) for i, task in zip(ids, tasks, strict=True)]
    )
    return ids


class Command:
    """`lightning-rl runner --ray` as a process."""

    def __init__(self, server: Served, cluster: Any, target: str, *options: str) -> None:
        command = [sys.executable, "-m", "lightning_trainer.cli", "runner", f"ray_agents:{target}", "--ray"]
        command += ["--server", server.url, "--ray-address", cluster.address, "--concurrency", "2", *options]
        env = {**os.environ, "LIGHTNING_KEY": server.keys.issue("runner")}
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)

    def ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        return told

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        code = self.process.wait(60)
        assert exc[0] is not None or code == 0


def test_node_that_is_killed_costs_no_rollout(server: Served, cluster: Any) -> None:
    second = cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    ids = enqueue(server, [{"sleep": 2.0} for _ in range(24)], max_attempts=1, timeout_s=120.0)
    with Command(server, cluster, "run", "--drain-s", "5") as command:
        assert command.ready()["workers"] == 4
        until(lambda: sum(r.status == "running" for r in server.store.rollouts(rollout_ids=ids)) == 8, 60.0)
        time.sleep(1.0)
        cluster.remove_node(second, allow_graceful=False)
        until(lambda: all(r.status == "succeeded" for r in server.store.rollouts(rollout_ids=ids)), 120.0)
    attempts = server.store.attempts(rollout_ids=ids)
    ended = [attempt.status for attempt in attempts if attempt.status != "succeeded"]
    assert 1 <= len(ended) <= 4  # those that ran on the lost node, and no other
    assert set(ended) <= {"released", "disturbed"}
    assert sorted(a.rollout.rollout_id for a in attempts if a.status == "succeeded") == sorted(ids)
    assert sorted(reward.rollout_id for reward in server.store.rewards()) == sorted(ids)


def test_actor_that_its_agent_ends_costs_that_attempt_alone(server: Served, cluster: Any) -> None:
    ids = enqueue(server, [{"sleep": 1.0}, {"how": "exit"}, {"how": "raise"}, {"how": "secret"}], max_attempts=1)
    with Command(server, cluster, "run", "--workers", "2"):
        until(lambda: all(r.status in {"succeeded", "failed"} for r in server.store.rollouts(rollout_ids=ids)), 90.0)
    assert [r.status for r in server.store.rollouts(rollout_ids=ids)] == [
        "succeeded",
        "failed",
        "failed",
        "succeeded",
    ]
    assert {r.rollout_id: r.value for r in server.store.rewards()} == {ids[0]: 1.0, ids[3]: 0.0}
    errors = {a.rollout.rollout_id: a.error or "" for a in server.store.attempts(rollout_ids=ids)}
    assert "no good answer" in errors[ids[2]]


def test_attempt_over_its_time_ends_on_ray_too(server: Served, cluster: Any) -> None:
    [hung, quick] = enqueue(server, [{"sleep": 60.0}, {}], max_attempts=1, timeout_s=1.0)
    with Command(server, cluster, "plain", "--workers", "1"):
        until(lambda: server.store.rollouts(rollout_ids=[hung])[0].status == "failed", 90.0)
        until(lambda: server.store.rollouts(rollout_ids=[quick])[0].status == "succeeded", 90.0)
    assert server.store.attempts(rollout_ids=[hung])[0].status == "timeout"


def test_more_workers_than_the_cluster_has_room_for_start_as_many_as_fit(server: Served, cluster: Any) -> None:
    ids = enqueue(server, [{} for _ in range(4)], max_attempts=1)
    with Command(server, cluster, "run", "--workers", "50"):
        until(lambda: all(r.status == "succeeded" for r in server.store.rollouts(rollout_ids=ids)), 90.0)


def test_wrong_target_is_told_on_one_screen(server: Served, cluster: Any) -> None:
    command = Command(server, cluster, "nothing")
    assert command.process.wait(60) == 2


def test_no_cluster_is_told_on_one_screen(server: Served) -> None:
    command = [sys.executable, "-m", "lightning_trainer.cli", "runner", "ray_agents:run", "--ray"]
    command += ["--server", server.url, "--ray-address", "127.0.0.1:1"]
    env = {**os.environ, "LIGHTNING_KEY": server.keys.issue("runner")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "no Ray cluster is reached at 127.0.0.1:1" in done.stderr
