"""An agent in another language: a Node program with the official npm `openai` client, which knows nothing of us."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_spans.schema.attempts import AttemptRecord, Rollout
from lightning_spans.store.http import HttpStore
from lightning_spans.store.traces import traces_of
from lightning_trainer.gateway.settings import Routing
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job
from support.fakes import FakeEngine, Served, served
from support.runners import until

AGENT = """
import OpenAI from "openai";

const task = JSON.parse(process.env.LIGHTNING_TASK);
if (task.how === "crash") process.abort();
if (task.how === "hang") setInterval(() => {}, 1000);
else {
  const client = new OpenAI();  // OPENAI_BASE_URL and OPENAI_API_KEY, which the runner sets
  const messages = [{role: "user", content: task.question}];
  const first = await client.chat.completions.create({model: "gpt-9", messages});
  messages.push(first.choices[0].message, {role: "user", content: "shorter"});
  const stream = await client.chat.completions.create({model: "gpt-9", messages, stream: true});
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  console.log("a line that is no reward");
  console.log(JSON.stringify({reward: {agent: text === `short ${task.question}` ? 1 : 0}}));
}
"""


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the program and the client that it imports."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    folder = tmp_path_factory.mktemp("node")
    (folder / "agent.mjs").write_text(AGENT)
    install = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "openai"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        pytest.skip(f"npm can't install openai: {done.stderr.strip()[-200:]}")
    return folder


def answer(prompt: str) -> str:
    question = prompt.rpartition("user\n")[2].partition("<")[0]
    asked = prompt.partition("user\n")[2].partition("<")[0]
    return f"short {asked}" if question == "shorter" else f"a long answer to {asked}"


@pytest.fixture
def server(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.chdir(program)
    routing = Routing(agents=("agent",), unnamed="agent")
    with served(tmp_path, FakeEngine(answer), routing=routing) as server:
        runner = Runner(Job(command="node agent.mjs"), workers=1, concurrency=3, logs=tmp_path / "logs", grace_s=3.0)
        store = HttpStore(server.url, key=server.keys.issue("runner"))
        runner.start()
        runner.serve(store)
        yield server
        runner.stop()
        store.close()


def run(server: Served, *tasks: dict[str, str], timeout_s: float = 60.0) -> list[AttemptRecord]:
    ids = [f"n{number}" for number in range(len(tasks))]
    server.store.enqueue(
        [
            Rollout(rollout_id=i, group_id="g", task=task, max_attempts=1, timeout_s=timeout_s)
            for i, task in zip(ids, tasks, strict=True)
        ]
    )
    until(lambda: all(r.status in {"succeeded", "failed"} for r in server.store.rollouts(rollout_ids=ids)), 90.0)
    return server.store.attempts(rollout_ids=ids)


def test_node_program_is_run_rewarded_and_recorded_token_by_token(server: Served) -> None:
    attempts = run(server, *({"question": f"wie groß ist {n}?"} for n in range(4)))
    assert [(a.status, a.error) for a in attempts] == [("succeeded", None)] * 4
    assert [(r.value, r.agent) for r in server.store.rewards()] == [(1.0, "agent")] * 4
    for attempt in attempts:
        first, second = server.calls(attempt.attempt_id)
        question = attempt.rollout.task["question"]
        assert question in first.request["messages"][0]["content"]
        assert second.choices[0].message["content"] == f"short {question}"
        assert all(call.agent == "agent" and call.prompt_token_ids for call in (first, second))
        assert all(call.choices[0].token_ids and call.choices[0].logprobs for call in (first, second))
    assert {name for trace in traces_of(server.store, rollout_ids=["n0"]) for name in trace.agents} == {"agent"}


def test_node_program_that_crashes_or_hangs_costs_its_own_attempt(server: Served) -> None:
    crashed, well = run(server, {"how": "crash"}, {"question": "1+1"})
    assert (crashed.status, well.status) == ("failed", "succeeded")
    assert "SIGABRT" in (crashed.error or "")


def test_node_program_over_its_time_is_ended(server: Served) -> None:
    [hung] = run(server, {"how": "hang"}, timeout_s=1.0)
    assert hung.status == "timeout"
