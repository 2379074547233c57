"""Two nodes of Ray's on this machine, with a logical device each: world size 2 over gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("verl.protocol")

import ray
from ray.cluster_utils import Cluster

from lightning_spans.store import open_store
from lightning_trainer import TrainConfig, train
from support.training.readings import differs, lines, weights

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def cluster(monkeypatch):
    """Two nodes, started before the run, as on a real cluster."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 10, "num_gpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=10, num_gpus=1)
    nodes.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


class Elsewhere(threading.Thread):
    """A runner as on a machine of its own, where torch can't be imported; it starts when its key is there."""

    def __init__(self, folder: Path, url: str, blocked: Path) -> None:
        super().__init__(daemon=True)
        self.folder, self.url, self.over = folder, url, threading.Event()
        blocked.mkdir()
        (blocked / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = sys.modules['verl'] = None\n")
        self.environment = {**os.environ, "PYTHONPATH": str(blocked)}

    def run(self) -> None:
        key = self.folder / "runner.key"
        while not key.exists() and not self.over.wait(0.2):
            pass
        program = Path(sys.executable).with_name("lightning-rl")
        command = [str(program), "runner", "program:run", "--server", self.url, "--key-file", str(key)]
        logs = self.folder.parent / "logs"
        process = subprocess.Popen([*command, "--workers", "1", "--logs", str(logs)], env=self.environment)
        self.over.wait()
        process.terminate()
        process.wait(30)


@pytest.mark.full
def test_two_nodes_learn_together_with_agents_elsewhere(options, cluster, tmp_path):
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    options |= {"algorithm": "rloo", "nodes": 2, "gpus": 1, "steps": 2, "port": port, "workers": 0}
    address = ray.util.get_node_ip_address()
    elsewhere = Elsewhere(options["out"], f"http://{address}:{port}", tmp_path / "blocked")
    elsewhere.start()
    try:
        result = train(TrainConfig(**options))
    finally:
        elsewhere.over.set()
        elsewhere.join()
    steps = lines(result.folder)
    assert len(steps) == 2
    assert all(step["logprob_correlation"] > 0.9999 and step["grad_norm"] > 0 for step in steps)
    last = result.folder / "checkpoints" / "global_step_2"
    assert len(list((last / "actor").glob("model_world_size_2_rank_*.pt"))) == 2
    assert differs(weights(result.folder / "checkpoints" / "global_step_1"), weights(last)) > 1e-5
    store = open_store(str(result.folder / "lightning.db"))
    try:
        workers = {attempt.worker for attempt in store.attempts()}
    finally:
        store.close()
    assert len(workers) == 1, "the runner elsewhere ran them all"
