"""The scripted vLLM server, for every test of an engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTED = str(Path(__file__).with_name("scripted"))


@pytest.fixture(scope="session")
def _warm(tmp_path_factory):
    """Path of the socket of a process that scripted servers are forked from."""
    path = tmp_path_factory.mktemp("warm") / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.warm", str(listener.fileno())],
            env={**os.environ, "PYTHONPATH": SCRIPTED},
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            start_new_session=True,  # a signal to the group of a test is not for it
        )
    yield path
    process.communicate()  # it ends with its input


@pytest.fixture
def scripted(tmp_path, monkeypatch, _warm):
    """What the server was asked, in order."""
    log = tmp_path / "scripted.jsonl"
    monkeypatch.setenv("PYTHONPATH", SCRIPTED)
    monkeypatch.setenv("SCRIPTED_LOG", str(log))
    monkeypatch.setenv("SCRIPTED_WARM", str(_warm))
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]
