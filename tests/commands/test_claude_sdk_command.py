"""The Claude Agent SDK: a program that starts Claude Code, with one line of ours."""

from __future__ import annotations

import pytest

sdk = pytest.importorskip("claude_agent_sdk")
plugin = pytest.importorskip("lightning_claude_agent_sdk")

from lightning_spans import Attempt, agent, use_attempt
from lightning_spans.schema import spans as names
from support.commands import call, results

PROGRAM = "claude"
TITLES = "title=system:sentence-case title"  # asked for as JSON of a schema, which the scripted engine can't be held to


def mending(prompt):
    steps = [
        call("Read", file_path="calc.py"),
        call("Edit", file_path="calc.py", old_string="a - b", new_string="a + b", replace_all=False),
    ]
    return steps[results(prompt)] if results(prompt) < len(steps) else "Mended."


async def test_its_command_is_led_to_the_gateway_and_what_it_reports_joins(commands, project, tmp_path):
    commands.rules(TITLES)
    server = commands.server
    server.engine.play(mending)
    key = server.key(commands.name)
    attempt = Attempt(
        f"rollout of {commands.name}", commands.name, endpoint=server.url, key=key, agents=("coder",), model="policy"
    )
    options = sdk.ClaudeAgentOptions(cwd=str(project), permission_mode="acceptEdits")
    with plugin.attach(store=str(tmp_path / "own.db")) as live, use_attempt(attempt), agent("coder"):
        messages = [message async for message in sdk.query(prompt="Fix add in calc.py", options=options)]
        assert live.flush(60)
    assert messages[-1].result == "Mended."
    assert "a + b" in (project / "calc.py").read_text()
    answered = [one.response_id for one in commands.answered("coder")]
    spans = server.store.spans(attempt_ids=[commands.name])
    chats = [span for span in spans if span.operation == names.CHAT]
    assert [(span.agent, span.attributes[names.RESPONSE_ID]) for span in chats] == [("coder", one) for one in answered]
    assert [span.name for span in spans if span.operation == names.EXECUTE_TOOL] == ["Read", "Edit"]
