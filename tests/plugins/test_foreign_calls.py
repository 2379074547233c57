"""Calls in Gemini's, Ollama's and Cohere's own forms, sent with plain httpx: recorded, named, joined and rerouted."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("openai")

from lightning_conformance.plugins.script import Reply, ScriptedToolCall
from lightning_conformance.plugins.server import ScriptedServer
from lightning_openai.foreign.answers import Answers
from lightning_openai.foreign.known import dialect_of
from lightning_openai.other_clients import OtherCall
from lightning_openai.reading.abandoned import abandoned
from lightning_spans import Attempt, agent, use_attempt
from lightning_spans.chat.body import messages_of, tool_calls, tool_schemas
from lightning_spans.chat.response import read_answer
from lightning_spans.record import prompts, unrecorded
from lightning_spans.schema import spans as names
from support.plugins.foreign_bodies import FORMS, GEMINI, MESSAGES, OLLAMA, TOOLS

SECRETS = {"authorization": "Bearer mine", "x-goog-api-key": "mine", "cookie": "a=mine", "x-own": "mine"}
FAR = "http://far"


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


@pytest.fixture(params=[True, False], ids=["sync", "async"])
def at_once(request):
    return request.param


def chats(recorder, sink):
    assert abandoned.wait(60)  # a stream that was left is ended elsewhere
    recorder.tracer.flush(60)
    return [span for span in sink.spans if span.operation == names.CHAT]


def pieces(library, content):
    """Return a stream that comes a few bytes at a time."""

    class Pieces(library.SyncByteStream, library.AsyncByteStream):
        def __iter__(self):
            return iter([content[at : at + 20] for at in range(0, len(content), 20)])

        async def __aiter__(self):
            for piece in self:
                yield piece

    return Pieces()


class Far:
    """A vendor, who keeps what it was asked."""

    def __init__(self, library, form, status=200):
        self.library, self.form, self.status = library, form, status
        self.requests = []

    def __call__(self, request):
        self.requests.append(request)
        body = json.loads(request.content)
        if self.status != 200:
            return self.library.Response(self.status, json={"error": "no such luck"})
        if "stream" in request.url.path or body.get("stream"):
            stream = pieces(self.library, self.form.stream())
            return self.library.Response(200, stream=stream, headers={"content-type": self.form.kind})
        return self.library.Response(200, json=self.form.whole)


def ask(far, *, at_once=True, stream=False, most=None, **more):
    """Ask with a client of the vendor's; return the response, and the lines of a stream, at most so many."""
    path, fields = far.form.streamed if stream else (far.form.path, {})
    asked = {"url": f"{FAR}{path}?key=mine", "json": {**far.form.body, **fields, **more}}
    options = {"headers": SECRETS, "transport": far.library.MockTransport(far)}

    async def ask_async():
        lines = []
        async with far.library.AsyncClient(**options) as client:
            response = await client.send(client.build_request("POST", **asked), stream=stream)
            if stream:
                async for line in response.aiter_lines():
                    lines.append(line)
                    if len(lines) == most:
                        break
                await response.aclose()
        return response, lines

    if not at_once:
        return asyncio.run(ask_async())
    lines = []
    with far.library.Client(**options) as client:
        response = client.send(client.build_request("POST", **asked), stream=stream)
        if stream:
            for line in response.iter_lines():
                lines.append(line)
                if len(lines) == most:
                    break
            response.close()
    return response, lines


def events_of(lines):
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith(("data: ", "{"))]


def dumped(value, call_id="ID"):
    """Return data as text, with the ids of tool calls made equal."""
    return json.dumps(value, sort_keys=True).replace(call_id, "ID")


def check_asked(body, form):
    messages = [dict(message) for message in messages_of(body)]
    (call,) = [call for message in messages for call in message.get("tool_calls") or ()]
    assert messages[3]["content"] in ("RESULT", '{"result":"RESULT"}')
    messages[3]["content"] = "RESULT"
    assert dumped(messages, call["id"]) == dumped(MESSAGES), form.provider
    assert dumped(body["tools"]) == dumped(TOOLS)
    assert tool_schemas(body) == {"add": TOOLS[0]["function"]["parameters"]}
    assert [body[name] for name in ("temperature", "top_p", "max_tokens", "stop")] == [0.5, 0.9, 20, ["END"]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_one_span_that_says_what_was_asked_and_answered(library, form, at_once, stream, recorder, sink):
    far = Far(library, form)
    with agent("writer"):
        response, lines = ask(far, at_once=at_once, stream=stream)
    if stream:
        assert events_of(lines) == form.events
    else:
        assert response.json() == form.whole
    ((span,), (request,)) = chats(recorder, sink), far.requests
    told = span.attributes
    assert (span.agent, span.status, span.name) == ("writer", "ok", "far")
    assert (told[names.PROVIDER], told[names.ENDPOINT], told[names.STREAMED]) == (
        form.provider, "/chat/completions", stream,
    )  # fmt: skip
    assert (told[names.REQUEST_MODEL], told[names.REQUEST_TEMPERATURE], told[names.REQUEST_MAX_TOKENS]) == (
        "far", 0.5, 20,
    )  # fmt: skip
    assert (told[names.INPUT_TOKENS], told[names.OUTPUT_TOKENS]) == (11, 3)
    assert told[names.FINISH_REASONS] == ["tool_calls"]
    assert names.ABANDONED not in told
    check_asked(json.loads(told[names.REQUEST]), form)
    (choice,) = read_answer(told[names.RESPONSE]).choices
    (call,) = tool_calls(choice.message)
    assert (choice.message["content"], call.name, call.parsed) == ("good", "add", {"a": 1})
    assert request.headers["traceparent"] == f"00-{span.trace_id}-{span.span_id}-01"
    assert request.headers["x-own"] == "mine"
    assert json.loads(request.content) == {**form.body, **(form.streamed[1] if stream else {})}
    assert unrecorded.take() == {}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("calls", [False, True])
def test_the_call_of_an_agent_in_training_is_answered_by_the_policy_in_the_form_it_was_asked_in(
    library, form, at_once, stream, calls, recorder, sink
):
    far = Far(library, form)
    reply = Reply(tool_calls=[ScriptedToolCall("add", '{"a": 1}')]) if calls else Reply("nine teen")
    with ScriptedServer(lambda body, seen: reply) as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",), model="tuned")
        with use_attempt(attempt):
            with agent("writer"):
                response, lines = ask(far, at_once=at_once, stream=stream)
            with agent("checker"):
                ask(far, at_once=at_once, stream=stream)
    (tuned,), (left,) = policy.requests, far.requests
    assert (tuned.path, tuned.headers["authorization"]) == ("/v1/chat/completions", "Bearer k")
    assert (tuned.headers["x-lightning-agent"], tuned.body["model"]) == ("writer", "tuned")
    assert "mine" not in json.dumps([tuned.headers, tuned.path])
    assert not {"num_ctx", "keep_alive", "safetySettings", "options"} & {*tuned.body}
    check_asked(tuned.body, form)
    assert left.headers["x-own"] == "mine"

    span, second = chats(recorder, sink)
    assert tuned.headers["traceparent"] == f"00-{span.trace_id}-{span.span_id}-01"
    assert [one.attributes.get(names.REROUTED) for one in (span, second)] == [True, None]
    assert span.attributes[names.RESPONSE_ID] == tuned.answer["id"]
    assert read_answer(span.attributes[names.RESPONSE]).choices[0].token_ids  # as the gateway sent them
    assert names.ABANDONED not in span.attributes
    assert json.loads(span.attributes[names.REQUEST]) == tuned.body

    # What the program got is read as what it gets from the vendor is.
    assert response.status_code == 200
    parts = events_of(lines) if stream else [response.json()]
    assert len(parts) > 1 or calls or not stream
    if form is GEMINI:  # google-genai's chats forget a turn of which a part has none
        assert all(candidate["content"]["parts"] for part in parts for candidate in part["candidates"])
    path = form.streamed[0] if stream else form.path
    answer = dialect_of(path, form.body).completion(parts)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == (None if calls else "nine teen")
    assert [(call.name, call.parsed) for call in tool_calls(choice["message"])] == [("add", {"a": 1})] * calls
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    assert answer["usage"] == tuned.answer["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_policy_can_not_be_asked_is_an_error_that_names_the_field(form, at_once, stream, recorder, sink):
    library = pytest.importorskip("httpx")
    for field, more in form.refused.items():
        far = Far(library, form)
        with ScriptedServer() as policy:
            attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",), model="tuned")
            with use_attempt(attempt), agent("writer"):
                response, lines = ask(far, at_once=at_once, stream=stream, **more)
            with agent("writer"):
                ask(far, at_once=at_once, stream=stream, **more)
        assert response.status_code == 400
        assert field in (lines[0] if stream else response.text)
        assert policy.requests == []
        assert len(far.requests) == 1  # of the one outside of training, which goes on as it is
        refused, left = chats(recorder, sink)[-2:]
        assert (refused.status, refused.attributes["http.response.status_code"]) == ("error", 400)
        assert field in refused.status_message
        assert (left.status, field in json.loads(left.attributes[names.REQUEST])) == ("ok", True)
        assert left.attributes[names.UNASKABLE] == [field]


@pytest.mark.parametrize("trained", [True, False])
def test_a_refusal_is_an_error_in_the_form_of_who_asked(library, form, at_once, trained, recorder, sink):
    far = Far(library, form, status=429)
    with ScriptedServer(lambda body, seen: Reply("too much", status=429)) as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",) if trained else (), model="tuned")
        with use_attempt(attempt), agent("writer"):
            for stream in (False, True):
                response, lines = ask(far, at_once=at_once, stream=stream)
                assert response.status_code == 429
                text = lines[0] if stream else response.text
                error = json.loads(text).get("error", json.loads(text).get("message"))
                assert "too much" in str(error) if trained else error == "no such luck"
    for span in chats(recorder, sink):
        assert (span.status, span.attributes["http.response.status_code"]) == ("error", 429)


@pytest.mark.parametrize("trained", [True, False])
def test_a_stream_that_is_left_is_recorded_as_far_as_it_was_read(library, form, trained, recorder, sink):
    far = Far(library, form)
    with ScriptedServer(lambda body, seen: Reply("one two three four")) as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",) if trained else (), model="tuned")
        with use_attempt(attempt), agent("writer"):
            ask(far, stream=True, most=1)
    (span,) = chats(recorder, sink)
    assert (span.status, span.attributes[names.ABANDONED]) == ("ok", True)


def test_another_system_prompt_is_put_in_on_the_way(form, recorder, sink):
    library = pytest.importorskip("httpx")
    far = Far(library, form)
    prompts.use({"writer": {"before": "You are writer", "after": "You are a poet"}})
    try:
        with agent("writer"):
            ask(far)
    finally:
        prompts.use({})
    (request,), (span,) = far.requests, chats(recorder, sink)
    assert json.dumps({**form.body}).replace("You are writer", "You are a poet") == json.dumps(
        json.loads(request.content)
    )
    assert messages_of(json.loads(span.attributes[names.REQUEST]))[0]["content"] == "You are a poet"


def test_ollamas_generate_is_a_chat_of_one_message(at_once, recorder, sink):
    library = pytest.importorskip("httpx")
    form = OLLAMA._replace(
        path="/api/generate",
        body={"model": "far", "system": "Be brief.", "prompt": "say nineteen", "stream": False, "suffix": ""},
        whole={"model": "far", "response": "nineteen", "done": True, "done_reason": "length", "eval_count": 2},
        streamed=("/api/generate", {"stream": True}),
    )
    far = Far(library, form)
    ask(far, at_once=at_once)
    with ScriptedServer() as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",), model="tuned")
        with use_attempt(attempt), agent("writer"):
            response, _ = ask(far, at_once=at_once)
            _, lines = ask(far, at_once=at_once, stream=True)
    assert response.json()["response"] == "nineteen"
    assert "".join(event["response"] for event in events_of(lines)) == "nineteen"
    assert [message["content"] for message in policy.requests[0].body["messages"]] == ["Be brief.", "say nineteen"]
    first = chats(recorder, sink)[0]
    assert first.attributes[names.FINISH_REASONS] == ["length"]
    assert read_answer(first.attributes[names.RESPONSE]).choices[0].message["content"] == "nineteen"


@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_durations_are_those_of_the_policys_answer(stream, recorder, sink):
    library = pytest.importorskip("httpx")
    with ScriptedServer(lambda body, seen: Reply("nine teen", delay_s=0.001)) as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",), model="tuned")
        with use_attempt(attempt), agent("writer"):
            response, lines = ask(Far(library, OLLAMA), stream=stream)
    last = events_of(lines)[-1] if stream else response.json()
    assert last["eval_count"] / last["eval_duration"] > 0
    assert last["prompt_eval_count"] / last["prompt_eval_duration"] > 0
    assert last["total_duration"] > 1_000_000
    assert last["load_duration"] == 0
    assert max(last["eval_duration"], last["prompt_eval_duration"]) <= last["total_duration"]


def test_a_call_that_a_framework_reports_says_what_no_policy_can_be_asked(form, recorder, sink):
    library = pytest.importorskip("httpx")
    for field, more in form.refused.items():
        call = OtherCall(recorder, "lightning_x", "x", lambda: {"model": "far", "messages": []})
        call.called(lambda more=more: ask(Far(library, form), **more), lambda _: None)
        told = chats(recorder, sink)[-1].attributes
        assert (told[names.FRAMEWORK], told[names.REROUTABLE], told[names.UNASKABLE]) == ("x", True, [field])


def test_a_page_of_the_programs_own_is_no_call_of_a_model(recorder, sink):
    library = pytest.importorskip("httpx")
    transport = library.MockTransport(lambda request: library.Response(200, json={}))
    with library.Client(transport=transport) as client:
        client.post(f"{FAR}/api/chat", json={"room": 7, "text": "hello"})
        client.post(f"{FAR}/v1beta/models/far:countTokens", json=GEMINI.body)
    assert chats(recorder, sink) == []
    assert unrecorded.take() == {"far/api/chat": 1}


def test_arguments_that_are_no_json_stand_under_a_name_of_their_own(recorder, sink):
    library = pytest.importorskip("httpx")
    reply = Reply(tool_calls=[ScriptedToolCall("add", "{a: 1")])
    with ScriptedServer(lambda body, seen: reply) as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",), model="tuned")
        with use_attempt(attempt), agent("writer"):
            ollama, _ = ask(Far(library, OLLAMA))
            gemini, _ = ask(Far(library, GEMINI))
    (call,) = ollama.json()["message"]["tool_calls"]
    (part,) = gemini.json()["candidates"][0]["content"]["parts"]
    assert call["function"]["arguments"] == part["functionCall"]["args"] == {"arguments": "{a: 1"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("thinking", "shown"), [({}, False), ({"includeThoughts": True}, True)])
def test_gemini_gets_the_reasoning_only_if_it_is_requested(library, stream, thinking, shown):
    path = GEMINI.streamed[0] if stream else GEMINI.path
    body = {**GEMINI.body, "generationConfig": {"thinkingConfig": thinking}}
    dialect = dialect_of(path, body)
    message = {"role": "assistant", "reasoning_content": "Hm.", "content": "19"}
    ends = {"finish_reason": "stop", "index": 0}
    if stream:
        chunks = [{"choices": [{"index": 0, "delta": {name: text}}]} for name, text in message.items()]
        text = "".join(f"data: {json.dumps(one)}\n\n" for one in (*chunks, {"choices": [{"delta": {}, **ends}]}))
        sent = {"content": text, "headers": {"content-type": "text/event-stream"}}
    else:
        sent = {"json": {"choices": [{"message": message, **ends}]}}
    request = library.Request("POST", FAR)
    answers = Answers(dialect, library, request, shows_reasoning=dialect.read(path, body).shows_reasoning)
    response = answers.of(library.Response(200, request=request, **sent))
    parts = [
        part
        for event in (events_of(response.text.splitlines()) if stream else [response.json()])
        for part in event["candidates"][0]["content"]["parts"]
        if part["text"]
    ]
    assert parts == [{"text": "Hm.", "thought": True}] * shown + [{"text": "19"}]


def test_thinking_and_formats_are_asked_in_the_words_of_chat_completions():
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"], "maxLength": 9}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
    google = {"type": "OBJECT", "properties": {"a": {"type": "STRING", "nullable": True, "maxLength": "9"}}}
    asked = [
        (OLLAMA, {"think": True, "format": schema}),
        (GEMINI, {"generationConfig": {
            "thinkingConfig": {"thinkingBudget": 9, "includeThoughts": True},
            "responseMimeType": "application/json", "responseSchema": google,
        }}),
        (GEMINI, {"generation_config": {
            "thinking_config": {"thinking_budget": 9},
            "response_mime_type": "application/json", "response_json_schema": schema,
        }}),
        (FORMS["cohere"], {
            "thinking": {"type": "enabled", "token_budget": 9},
            "response_format": {"type": "json_object", "json_schema": schema},
        }),
    ]  # fmt: skip
    for form, more in asked:
        body = {name: value for name, value in form.body.items() if name != "generationConfig"} | more
        found = dialect_of(form.path, body).read(form.path, body)
        assert not found.untranslated, form.provider
        assert (found.body["reasoning_effort"], found.body["response_format"]) == ("medium", wanted), form.provider
