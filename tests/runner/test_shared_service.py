"""The example of a heavy service that all workers share: loaded once, however many workers ask it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from lightning_spans.schema.attempts import Rollout
from support.fakes import Served, served
from support.runners import until

EXAMPLE = Path(__file__).parents[2] / "examples" / "shared_service"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    for path in EXAMPLE.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INDEX_LOADS", str(tmp_path / "loads"))
    with served(tmp_path) as server:
        tasks = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
        server.store.enqueue(
            [Rollout(rollout_id=f"s{n}", group_id="g", task=tasks[n % len(tasks)], max_attempts=1) for n in range(24)]
        )
        yield server


def run(server: Served, *options: str) -> None:
    command = [sys.executable, "-m", "lightning_trainer.cli", "runner", "agent:run", "--server", server.url, *options]
    command += ["--pass-env", "INDEX_URL"]
    env = {**os.environ, "LIGHTNING_KEY": server.keys.issue("runner")}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
        try:
            until(lambda: all(r.status in {"succeeded", "failed"} for r in server.store.rollouts()), 120.0)
        finally:
            process.terminate()
            assert process.wait(60) == 0
    errors = [attempt.error for attempt in server.store.attempts() if attempt.status != "succeeded"]
    assert errors == []
    assert [reward.value for reward in server.store.rewards()] == [1.0] * 24


@contextmanager
def service(*host: str) -> Iterator[None]:
    """The service behind a URL that the environment names."""
    with subprocess.Popen([sys.executable, "service.py", "0", *host], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        os.environ["INDEX_URL"] = process.stdout.readline().strip().partition("=")[2]
        try:
            yield
        finally:
            del os.environ["INDEX_URL"]
            process.terminate()


def test_command_of_the_readme_works(server: Served, tmp_path: Path) -> None:
    [told] = re.findall(r"^\$ INDEX_URL=\S+ lightning-rl (.*)$", (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    with service():
        command = [sys.executable, "-m", "lightning_trainer.cli", *told.split(), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mean"] == 1.0


def test_workers_reach_one_service_by_its_url(server: Served, tmp_path: Path) -> None:
    with service():
        run(server, "--workers", "3", "--concurrency", "2")
    assert len((tmp_path / "loads").read_text().splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address of the machine only on Linux")
def test_service_of_the_readme_is_reached_at_every_address_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE)
    [host] = re.findall(r"`python service.py 8900 (\S+)`", (EXAMPLE / "README.md").read_text())
    with service(host):
        port = os.environ["INDEX_URL"].rpartition(":")[2]
        with urlopen(f"http://127.0.0.2:{port}/search?q=rollout", timeout=30) as answer:
            assert "rollout" in json.load(answer)["text"]


def test_workers_on_ray_share_one_named_actor(server: Served, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed; `nox -s ray` has it")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        run(server, "--ray", "--ray-address", cluster.address, "--workers", "3", "--concurrency", "2")
    finally:
        cluster.shutdown()
    assert len((tmp_path / "loads").read_text().splitlines()) == 1
