from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from lightning_conformance import PluginConformance, ScriptedServer
from lightning_conformance.plugins.program import PROMPTS, SCENARIOS, instructions
from lightning_conformance.plugins.script import Reply, ScriptedToolCall, agent_of, follow, tool_results, words_of
from lightning_conformance.stores.samples import a_span
from lightning_spans.record.delivery import otlp


def post(url, body, **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, content, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def chat(text, name="writer", **options):
    messages = [{"role": "system", "content": instructions(name)}, {"role": "user", "content": text}]
    return {"model": "m", "messages": messages, **options}


@pytest.fixture
def server():
    with ScriptedServer() as server:
        yield server


# The server


def test_the_server_needs_the_standard_library_and_what_the_core_depends_on():
    code = (
        "import sys; from lightning_conformance.plugins.server import ScriptedServer; ScriptedServer().close();"
        "print(sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)"
        " - set(sys.builtin_module_names)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    third_parties = {name for name in eval(output) if not name.startswith(("_", "lightning", "sitecustomize"))}
    assert third_parties <= {"opentelemetry", "orjson", "importlib_metadata", "zipp", "typing_extensions"}


def test_it_answers_in_the_agents_name_and_remembers_what_it_got(server):
    status, answer = post(f"{server.url}/chat/completions", chat("hello"), Authorization="Bearer sk-1")
    assert status == 200
    assert json.loads(answer)["choices"][0]["message"]["content"] == "writer answers 'hello'"
    (request,) = server.requests
    assert request.body == chat("hello")
    assert request.headers["authorization"] == "Bearer sk-1"
    assert request.answer == json.loads(answer)
    assert (request.path, request.status) == ("/v1/chat/completions", 200)


def test_the_same_request_gets_the_same_answer_from_every_server(server):
    with ScriptedServer() as other:
        answers = [post(f"{s.url}/chat/completions", chat("hello"))[1] for s in (server, other)]
    assert answers[0] == answers[1]


def test_every_answer_has_an_id_of_its_own(server):
    answers = [json.loads(post(f"{server.url}/chat/completions", chat("hello"))[1]) for _ in range(3)]
    assert len({answer["id"] for answer in answers}) == 3


def test_token_ids_come_as_vllm_sends_them(server):
    answer = json.loads(post(f"{server.url}/chat/completions", chat("hello", n=2, logprobs=True))[1])
    assert answer["prompt_token_ids"]
    for choice in answer["choices"]:
        words = words_of(choice["message"]["content"])
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == len(words)
        assert [entry["token"] for entry in choice["logprobs"]["content"]] == words
    assert answer["choices"][0]["message"] != answer["choices"][1]["message"]


@pytest.mark.parametrize("endpoint", ["chat/completions", "responses"])
def test_a_stream_ends_as_the_protocol_says(server, endpoint):
    body = {**chat("hello"), "input": "hello", "stream": True}
    _, sent = post(f"{server.url}/{endpoint}", body)
    events = [block for block in sent.split("\n\n") if block]
    if endpoint == "responses":
        assert events[0].startswith("event: response.created\ndata: ")
        assert json.loads(events[-1].split("data: ")[1])["response"] == server.requests[0].answer
    else:
        assert events[-1] == "data: [DONE]"
        assert "usage" not in server.requests[0].answer


def test_it_fails_as_often_as_it_is_told(server):
    statuses = [post(f"{server.url}/chat/completions", chat("fail 429 2"))[0] for _ in range(3)]
    assert statuses == [429, 429, 200]
    assert [request.status for request in server.requests] == statuses


def test_it_calls_the_tools_it_is_told_and_quotes_their_results(server):
    body = chat('call add {"a": 1}\ncall sub {"b": 2}')
    message = json.loads(post(f"{server.url}/chat/completions", body)[1])["choices"][0]["message"]
    names = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert names == [("add", '{"a": 1}'), ("sub", '{"b": 2}')]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "7"} for call in message["tool_calls"]]
    body["messages"] += [message, *results]
    answer = json.loads(post(f"{server.url}/chat/completions", body)[1])["choices"][0]
    assert answer["finish_reason"] == "stop"
    assert answer["message"]["content"].endswith("[7] [7]")


@pytest.mark.parametrize("stream", [False, True])
def test_it_cuts_the_connection_in_the_middle(server, stream):
    with pytest.raises(http.client.IncompleteRead):
        post(f"{server.url}/chat/completions", chat("cut", stream=stream))


def test_a_slow_answer_holds_up_no_other(server):
    slow = threading.Thread(target=post, args=(f"{server.url}/chat/completions", chat("wait 0.5")))
    slow.start()
    post(f"{server.url}/chat/completions", chat("quick"))
    assert slow.is_alive()
    slow.join()


def test_a_script_of_ones_own_decides():
    with ScriptedServer(lambda body, seen: Reply(f"{body['model']} {seen}")) as server:
        texts = [json.loads(post(f"{server.url}/chat/completions", chat("x"))[1]) for _ in range(2)]
    assert [text["choices"][0]["message"]["content"] for text in texts] == ["m 0", "m 1"]


def test_marks_in_the_path_and_spans_are_taken(server):
    post(f"{server.url_of('m1')}/chat/completions", chat("x"))
    assert post(f"{server.base}/v1/traces", {"spans": []})[0] == 200
    assert post(f"{server.url}/unheard-of", {})[0] == 404
    assert [request.path for request in server.requests] == ["/m1/v1/chat/completions"]
    assert [request.raw for request in server.traces] == [b'{"spans": []}']


def test_spans_that_are_delivered_again_are_there_once(server):
    first, second = a_span(span_id="1" * 16), a_span(span_id="2" * 16)
    for spans in ([first], [first, second]):  # what is not confirmed in time is sent again
        assert post(f"{server.base}/v1/traces", otlp.encode(spans))[0] == 200
    assert server.spans == [first, second]


def test_agents_and_results_are_found_in_both_formats():
    assert agent_of({"instructions": "You are writer."}) == "writer"
    assert (
        agent_of({"input": [{"role": "developer", "content": [{"type": "input_text", "text": "You are x-1."}]}]})
        == "x-1"
    )
    assert agent_of({"messages": [{"role": "user", "content": "You are nobody."}]}) is None
    assert tool_results({"input": [{"type": "function_call_output", "call_id": "c", "output": "7"}]}) == {"c": "7"}
    replied = follow({"input": 'call add {"a": 1}'}, 0)
    assert replied == Reply(tool_calls=[ScriptedToolCall("add", '{"a": 1}')])


# The suite


def programs(**replaced):
    scenarios = dict.fromkeys([*SCENARIOS, "heard_by_callbacks"], lambda self, url: None)
    return {**scenarios, "framework": "openai", **replaced}


def test_every_scenario_says_what_it_does():
    assert set(PROMPTS) == set(SCENARIOS)


def test_a_missing_program_needs_a_reason():
    missing = {name: value for name, value in programs().items() if name != "nested"}
    with pytest.raises(TypeError, match="no program 'nested'"):
        type("TestX", (PluginConformance,), missing)
    with pytest.raises(TypeError, match="no program 'nested'"):
        type("TestX", (PluginConformance,), {**missing, "unsupported": {"nested": ""}})
    type("TestX", (PluginConformance,), {**missing, "unsupported": {"nested": "it has no tools"}})


def test_a_scenario_that_does_not_exist_is_refused():
    with pytest.raises(TypeError, match="no scenario 'nestled'"):
        type("TestX", (PluginConformance,), programs(unsupported={"nestled": "a slip"}))


def test_a_promise_is_not_replaced_without_a_reason():
    replaced = programs(test_attach_twice_is_attach_once=lambda self: None)
    with pytest.raises(TypeError, match="replaces a promise"):
        type("TestX", (PluginConformance,), replaced)
    type("TestX", (PluginConformance,), {**replaced, "overrides": {"test_attach_twice_is_attach_once": "because"}})


def test_every_promise_says_what_to_do_if_it_is_broken():
    promises = [getattr(PluginConformance, name) for name in dir(PluginConformance) if name.startswith("test_")]
    assert len(promises) > 20
    for promise in promises:
        assert "If it fails: " in promise.__doc__, promise.__name__
