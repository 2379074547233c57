from __future__ import annotations

import asyncio
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("dspy")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else LiteLLM asks the net for prices

import dspy
from dspy.adapters.types.tool import Tool, ToolCalls

import lightning_dspy
from lightning_conformance.plugins.program import record
from lightning_conformance.plugins.script import Reply
from lightning_conformance.plugins.server import ScriptedServer
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    REPLAY_PROMPTS,
    TIMEOUT_S,
    PluginConformance,
    instructions,
    write_note,
)
from lightning_spans import Attempt, agent, use_attempt
from lightning_spans.schema import spans as names
from lightning_spans.schema.replays import Replay

try:
    from dspy._vendor.lm15.transports import StdlibTransport
except ImportError:  # before 3.4 every call is LiteLLM's
    StdlibTransport = None


class Plain(dspy.ChatAdapter):
    """Says nothing but what a signature says, so that the server knows who asks."""

    def __init__(self):
        super().__init__(use_native_function_calling=True)

    def format(self, signature, demos, inputs):
        return [{"role": "system", "content": signature.instructions}, *inputs["messages"]]

    def parse(self, signature, completion):
        return {"answer": completion}

    def __call__(self, *args, **kwargs):
        return dspy.Adapter.__call__(self, *args, **kwargs)

    async def acall(self, *args, **kwargs):
        return await dspy.Adapter.acall(self, *args, **kwargs)


def model(url, **options):
    options = {"cache": False, "api_key": os.environ.get("OPENAI_API_KEY", "sk"), **options}
    return dspy.LM(f"openai/{MODEL}", api_base=url, **options)


def signature(name, *, tools=False):
    fields = {"messages": (list, dspy.InputField()), "answer": (str, dspy.OutputField())}
    if tools:
        fields |= {"tools": (list[Tool], dspy.InputField()), "tool_calls": (ToolCalls, dspy.OutputField())}
    return make_signature(name, fields)


def make_signature(name, fields, called=None):
    from dspy.signatures.signature import make_signature

    return make_signature(fields, instructions(name), called or name)


def said(prompt):
    return [{"role": "user", "content": prompt}]


def ask(name, url_or_model, prompt, *, named=True, **options):
    given = model(url_or_model, **options) if isinstance(url_or_model, str) else url_or_model
    with dspy.context(lm=given, adapter=Plain()):
        asks = signature(name) if named else make_signature(name, "messages: list -> answer: str", called="Signature")
        return dspy.Predict(asks)(messages=said(prompt)).answer


async def aask(name, url, prompt, **options):
    with dspy.context(lm=model(url, **options), adapter=Plain()):
        return (await dspy.Predict(signature(name)).acall(messages=said(prompt))).answer


async def ask_all(who, url, scenario):
    return await asyncio.gather(*(aask(name, url, PROMPTS[scenario]) for name in who))


def stream(name, url, prompt, **options):
    async def work():
        with dspy.context(lm=model(url, **options), adapter=Plain()):
            pieces = dspy.streamify(dspy.Predict(signature(name)))(messages=said(prompt))
            return [type(piece).__name__ async for piece in pieces]

    return asyncio.run(work())


class Caller(dspy.Module):
    """An agent of the user's own, which carries out the tool calls that its model asks for."""

    def __init__(self, name, *tools):
        super().__init__()
        self.who = name
        self.functions = {tool.__name__: tool for tool in tools}
        setattr(self, name, dspy.Predict(signature(name, tools=True)))

    def forward(self, prompt):
        messages, tools = said(prompt), [Tool(function) for function in self.functions.values()]
        while True:
            answer = getattr(self, self.who)(messages=messages, tools=tools)
            if not (answer.tool_calls and answer.tool_calls.tool_calls):
                return answer
            asked = dspy.settings.lm.history[-1]["outputs"][0]["tool_calls"]
            messages = [*messages, {"role": "assistant", "content": None, "tool_calls": [plain(one) for one in asked]}]
            for call, given in zip(answer.tool_calls.tool_calls, asked, strict=True):
                try:
                    result = str(call.execute(self.functions))
                except Exception as error:
                    result = f"failed: {error}"
                messages.append({"role": "tool", "tool_call_id": plain(given)["id"], "content": result})


def plain(call):
    return call if isinstance(call, dict) else call.model_dump()


def call(name, url, prompt, *tools):
    with dspy.context(lm=model(url), adapter=Plain()):
        return type(name, (Caller,), {})(name, *tools)(prompt=prompt).answer


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def fail(reason: str) -> str:
    """Fail."""
    raise ValueError(reason)


def note(text: str) -> str:
    """Note a text."""
    return write_note(text)


class TestConformance(PluginConformance):
    framework = "dspy"
    unsupported = {
        "abandoned": "DSPy reads a model's stream to the end, whoever listens",
        "unreadable_arguments": "DSPy makes no tool call of them",
        "effects_awaited": "a tool call is carried out at once; `Tool.acall` has a test of its own",
        "retried": "DSPy tries again by itself, in a call of its own",
        "cut": "what DSPy makes of a stream that breaks off depends on how far it is",
    } | (
        {"choices": "DSPy's own client asks once for each choice"}
        if StdlibTransport
        else dict.fromkeys(["responses", "responses_streaming"], "instructions went as the user's words before 3.4")
    )

    def patched(self):
        return [
            (dspy.Module, "__call__"),
            (dspy.Module, "acall"),
            (Tool, "__call__"),
            (ToolCalls.ToolCall, "execute"),
            *([(StdlibTransport, "stream")] if StdlibTransport else []),
        ]

    def one_agent(self, url):
        return ask("writer", url, PROMPTS["one_agent"])

    def unnamed(self, url):
        with agent("writer"):
            return ask("writer", url, PROMPTS["unnamed"], named=False)

    def several_agents(self, url):
        return [ask(name, url, PROMPTS["several_agents"]) for name in ("writer", "rewriter", "writer_2")]

    def namesakes(self, url):
        class Team(dspy.Module):
            def __init__(self):
                super().__init__()
                self.writer = dspy.Predict(signature("writer"))

            def forward(self, messages):
                return self.writer(messages=messages)

        with dspy.context(lm=model(url), adapter=Plain()):
            teams = [type(team, (Team,), {})() for team in ("red", "blue")]
            return [team(messages=said(PROMPTS["namesakes"])).answer for team in teams]

    def streaming(self, url):
        return stream("writer", url, PROMPTS["streaming"])

    def responses(self, url):
        return ask("writer", url, PROMPTS["responses"], model_type="responses")

    def responses_streaming(self, url):
        return stream("writer", url, PROMPTS["responses_streaming"], model_type="responses")

    def choices(self, url):
        with dspy.context(lm=model(url), adapter=Plain()):
            answers = dspy.Predict(signature("writer"), n=2)(messages=said(PROMPTS["choices"]))
        return answers.completions.answer

    def tool_call(self, url):
        return call("caller", url, PROMPTS["tool_call"], add)

    def parallel_tools(self, url):
        return call("caller", url, PROMPTS["parallel_tools"], add)

    def tool_error(self, url):
        return call("caller", url, PROMPTS["tool_error"], fail)

    def unknown_tool(self, url):
        return call("caller", url, PROMPTS["unknown_tool"], add)

    def effects(self, url):
        return call("caller", url, REPLAY_PROMPTS["effects"], note)

    def effect_fails(self, url):
        return call("caller", url, REPLAY_PROMPTS["effect_fails"], note)

    def parallel(self, url):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda name: ask(name, url, PROMPTS["parallel"]), ["left", "right"]))

    def nested(self, url):
        def ask_writer(question: str) -> str:
            """Ask the writer."""
            return ask("writer", url, question)

        ask_writer.__name__ = "ask"
        return call("boss", url, PROMPTS["nested"], ask_writer)

    async def asynchronous(self, url):
        return await ask_all(["writer", "rewriter"], url, "asynchronous")

    async def awaited(self, url):
        return await aask("writer", url, PROMPTS["awaited"])

    def threads(self, url):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda number: ask("writer", url, f"hello {number}"), range(2)))

    def failed(self, url):
        with pytest.raises(Exception) as error:  # noqa: PT011 - which one depends on the version
            ask("writer", url, PROMPTS["failed"], num_retries=0)
        return type(error.value).__name__

    def slow(self, url):
        with pytest.raises(Exception) as error:  # noqa: PT011 - which one depends on the version
            ask("writer", url, PROMPTS["slow"], num_retries=0, timeout=TIMEOUT_S)
        return type(error.value).__name__

    def heard_by_callbacks(self, url):
        heard = Hears()
        with dspy.context(callbacks=[heard]):
            answers = [ask("writer", given, PROMPTS["one_agent"]) for given in (url, Told("told"))]
        return [*answers, heard.seen]

    async def heard_by_callbacks_of_an_asynchronous_call(self, url):
        heard = Hears()
        with dspy.context(callbacks=[heard]):
            return [await aask("writer", url, PROMPTS["one_agent"]), heard.seen]


class Hears(dspy.utils.BaseCallback):
    """A user's own callbacks."""

    def __init__(self):
        self.seen = []

    def on_module_start(self, call_id, instance, inputs):
        self.seen.append(type(instance).__name__)

    def on_lm_start(self, call_id, instance, inputs):
        self.seen.append(sorted(inputs))

    def on_lm_end(self, call_id, outputs, exception=None):
        self.seen.append(str(exception) if exception else type(outputs).__name__)


def paths(found):
    """Return the paths of the agents that made the calls, in order."""
    by_id = {span.span_id: span for span in found.spans}
    return [by_id[chat.parent_id].attributes[names.AGENT_PATH] for chat in found.chats]


def fielded(**fields):
    """Return what DSPy's own adapter reads as these fields."""
    parts = [f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields.items()]
    return Reply("".join(parts) + "[[ ## completed ## ]]")


def answers(body, seen):
    return fielded(reasoning="because", answer="done")


class Summarize(dspy.Signature):
    """Sum it up."""

    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


class Pipeline(dspy.Module):
    def __init__(self):
        super().__init__()
        self.draft = dspy.ChainOfThought("question -> answer")
        self.judges = [dspy.Predict("question -> answer"), dspy.Predict("question -> answer")]
        self.by_name = {"last": dspy.Predict("question -> answer")}

    def forward(self, question):
        self.draft(question=question)
        for judge in self.judges:
            judge(question=question)
        return self.by_name["last"](question=question)


def scripted(script, program):
    with ScriptedServer(script) as server, dspy.context(lm=model(server.url), adapter=dspy.ChatAdapter()):
        return program()


def test_a_modules_name_is_that_of_the_attribute_which_holds_it(found_of):
    found = found_of(lambda url: scripted(answers, lambda: Pipeline()(question="hello").answer))
    assert found.output == "done"
    assert [chat.agent for chat in found.chats] == ["draft", "judges[0]", "judges[1]", "by_name['last']"]
    assert paths(found) == [f"Pipeline/{chat.agent}" for chat in found.chats]
    assert len({span.trace_id for span in found.spans}) == 1


def test_a_module_that_nobody_holds_is_named_by_its_signature_or_its_class(found_of):
    def program():
        dspy.Predict(Summarize)(question="hello")
        dspy.ChainOfThought(Summarize)(question="hello")  # DSPy makes a nameless signature of it
        return dspy.Predict("question -> answer")(question="hello").answer

    found = found_of(lambda url: scripted(answers, program))
    assert [chat.agent for chat in found.chats] == ["Summarize", "ChainOfThought", "Predict"]


def test_a_program_that_is_awaited_is_recorded_alike(found_of):
    class Asked(dspy.Module):
        def __init__(self):
            super().__init__()
            self.draft = dspy.ChainOfThought("question -> answer")

        async def aforward(self, question):
            return await self.draft.acall(question=question)

    async def work():
        return (await Asked().acall(question="hello")).answer

    found = found_of(lambda url: scripted(answers, lambda: asyncio.run(work())))
    assert paths(found) == ["Asked/draft"]


def test_modules_that_dspy_runs_in_threads_keep_their_names_and_their_trace(found_of):
    class Both(dspy.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = dspy.Predict(Summarize), dspy.Predict(Summarize)

        def forward(self, question):
            given = dspy.Example(question=question).with_inputs("question")
            return dspy.Parallel(num_threads=2, disable_progress_bar=True)([(self.left, given), (self.right, given)])

    found = found_of(lambda url: scripted(answers, lambda: len(Both()(question="hello"))))
    assert sorted(paths(found)) == ["Both/left", "Both/right"]
    assert len({span.trace_id for span in found.spans}) == 1


def test_an_agent_of_dspys_calls_its_tools_in_words(found_of):
    def script(body, seen):
        text = body["messages"][-1]["content"]
        if "trajectory" not in body["messages"][0]["content"] or "finish" not in body["messages"][0]["content"]:
            return fielded(reasoning="so", answer="5")
        if "observation_1" in text:
            return fielded(next_thought="done", next_tool_name="finish", next_tool_args="{}")
        if "observation_0" in text:
            return fielded(next_thought="try", next_tool_name="add", next_tool_args='{"a": 2, "b": 3}')
        return fielded(next_thought="try", next_tool_name="fail", next_tool_args='{"reason": "out of order"}')

    class Solver(dspy.Module):
        def __init__(self):
            super().__init__()
            self.caller = dspy.ReAct("question -> answer", tools=[add, fail])

        def forward(self, question):
            return self.caller(question=question)

    found = found_of(lambda url: scripted(script, lambda: Solver()(question="2 + 3").answer))
    assert found.output == "5"
    assert {chat.agent for chat in found.chats} == {"caller"}
    assert [(tool.name, tool.agent, tool.status) for tool in found.tools] == [
        ("fail", "caller", "error"),
        ("add", "caller", "ok"),
    ]
    assert found.tools[1].attributes[names.TOOL_RESULT] == "5"


def react(script, *tools):
    """Run an agent of DSPy's, and give what it says of its work."""

    class Solver(dspy.Module):
        def __init__(self):
            super().__init__()
            self.caller = dspy.ReAct("question -> answer", tools=list(tools), max_iters=3)

        def forward(self, question):
            return self.caller(question=question)

    return lambda url: scripted(script, lambda: Solver()(question="2 + 3").trajectory)


def test_a_model_is_told_of_a_tools_failure_as_without_us(tmp_path):
    def script(body, seen):
        text = body["messages"][-1]["content"]
        if "next_thought" not in text:
            return fielded(reasoning="so", answer="5")
        if "observation_0" in text:
            return fielded(next_thought="done", next_tool_name="finish", next_tool_args="{}")
        return fielded(next_thought="try", next_tool_name="fail", next_tool_args='{"reason": "out of order"}')

    program = react(script, fail)
    plain = record(program, tmp_path / "plain", framework="dspy", tracer=None)
    found = record(program, tmp_path / "attached", framework="dspy", tracer="embedded")
    assert "in fail" in plain.output["observation_0"]
    assert found.output == plain.output
    assert [tool.status for tool in found.tools] == ["error"]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (fielded(next_thought="try", next_tool_name="multiply", next_tool_args='{"a": 2}'), "there is no tool"),
        (Reply('{"next_thought": "", "next_tool_name": "multiply", "next_tool_args": {"a": 2}}'), "there is no tool"),
        (fielded(next_thought="try", next_tool_name="add", next_tool_args="2 and 3"), "next_tool_args"),
    ],
    ids=["fields", "json", "arguments"],
)
def test_a_tool_call_in_words_that_dspy_refuses_is_an_error(asked, why, found_of):
    asks = iter([asked])

    def script(body, seen):
        if "next_thought" not in body["messages"][-1]["content"]:
            return fielded(reasoning="so", answer="5")
        finish = {"next_thought": "done", "next_tool_name": "finish", "next_tool_args": {}}
        return next(asks, Reply(json.dumps(finish)))

    found = found_of(react(script, add))
    (tool,) = found.tools
    assert (tool.agent, tool.status) == ("caller", "error")
    assert why in tool.status_message


def test_a_tool_that_does_not_exist_is_an_error(found_of):
    def multiply():
        tools = [{"a": 2}]
        return ToolCalls.from_dict_list([{"name": "multiply", "args": tools[0]}])

    def program(url):
        class Asked(dspy.Module):
            def forward(self):
                with pytest.raises(ValueError, match="not found"):
                    multiply().tool_calls[0].execute({"add": add})

        Asked()()

    (tool,) = found_of(program).tools
    assert (tool.name, tool.agent, tool.status) == ("multiply", "Asked", "error")
    assert json.loads(tool.attributes[names.TOOL_ARGUMENTS]) == {"a": 2}


def test_a_tool_call_finds_the_programs_own_function(found_of):
    def program(url):
        double = lambda number: 2 * number  # noqa: E731, F841 - found by its name
        return ToolCalls.from_dict_list([{"name": "double", "args": {"number": 21}}]).tool_calls[0].execute()

    found = found_of(program)
    assert found.output == 42
    assert [(tool.name, tool.attributes[names.TOOL_RESULT]) for tool in found.tools] == [("double", "42")]


class Told(dspy.BaseLM):
    """A model of the program's own."""

    def forward(self, prompt=None, messages=None, **kwargs):
        if messages[-1]["content"] == "fail":
            raise ConnectionError("gone")
        from litellm import ModelResponse

        return ModelResponse(choices=[{"message": {"role": "assistant", "content": "from elsewhere"}}], model="told")


def test_a_model_reached_elsewhere_is_one_chat_span(found_of):
    found = found_of(lambda url: ask("writer", Told("told"), "hello"))
    assert found.output == "from elsewhere"
    (chat,) = found.chats
    assert (chat.agent, chat.status) == ("writer", "ok")
    assert json.loads(chat.attributes[names.REQUEST])["messages"][-1] == {"role": "user", "content": "hello"}
    message = json.loads(chat.attributes[names.RESPONSE])["choices"][0]["message"]
    assert message["content"] == "from elsewhere"


def test_a_model_reached_elsewhere_that_fails_is_an_error(found_of):
    def program(url):
        with pytest.raises(Exception, match="gone"):
            ask("writer", Told("told"), "fail")

    (chat,) = found_of(program).chats
    assert (chat.status, chat.agent) == ("error", "writer")
    assert "gone" in chat.status_message


def test_a_provider_of_litellms_own_is_one_chat_span_with_its_agent(found_of):
    def program(url):
        given = dspy.LM(f"hosted_vllm/{MODEL}", api_base=url, cache=False)
        return ask("writer", given, "hello"), ask("writer", given, "hello again")

    found = found_of(program)
    assert len(found.requests) == len(found.chats) == 2
    assert [chat.agent for chat in found.chats] == ["writer"] * 2


def test_what_is_cached_is_no_call_but_a_policy_in_training_always_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    with ScriptedServer() as origin, ScriptedServer() as policy:
        given = model(origin.url, cache=True)
        prompt = f"hello {tmp_path}"  # of nobody's cache
        with lightning_dspy.attach(store=str(tmp_path / "traces.db")) as attachment:
            answers = {ask("writer", given, prompt) for _ in range(2)}
            assert len(origin.requests) == 1
            attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",))
            with use_attempt(attempt):
                answers |= {ask("writer", given, prompt) for _ in range(2)}
            attachment.flush(60)
        assert len(policy.requests) == 2
        assert len(answers) == 1
        assert len(origin.requests) == 1


def replay(origin, gateway, monkeypatch, store):
    """Call a model twice in a replay that trains no agent."""
    monkeypatch.setenv("OPENAI_API_KEY", "users-key")
    attempt = Attempt("r", "a", endpoint=gateway, key="k", agents=(), replay=Replay(attempt_id="earlier"))
    with lightning_dspy.attach(store=str(store)) as attachment, use_attempt(attempt):
        answers = [ask("writer", origin, "say done"), asyncio.run(aask("writer", origin, "say done"))]
        attachment.flush(60)
    assert answers == ["done"] * 2


@pytest.mark.skipif(StdlibTransport is None, reason="before 3.4 every call is LiteLLM's")
def test_every_call_of_a_replay_goes_to_the_gateway(tmp_path, monkeypatch):
    with ScriptedServer() as origin, ScriptedServer() as gateway:
        replay(origin.url, gateway.base, monkeypatch, tmp_path / "traces.db")
        assert not origin.requests
        sent = [request.headers for request in gateway.requests]
        chats = [span for span in gateway.spans if span.operation == names.CHAT]
    assert [headers["authorization"] for headers in sent] == ["Bearer k"] * 2
    assert [headers["x-lightning-replay"] for headers in sent] == ["asks"] * 2
    assert all(headers["x-lightning-traceparent"] == headers["traceparent"] for headers in sent)
    assert [(chat.agent, chat.attributes[names.REROUTED]) for chat in chats] == [("writer", True)] * 2


@contextmanager
def leaving_gateway():
    """Serve a gateway that leaves each call of a replay to the program's own endpoint."""

    class Leaves(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(421)
            self.send_header("x-lightning-replay", "own")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Leaves) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.skipif(StdlibTransport is None, reason="before 3.4 every call is LiteLLM's")
def test_a_replayed_call_that_the_gateway_leaves_to_the_program_is_sent_as_it_was(tmp_path, monkeypatch):
    with ScriptedServer() as origin, leaving_gateway() as gateway:
        replay(origin.url, gateway, monkeypatch, tmp_path / "traces.db")
        sent = [request.headers for request in origin.requests]
    assert [headers["authorization"] for headers in sent] == ["Bearer users-key"] * 2
    assert not any("x-lightning-replay" in headers for headers in sent)


def test_a_prompt_is_also_that_of_an_agent_that_is_named_by_where_it_stands(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    attempt = Attempt("r", "a", prompts={"team/writer": {"before": instructions("writer"), "after": "Rhyme."}})
    with ScriptedServer() as server, lightning_dspy.attach(store=str(tmp_path / "traces.db")):
        with use_attempt(attempt), agent("team"):
            ask("writer", server.url, "hello")
        assert server.requests[-1].body["messages"][0]["content"] == "Rhyme."


def test_detaching_ends_what_is_open(operations_until_stopped):
    operations = operations_until_stopped(lambda url, stop: call("caller", url, "call stop {}", stop))
    assert operations == ["chat", "execute_tool", "invoke_agent", "invoke_agent"]
