"""Model calls in the tasks of pools of processes are recorded once, in the attempt that the pool is started in."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from lightning_conformance import ScriptedServer
from lightning_spans import attach, open_store
from lightning_spans.schema import spans as names

PROGRAM = Path(__file__).with_name("pool_program.py")
POOLS = ("joblib", "dask", "celery", "ray", "gevent")


@pytest.mark.parametrize("pool", POOLS)
def test_a_call_in_a_task_is_recorded_in_its_attempt(pool, tmp_path, monkeypatch):
    if find_spec(pool) is None:
        pytest.skip(f"no {pool}: see the session `pools`")
    monkeypatch.setenv("LIGHTNING_SPOOL", str(tmp_path / "spool"))
    path = os.pathsep.join([str(PROGRAM.parent), *filter(None, sys.path)])
    with ScriptedServer() as server:
        environment = {**os.environ, "PYTHONPATH": path, "POOL_URL": server.url}
        command = [sys.executable, str(PROGRAM), pool]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        calls = len(server.requests)
    with attach("openai", store=str(tmp_path / "pool.db")) as live:  # delivers what a process left in the spool
        assert live.flush(60)
    with closing(open_store(str(tmp_path / "pool.db"))) as store:
        chats = [span for span in store.spans() if span.operation == names.CHAT]
    assert [(span.agent, span.attempt_id, span.status) for span in chats] == [("writer", "a", "ok")] * calls
    assert calls == (2 if pool == "gevent" else 3)
    assert "lightning" not in done.stderr, done.stderr
