from __future__ import annotations

import asyncio
import json
import sys
from contextlib import closing

import pytest

pytest.importorskip("claude_agent_sdk")

from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, query
from claude_agent_sdk._internal.query import Query
from claude_agent_sdk._internal.transport.subprocess_cli import SubprocessCLITransport

import lightning_claude_agent_sdk
from lightning_conformance.plugins.program import user_environment
from lightning_spans import Attempt, agent, open_store, use_attempt
from lightning_spans.schema import spans as names

# Speaks Claude Code's protocol as far as the SDK needs it; each turn ends with its environment as the result.
COMMAND = """#!{python}
import json, os, sys

def say(**message):
    print(json.dumps(message), flush=True)

def result(**more):
    env = {{k: v for k, v in os.environ.items() if k.startswith(("ANTHROPIC_", "LIGHTNING_", "USERS_"))}}
    say(type="result", subtype="success", duration_ms=1, duration_api_ms=1, num_turns=1, session_id="s",
        **{{"is_error": False, "result": json.dumps(env), **more}})

for line in sys.stdin:
    message = json.loads(line)
    if message["type"] == "control_request":
        response = {{"subtype": "success", "request_id": message["request_id"], "response": {{}}}}
        say(type="control_response", response=response)
    elif message["message"]["content"] == "die":
        say(type="assistant", message={{"id": "m0", "model": "m", "role": "assistant", "content": []}})
        sys.exit(3)
    elif message["type"] == "user":
        for line in {turn!r}:
            say(session_id="s", **line)
        result(**({{"is_error": True, "result": "too long"}} if message["message"]["content"] == "fail" else {{}}))
"""


def said(message_id, *blocks, parent=None):
    body = {"id": message_id, "type": "message", "role": "assistant", "model": "claude-x", "content": list(blocks)}
    usage = {"input_tokens": 3, "output_tokens": 2}
    body |= {"stop_reason": "tool_use" if blocks[-1]["type"] == "tool_use" else "end_turn", "usage": usage}
    return {"type": "assistant", "message": body, "parent_tool_use_id": parent}


def gave(call_id, content, *, error=False, parent=None):
    block = {"type": "tool_result", "tool_use_id": call_id, "content": content, "is_error": error}
    return {"type": "user", "message": {"role": "user", "content": [block]}, "parent_tool_use_id": parent}


def use(call_id, name, **arguments):
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def text(words):
    return {"type": "text", "text": words}


TURN = [
    said("m1", text("I look.")),  # parts of one message come one by one
    said("m1", use("c1", "Bash", command="ls")),
    gave("c1", "calc.py"),
    said("m2", use("c2", "Agent", prompt="ask"), use("c3", "Read", file_path="x")),
    said("m3", text("asked"), parent="c2"),
    gave("c3", [{"type": "text", "text": "no such file"}], error=True),
    gave("c2", "asked"),
    said("m4", text("Done.")),
]


# Two sub-agents at once: the parts of their messages alternate.
BOTH = [
    said("m1", use("c1", "Agent", prompt="left"), use("c2", "Agent", prompt="right")),
    said("left", text("I look."), parent="c1"),
    said("right", text("I look."), parent="c2"),
    said("left", use("c3", "Bash", command="ls"), parent="c1"),
    said("right", use("c4", "Bash", command="ls"), parent="c2"),
    gave("c3", "calc.py", parent="c1"),
    said("left_2", text("found"), parent="c1"),
    gave("c4", "calc.py", parent="c2"),
    said("right_2", text("found"), parent="c2"),
    gave("c1", "found"),
    gave("c2", "found"),
    said("m2", text("Done.")),
]


def written(folder, turn):
    path = folder / "claude"
    path.write_text(COMMAND.format(python=sys.executable, turn=turn))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def command(tmp_path):
    return written(tmp_path, TURN)


async def ask(command, prompt="hello", **options):
    return [one async for one in query(prompt=prompt, options=ClaudeAgentOptions(cli_path=command, **options))]


def spans_of(folder, work):
    store = str(folder / "traces.db")
    with user_environment(folder), lightning_claude_agent_sdk.attach(store=store) as live:
        outcome = asyncio.run(work())
        live.flush(60)
    with closing(open_store(store)) as recorded:
        return outcome, list(recorded.spans())


def test_a_turn_is_an_agent_with_its_calls_and_tools(command, tmp_path):
    messages, spans = spans_of(tmp_path, lambda: ask(command))
    assert messages[-1].subtype == "success"
    assert len(messages) == len(TURN) + 1
    by_id = {span.span_id: span for span in spans}
    [turn] = [span for span in spans if span.operation == names.INVOKE_AGENT]
    assert (turn.agent, turn.parent_id, turn.status) == ("claude", None, "ok")
    chats = [span for span in spans if span.operation == names.CHAT]
    assert [span.attributes[names.RESPONSE_ID] for span in chats] == ["m1", "m2", "m3", "m4"]
    assert [block["type"] for block in json.loads(chats[0].attributes[names.RESPONSE])["content"]] == [
        "text",
        "tool_use",
    ]
    assert {span.agent for span in spans} == {"claude"}
    tools = {span.name: span for span in spans if span.operation == names.EXECUTE_TOOL}
    assert json.loads(tools["Bash"].attributes[names.TOOL_ARGUMENTS]) == {"command": "ls"}
    assert tools["Bash"].attributes[names.TOOL_RESULT] == "calc.py"
    assert (tools["Read"].status, tools["Read"].status_message) == ("error", "no such file")
    assert by_id[chats[2].parent_id].name == "Agent"
    assert all(by_id[span.parent_id] is turn for span in [chats[0], chats[1], chats[3], *tools.values()])


def test_sub_agents_at_once_have_one_span_for_each_call(tmp_path):
    _, spans = spans_of(tmp_path, lambda: ask(written(tmp_path, BOTH)))
    by_id = {span.span_id: span for span in spans}
    chats = {span.attributes[names.RESPONSE_ID]: span for span in spans if span.operation == names.CHAT}
    assert len(chats) == len([span for span in spans if span.operation == names.CHAT]) == 6
    for message, parent in {"left": "c1", "left_2": "c1", "right": "c2", "right_2": "c2"}.items():
        assert by_id[chats[message].parent_id].attributes[names.TOOL_CALL_ID] == parent
    for message in ("left", "right"):
        content = json.loads(chats[message].attributes[names.RESPONSE])["content"]
        assert [block["type"] for block in content] == ["text", "tool_use"]
        assert chats[message].end_ns <= chats[f"{message}_2"].start_ns


def test_output_is_the_same_attached_or_not(command, tmp_path):
    def seen(messages):
        return [repr(one) for one in messages[:-1]]

    messages, _ = spans_of(tmp_path, lambda: ask(command))
    assert seen(messages) == seen(asyncio.run(ask(command)))


def test_each_prompt_of_a_client_is_a_turn(command, tmp_path):
    async def work():
        async with ClaudeSDKClient(ClaudeAgentOptions(cli_path=command)) as client:
            for prompt in ("hello", "fail"):
                with agent("coder"):
                    await client.query(prompt)
                    async for _ in client.receive_response():
                        pass
            await client.query("hello")
            async for _ in client.receive_response():
                pass

    _, spans = spans_of(tmp_path, work)
    turns = [span for span in spans if span.operation == names.INVOKE_AGENT]
    assert [span.agent for span in turns] == ["coder", "coder", "claude"]
    chats = [span for span in spans if span.operation == names.CHAT]
    assert [span.agent for span in chats] == ["coder"] * 8 + ["claude"] * 4


def test_a_turn_that_fails_is_an_error(command, tmp_path):
    async def work():
        await ask(command, "fail")
        with pytest.raises(Exception, match="exit code 3"):  # which one depends on the version
            await ask(command, "die")

    _, spans = spans_of(tmp_path, work)
    turns = [span for span in spans if span.operation == names.INVOKE_AGENT]
    assert [span.status for span in turns] == ["error", "error"]
    assert turns[0].status_message == "too long"


@pytest.mark.parametrize("named", [None, "coder"])
def test_the_command_of_a_trained_agent_is_led_to_the_gateway(named, command, tmp_path):
    attempt = Attempt("r", "a", endpoint="http://127.0.0.1:9", key="attempt-key", agents=("coder",))
    users = {"ANTHROPIC_API_KEY": "users", "USERS_OWN": "kept"}

    async def work():
        with use_attempt(attempt):
            if named is None:
                return await ask(command, env=users)
            with agent(named):
                return await ask(command, env=users)

    messages, _ = spans_of(tmp_path, work)
    found = json.loads(messages[-1].result)
    assert found["USERS_OWN"] == "kept"
    assert found["LIGHTNING_ATTEMPT_ID"] == "a"
    if named is None:
        assert found["ANTHROPIC_API_KEY"] == "users"
        assert "ANTHROPIC_BASE_URL" not in found
    else:
        assert found["ANTHROPIC_API_KEY"] == "attempt-key"
        assert found["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
        assert found["ANTHROPIC_CUSTOM_HEADERS"] == "x-lightning-agent: coder"


def test_detach_restores_everything(command, tmp_path):
    before = SubprocessCLITransport.connect, Query.receive_messages
    spans_of(tmp_path, lambda: ask(command))
    assert (SubprocessCLITransport.connect, Query.receive_messages) == before
