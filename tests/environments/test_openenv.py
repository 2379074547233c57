"""`--env URL` with small OpenEnv servers of our own, made and served by openenv itself."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openenv.core")

import httpx
from click.testing import CliRunner, Result

from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.script import Reply, ScriptedToolCall
from lightning_trainer.cli import cli
from lightning_trainer.kits.environments.from_openenv import run

SERVER = Path(__file__).parent / "programs/number_server.py"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("LIGHTNING_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@contextmanager
def serving(kind: str) -> Iterator[str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen(64)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        server = subprocess.Popen([sys.executable, str(SERVER), kind, str(sock.fileno())], pass_fds=[sock.fileno()])
        try:
            # The socket listens already: the first request waits until the server takes it.
            assert httpx.get(f"{url}/schema", timeout=120).status_code == 200
            yield url
        finally:
            server.terminate()
            server.wait()


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    with serving("plain") as url:
        yield url


def rl(*args: str) -> Result:
    return CliRunner().invoke(cli, [*args])


async def played(url: str, script: Any, monkeypatch: Any, **options: Any) -> tuple[float, list[Any]]:
    """Run one episode here, without a runner."""
    with ScriptedServer(script) as model:
        monkeypatch.setenv("OPENAI_BASE_URL", model.url)
        monkeypatch.setenv("OPENAI_MODEL", "gpt")
        reward = await run({"environment": url, "options": options, "task": {"seed": 3}})
    return reward, [request.body for request in model.requests]


def evaluated(url: str, script: Any, *args: str) -> tuple[dict[str, Any], list[Any]]:
    with ScriptedServer(script) as model:
        where = ["--env", url, "--endpoint", model.url, "--model", "gpt", "--workers", "1", "--json", "--out", "e"]
        result = rl("eval", *where, *args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1]), [request.body for request in model.requests]


def test_a_servers_episodes_are_played_by_answers_and_their_rewards_added_up(plain):
    found, bodies = evaluated(
        plain, lambda body, _: Reply(text=str(len(body["messages"]) // 2 - 1)), "--env-tasks", "4"
    )
    # Seeds 0 to 3 are the numbers; each wrong guess costs 0.1.
    assert found["mean"] == pytest.approx(sum(1 - 0.1 * number for number in range(4)) / 4)
    assert found["by_agent"]["agent"]["calls"] == 1 + 2 + 3 + 4
    assert bodies[0]["messages"][1] == {"role": "user", "content": "Guess a number between 0 and 9."}
    assert "guess" in bodies[0]["messages"][0]["content"]


async def test_an_answer_that_is_no_action_costs_a_turn_and_no_attempt(plain, monkeypatch):
    reward, bodies = await played(plain, lambda body, _: Reply(text="I think so"), monkeypatch, max_turns=3)
    assert (reward, len(bodies)) == (0.0, 3)
    assert "This is not a valid action" in bodies[1]["messages"][-1]["content"]
    assert "integer" in bodies[1]["messages"][-1]["content"]  # the server said what is wrong with it


async def test_a_server_with_tools_is_played_by_calls_of_them(monkeypatch):
    def script(body: Any, _seen: int) -> Reply:
        said = [m["content"] for m in body["messages"] if m["role"] == "tool"]
        assert [tool["function"]["name"] for tool in body["tools"]] == ["double"]
        arguments = ["21", '{"number": 4}', '{"number": 21}']
        return (
            Reply(tool_calls=[ScriptedToolCall("double", arguments[len(said)])]) if len(said) < 3 else Reply(text="42")
        )

    with serving("tools") as url:
        reward, bodies = await played(url, script, monkeypatch)
    assert (reward, len(bodies)) == (1.0, 4)
    assert "Double 21" in bodies[0]["messages"][1]["content"]
    assert "no JSON object" in bodies[1]["messages"][-1]["content"]
    assert "42" in bodies[3]["messages"][-1]["content"]


def test_tasks_are_those_that_the_server_lists_by_split():
    from lightning_trainer.environments import open_environment

    with serving("listed") as url:
        opened = open_environment(url, tasks=4, held_out=2)
        assert opened.val is not None
        rows = [json.loads(line)["task"] for line in opened.data.read_text().splitlines()]
        held = [json.loads(line)["task"] for line in opened.val.read_text().splitlines()]
        assert rows == [{"split": "train", "index": index} for index in range(4)]
        assert held == [{"split": "test", "index": index} for index in range(2)]
        chosen = open_environment(url, {"split": "test"}).data.read_text().splitlines()
        assert [json.loads(line)["task"] for line in chosen] == [
            {"split": "test", "index": index} for index in range(3)
        ]
        said = rl("train", "--env", url, "--env-options", "split=nope", "--model", "none")
        assert "has: train, test" in re.sub(r"\s+", " ", said.output)


def test_a_server_that_is_not_there_and_options_that_are_none_are_refused():
    gone = rl("train", "--env", "http://127.0.0.1:9", "--model", "none")
    assert gone.exit_code == 2
    assert "no OpenEnv server answers" in gone.output
    wrong = rl("train", "--env", "http://127.0.0.1:9", "--env-options", "seeds=3", "--model", "none")
    assert wrong.exit_code == 2
    assert "max_turns, reset, split" in re.sub(r"\s+", " ", wrong.output)
