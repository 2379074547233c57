"""The official clients of npm: an agent in another language needs nothing of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from support.gateway.client_calls import CALL

MODULES = os.environ.get("CLIENTS_NODE_MODULES")  # the session `clients` installs them and says where


@pytest.mark.skipif(MODULES is None or shutil.which("node") is None, reason="no node, or its clients: see `clients`")
def test_the_clients_of_npm_are_answered_and_recorded(attempt, tmp_path):
    attempt.play(f"I will count. {CALL}", "19", "a stream", "a response", "some events", "a message", "some blocks")
    program = Path(shutil.copy(Path(__file__).with_name("clients.mjs"), tmp_path))
    (tmp_path / "node_modules").symlink_to(Path(MODULES).absolute())
    done = subprocess.run(
        ["node", program, attempt.url, attempt.key], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "chat": "19",
        "stream": "a stream",
        "response": "a response",
        "events": "some events",
        "message": "a message",
        "blocks": "some blocks",
        "refused": True,
    }
    calls = attempt._server.calls(attempt.name)
    assert [bool(call.error) for call in calls] == [False] * 7 + [True]
    assert all(choice.token_ids and choice.logprobs for call in calls[:7] for choice in call.choices)
