"""Modules of ours that one LangChain call enters, in the agent's process and in the gateway's.

A profiler hook in both processes notes the file of every function that is called while one call is made. The call
before it is not counted: it fills caches and opens connections. The model is scripted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import tests_path  # noqa: F401 - for fakes.py
from figures import Figure

MOST = 85.0  # in both processes together


class EnteredModules:
    """Notes the modules of ours whose functions are called in any thread, while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.files: set[str] = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        file = frame.f_code.co_filename
        if self.on and event == "call" and "/src/lightning_" in file:
            self.files.add(file.partition("/src/")[2])


def measure() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__]
        with subprocess.Popen(
            [*command, "gateway", folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            environment = json.loads(server.stdout.readline())
            agent = subprocess.run(
                [*command, "agent", folder],
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                check=True,
            )
            server.stdin.close()
            there = set(json.loads(server.stdout.readline()))
    here = set(json.loads(agent.stdout.splitlines()[-1]))
    return [
        Figure(what="modules entered by one call, both processes", value=len(here | there), unit="", goal=MOST),
        Figure(what="of them in the agent's process", value=len(here), unit=""),
        Figure(what="of them in the gateway's process", value=len(there), unit=""),
    ]


def gateway(folder: Path) -> None:
    """The server's part: say where it is, count from the second call on, and tell the modules when the input ends."""
    from support.fakes import run_attempt, served

    entered = EnteredModules()
    with served(folder) as server:
        run_attempt(server.app, "a")
        key = server.keys.issue("attempt", rollout_id="r", attempt_id="a", fence=1)
        inner, calls = server.app.hot[("POST", "/v1/chat/completions")], []

        async def second(*asgi: Any) -> None:
            calls.append(1)
            entered.on = len(calls) == 2
            await inner(*asgi)

        server.app.hot = {**server.app.hot, ("POST", "/v1/chat/completions"): second}
        told = {"LIGHTNING_ROLLOUT_ID": "r", "LIGHTNING_ATTEMPT_ID": "a", "LIGHTNING_KEY": key}
        told |= {"LIGHTNING_STORE": server.url, "OPENAI_BASE_URL": f"{server.url}/v1", "OPENAI_API_KEY": key}
        print(json.dumps(told), flush=True)
        sys.stdin.read()
        entered.on = False
    print(json.dumps(sorted(entered.files)), flush=True)


def agent() -> None:
    """The program's part: two calls, of which the second counts."""
    entered = EnteredModules()
    from langchain_openai import ChatOpenAI

    import lightning_langchain

    with lightning_langchain.attach() as attachment:
        model = ChatOpenAI(model="policy")
        model.invoke("one")
        attachment.flush()
        entered.on = True
        model.invoke("two")
        attachment.flush()
        entered.on = False
    print(json.dumps(sorted(entered.files)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["gateway"]:
        gateway(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["agent"]:
        agent()
    else:
        for figure in measure():
            print(f"{figure.what:50} {figure.value:6.0f}")
