"""`lightning-rl init`: the program in each framework that is installed here has two named agents and a tool."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from lightning_conformance.plugins.script import Reply, ScriptedToolCall
from lightning_conformance.plugins.server import ScriptedServer
from lightning_spans.schema.spans import CHAT, EXECUTE_TOOL
from lightning_spans.store import open_store
from lightning_trainer.run.starter import FRAMEWORKS, write_project

PLUGINS = Path(__file__).parents[2] / "plugins"
MODULES = {
    "langgraph": "langgraph", "openai-agents": "agents", "autogen": "autogen_agentchat", "crewai": "crewai",
    "pydantic-ai": "pydantic_ai", "google-adk": "google.adk", "llama-index": "llama_index.llms.openai_like",
    "dspy": "dspy", "strands": "strands", "agno": "agno", "smolagents": "smolagents",
    "haystack": "haystack.components.agents", "agent-framework": "agent_framework.openai",
    "semantic-kernel": "semantic_kernel.agents", "ag2": "ag2", "openai": "openai",
}  # fmt: skip


PROGRAM = """
import asyncio, json
import agent, reward

task = json.loads(open("val.jsonl").readline())
print(json.dumps(reward.score(task, asyncio.run(agent.run(task)))))
"""


def good_model(body: Mapping[str, Any], seen: int) -> Reply:
    """Call the calculator as asked, and write the answer from its result, which is in the last line."""
    text = json.dumps(body["messages"])
    if body.get("tools"):
        expression = re.findall(r"What is ([^?]+)\?", text)[-1]
        tool = body["tools"][0]["function"]["name"]  # Semantic Kernel's has the name of its plugin in front
        return Reply(tool_calls=[ScriptedToolCall(tool, json.dumps({"expression": expression}))])
    return Reply(f"Answer: {re.findall(r'-?[0-9]+', text)[-1]}")


def test_every_plugin_has_a_program_to_begin_with() -> None:
    folders = {path.parent.name for path in PLUGINS.glob("*/pyproject.toml")}
    covered = {packages[0].removeprefix("lightning-") for packages in FRAMEWORKS.values()}
    # Its agent is a command, Claude Code, with a long prompt and many tools: too much for the small model of a project.
    assert folders - covered == {"claude-agent-sdk"}
    assert covered <= folders


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_projects_agents_and_tool_are_seen_and_each_agent_gets_its_reward(framework: str, tmp_path: Path) -> None:
    pytest.importorskip(MODULES[framework].partition(".")[0], reason=f"{framework} is not installed here")
    if MODULES[framework] not in sys.modules and find_spec(MODULES[framework]) is None:  # Haystack hides its spec
        pytest.skip(f"{framework} is not installed here")
    folder = tmp_path / "mine"
    write_project(folder, framework)
    with ScriptedServer(good_model) as server:
        env = {**os.environ, "OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "mine"}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        options = [request.body for request in server.requests if request.body and request.body.get("tools")]
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"caller": 1.0, "answerer": 1.0}
    assert [(body.get("tool_choice"), body.get("parallel_tool_calls")) for body in options] == [("required", False)]
    store = open_store(str(folder / "lightning.db"))
    try:
        spans = list(store.spans())
    finally:
        store.close()
    assert sorted(str(span.agent) for span in spans if span.operation == CHAT) == ["answerer", "caller"]
    assert [span.agent for span in spans if span.operation == EXECUTE_TOOL] == ["caller"]
