"""What agents that are commands ask for: answered, or left out and on record; see tests/clients/test_commands.py."""

from __future__ import annotations

import json

import httpx
import pytest

from support.fakes import ByteTokenizer, FakeEngine, served
from support.models.chat_templates import DEEPSEEK_V31, MINIMAX

USER = {"role": "user", "content": "Fix add in calc.py"}
BASH = {"name": "Bash", "description": "d", "input_schema": {"type": "object", "properties": {"command": {}}}}
RUN = {"type": "function", "name": "run", "strict": False, "parameters": {"type": "object", "properties": {}}}
EXEC = {
    "type": "custom",
    "name": "exec",
    "description": "Run JavaScript.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
SPAWN = {**RUN, "name": "spawn"}
TEAM = {"type": "namespace", "name": "team", "description": "Sub-agents.", "tools": [SPAWN]}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("commands"), FakeEngine()) as running:
        yield running


@pytest.fixture
def post(request, server):
    server.engine.play(())

    def send(path, body):
        headers = {"authorization": f"Bearer {server.key(request.node.name)}"}
        reply = httpx.post(f"{server.url}{path}", json={"model": "policy", **body}, headers=headers)
        return reply, server.calls(request.node.name)[-1]

    return send


def messages(**more):
    return {"messages": [USER], "max_tokens": 100, "tools": [BASH], **more}


def called(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("thinking", [{"type": "adaptive"}, {"type": "enabled", "budget_tokens": 31999}])
def test_thinking_of_a_model_that_does_not_reason_is_left_out_and_on_record(post, thinking):
    reply, call = post("/v1/messages", messages(thinking=thinking, output_config={"effort": "max"}))
    assert reply.status_code == 200, reply.text
    assert call.sampling["left_out"] == {"reasoning_effort": "max"}
    assert call.request["reasoning_effort"] == "high"  # the highest that chat templates and servers know


def test_effort_without_thinking_is_none_where_thinking_is_disabled(post):
    asked = {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}
    reply, call = post("/v1/messages", messages(**asked))
    assert reply.status_code == 200, reply.text
    assert call.request["reasoning_effort"] == "none"
    assert "left_out" not in call.sampling


def test_reasoning_and_verbosity_of_responses_are_left_out_and_on_record(post):
    asked = {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}}
    reply, call = post("/v1/responses", {"input": "hi", "client_metadata": {"turn_id": "1"}, **asked})
    assert reply.status_code == 200, reply.text
    assert call.sampling["left_out"] == {"reasoning_effort": "low", "verbosity": "low"}


def asked_with(folder, template, effort):
    with served(folder, FakeEngine(tokenizer=ByteTokenizer(template))) as running:
        body = {"model": "policy", "messages": [USER], "reasoning_effort": effort}
        headers = {"authorization": f"Bearer {running.key('a')}"}
        reply = httpx.post(f"{running.url}/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        (call,) = running.calls("a")
        return running.engine.tokenizer.decode(running.engine.prompts[0]), call.sampling


@pytest.mark.parametrize(("effort", "begun"), [("high", "<think>"), ("none", "</think>")])
def test_an_effort_sets_a_templates_variable_thinking(tmp_path, effort, begun):
    prompt, sampling = asked_with(tmp_path, DEEPSEEK_V31, effort)
    assert prompt.endswith(begun)
    assert sampling["template"] == {"thinking": effort == "high"}
    assert "left_out" not in sampling


@pytest.mark.parametrize("effort", ["high", "none"])
@pytest.mark.parametrize("field", ["reasoning_content", "thinking"])  # of a message: no variable of the template
def test_an_effort_for_a_model_that_always_reasons_is_left_out_and_on_record(tmp_path, field, effort):
    prompt, sampling = asked_with(tmp_path, MINIMAX.replace("m.reasoning_content", f"m.{field}"), effort)
    assert prompt.endswith("<think>\n")
    assert sampling["left_out"] == {"reasoning_effort": effort}


def test_edits_of_earlier_thinking_are_left_to_the_template(post):
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]}
    reply, call = post("/v1/messages", messages(context_management=edits))
    assert reply.status_code == 200, reply.text
    assert call.sampling["left_out"] == {"context_management": edits}
    reply, call = post("/v1/messages", messages(context_management={"edits": [{**edits["edits"][0], "keep": "all"}]}))
    assert "left_out" not in call.sampling


def test_compaction_is_left_out_and_on_record(post):
    asked = [{"type": "compaction", "compact_threshold": 1000}]
    reply, call = post("/v1/responses", {"input": "hi", "context_management": asked})
    assert reply.status_code == 200, reply.text
    assert call.sampling["left_out"] == {"context_management": asked}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/v1/responses", {"input": "x", "context_management": [{"type": "summary"}]}, "summary"),
        ("/v1/messages", messages(context_management={"edits": [{"type": "compact_20260112"}]}), "compact_20260112"),
        ("/v1/messages", messages(output_config={"efort": "high"}), "efort"),
        ("/v1/messages", messages(mcp_servers=[{"url": "x"}]), "mcp_servers"),
        ("/v1/messages", messages(tools=[{"type": "web_search_20250305", "name": "web_search"}]), "web_search"),
        (
            "/v1/messages",
            messages(
                tools=[BASH, {"type": "web_search_20250305", "name": "web_search"}],
                tool_choice={"type": "tool", "name": "web_search"},
            ),
            "web_search",
        ),
        ("/v1/messages", messages(tools=[BASH, {"type": "bash_20250124", "name": "bash"}]), "bash_20250124"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
        ("/v1/responses", {"input": "x", "tools": [RUN, {"type": "shell"}]}, "shell"),
        (
            "/v1/responses",
            {"input": "x", "tools": [RUN, {"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice",
        ),
        ("/v1/responses", {"input": [USER, {"type": "configuration_update", "x": 1}]}, "configuration_update"),
        ("/v1/responses", {"input": "x", "tools": [RUN, {**EXEC, "name": "run"}]}, "twice"),
    ],
)
def test_what_can_not_be_done_without_is_refused(post, path, body, says):
    reply, call = post(path, body)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]
    assert says in call.error


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", messages(tools=[BASH, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}])),
        ("/v1/responses", {"input": "x", "tools": [RUN, {"type": "web_search", "external_web_access": False}]}),
    ],
)
def test_tools_that_run_at_a_vendor_are_left_out_where_there_are_others(post, path, body):
    reply, call = post(path, body)
    assert reply.status_code == 200, reply.text
    assert call.sampling["left_out"] == {"tools": [body["tools"][1]["type"]]}
    assert len(call.request["tools"]) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_a_namespace_are_called_by_their_own_name(server, post, stream):
    server.engine.play([called("team__spawn", task="read"), "ok"])
    reply, call = post("/v1/responses", {"input": "x", "tools": [RUN, TEAM], "stream": stream})
    item = _done(reply, stream)[0]
    assert [tool["function"]["name"] for tool in call.request["tools"]] == ["run", "team__spawn"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "team", "spawn")
    assert json.loads(item["arguments"]) == {"task": "read"}
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
    more = [{"role": "user", "content": "x"}, item, output]
    _, second = post("/v1/responses", {"input": more, "tools": [RUN, TEAM]})
    before = call.prompt_token_ids + call.choices[0].token_ids
    assert second.prompt_token_ids[: len(before)] == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_of_free_text_is_a_function_of_one_text(server, post, stream):
    server.engine.play([called("exec", input='text("é")\n'), "ok"])
    tools = {"type": "additional_tools", "role": "developer", "tools": [{**TEAM, "name": "functions", "tools": [EXEC]}]}
    update = {"type": "configuration_update", "reasoning": {"effort": "low"}}
    asked = [tools, {"role": "user", "content": "x"}, update]
    reply, call = post("/v1/responses", {"input": asked, "stream": stream, "reasoning": {"effort": "low"}})
    item = _done(reply, stream)[0]
    (tool,) = call.request["tools"]
    assert tool["function"]["name"] == "exec"
    assert "start: /.+/" in tool["function"]["description"]
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "exec", 'text("é")\n')
    output = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": [_text("done")]}
    _, second = post("/v1/responses", {"input": [*asked, item, output]})
    before = call.prompt_token_ids + call.choices[0].token_ids
    assert second.prompt_token_ids[: len(before)] == before
    if stream:
        deltas = [event["delta"] for event in _events(reply) if event["type"].endswith("input.delta")]
        assert "".join(deltas) == 'text("é")\n'


def test_a_call_of_free_text_that_is_no_json_of_one_text_is_given_as_it_is(server, post):
    server.engine.play([called("exec", code="1")])
    reply, _ = post("/v1/responses", {"input": "x", "tools": [EXEC]})
    assert json.loads(reply.json()["output"][0]["input"]) == {"code": "1"}


def test_a_socket_is_refused_with_the_status_that_sends_clients_to_http(server):
    headers = {"connection": "Upgrade", "upgrade": "websocket", "authorization": f"Bearer {server.key('socket')}"}
    assert httpx.get(f"{server.url}/v1/responses", headers=headers).status_code == 426


def _text(text):
    return {"type": "input_text", "text": text}


def _events(reply):
    return [json.loads(line.removeprefix("data: ")) for line in reply.text.splitlines() if line.startswith("data: ")]


def _done(reply, stream):
    assert reply.status_code == 200, reply.text
    if not stream:
        return reply.json()["output"]
    found = _events(reply)
    whole = found[-1]["response"]["output"]
    assert whole == [event["item"] for event in found if event["type"] == "response.output_item.done"]
    return whole


def test_a_limit_that_messages_demand_is_cut_to_what_the_context_leaves(tmp_path):
    with served(tmp_path, FakeEngine(max_model_len=2000)) as small:
        headers = {"authorization": f"Bearer {small.key('a')}"}
        for words, status in ((["hi"], 200), (["x" * 3000], 400)):
            body = {"model": "policy", "messages": [{"role": "user", "content": words[0]}], "max_tokens": 64_000}
            reply = httpx.post(f"{small.url}/v1/messages", json=body, headers=headers)
            assert reply.status_code == status, reply.text
        chat = httpx.post(f"{small.url}/v1/chat/completions", json={**body, "messages": [USER]}, headers=headers)
        assert chat.status_code == 400  # this form demands no limit: who gives one means it
        call = small.calls("a")[0]
        room = 2000 - len(call.prompt_token_ids)
        assert (call.sampling["max_tokens"], call.sampling["left_out"]) == (room, {"max_tokens": 64_000})
