from __future__ import annotations

import ast
import asyncio
import json
import threading

import pytest

pytest.importorskip("smolagents")
openai = pytest.importorskip("openai")

from smolagents import CodeAgent, OpenAIServerModel, Tool, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES, MultiStepAgent
from smolagents.local_python_executor import LocalPythonExecutor
from smolagents.models import (
    ChatMessage,
    ChatMessageStreamDelta,
    ChatMessageToolCall,
    ChatMessageToolCallFunction,
    Model,
)

import lightning_smolagents
from lightning_conformance.plugins import programs
from lightning_conformance.plugins.program import span_of
from lightning_conformance.plugins.programs import AgentPrograms
from lightning_conformance.plugins.replayed import run_twice
from lightning_conformance.plugins.script import Reply, agent_of, tool_results
from lightning_conformance.plugins.server import ScriptedServer
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    PluginConformance,
    instructions,
)
from lightning_spans import Attempt, agent, use_attempt
from lightning_spans.schema import spans as names

ASK_WRITER = 'call writer {"task": "hello", "additional_args": {}}'  # before 1.23 both must be given


def text_of(message):
    content = message.content if isinstance(message, ChatMessage) else message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content or ())


class Speaking(OpenAIServerModel):
    """A model that is told of tools as other frameworks tell it, and whose words are its answer.

    smolagents tells a model of tools in the user's words, and goes on until the tool `final_answer` is called.
    """

    def _prepare_completion_kwargs(self, messages, *args, **kwargs):
        body = super()._prepare_completion_kwargs(messages, *args, **kwargs)
        body.pop("stop", None)
        return {**body, "messages": list(turns(messages))}

    def parse_tool_calls(self, message):
        answer = ChatMessageToolCallFunction(name="final_answer", arguments={"answer": message.content})
        message.tool_calls = [ChatMessageToolCall(function=answer, id="final", type="function")]
        return message


def turns(messages):
    waiting = []
    for message in messages:
        role = getattr(message.role, "value", message.role)
        text = text_of(message)
        if role == "tool-call":
            calls = ast.literal_eval(text.removeprefix("Calling tools:\n"))
            waiting = sorted(call["id"] for call in calls)
            for call in calls:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
            yield {"role": "assistant", "content": None, "tool_calls": calls}
        elif role == "tool-response" and waiting:
            told = text.removeprefix("Observation:\n").split("\n")
            yield from (
                {"role": "tool", "tool_call_id": key, "content": one} for key, one in zip(waiting, told, strict=True)
            )
            waiting = []
        elif role == "tool-response":
            yield {"role": "user", "content": text}
        elif text:
            yield {"role": role, "content": text}


def model(url, kind=Speaking, **options):
    given = {name: options.pop(name) for name in ("max_retries", "timeout") if name in options}
    return kind(model_id=MODEL, api_base=url, client_kwargs=given, **options)


def make(name, url_or_model, *tools, kind=ToolCallingAgent, named=True, **options):
    given = model(url_or_model) if isinstance(url_or_model, str) else url_or_model
    templates = {
        **EMPTY_PROMPT_TEMPLATES,
        "system_prompt": instructions(name),
        "managed_agent": {"task": "{{task}}", "report": "{{final_answer}}"},
    }
    return kind(
        tools=list(tools), model=given, name=name if named else None, description=name,
        prompt_templates=templates, verbosity_level=-1,
        **{"max_steps": 3, **options},
    )  # fmt: skip


def ask(agent, prompt):
    return str(agent.run(prompt))


async def aask(agent, prompt):
    return await asyncio.to_thread(ask, agent, prompt)


def stream(agent, prompt):
    agent.stream_outputs = True
    return [event.content for event in agent.run(prompt, stream=True) if isinstance(event, ChatMessageStreamDelta)]


def fails(work):
    with pytest.raises(Exception) as error:  # noqa: PT011 - smolagents' own, of the client's
        work()
    return [type(error.value).__name__, type(error.value.__cause__).__name__]


add, fail, note = tool(programs.add), tool(programs.fail), tool(programs.note)


class TestConformance(AgentPrograms, PluginConformance):
    framework = "smolagents"
    unsupported = dict.fromkeys(["responses", "responses_streaming"], "it has no model for them") | {
        "effects_awaited": "it has no asynchronous side: `@tool` refuses a coroutine function, and nothing awaits one"
    }

    def patched(self):
        tools = [(ToolCallingAgent, "process_tool_calls"), (ToolCallingAgent, "execute_tool_call"), (Tool, "__call__")]
        asking = [(Told, "generate"), (Told, "generate_stream"), (LocalPythonExecutor, "__call__")]
        return [(MultiStepAgent, "run"), (MultiStepAgent, "__call__"), *tools, *asking]

    def make(self, name, url, *tools, **client):
        return make(name, model(url, **client), *tools)

    def ask(self, agent, prompt):
        return ask(agent, prompt)

    async def answer(self, agent, prompt):
        return await aask(agent, prompt)

    def stream(self, agent, prompt):
        return stream(agent, prompt)

    def tool(self, function):
        return tool(function)

    def error_of(self, work):
        return fails(work)

    def unnamed(self, url):
        with agent("writer"):
            return ask(make("writer", url, named=False), PROMPTS["unnamed"])

    def namesakes(self, url):
        def work(name):
            boss = make(name, url, managed_agents=[make("writer", url)])
            return ask(boss, ASK_WRITER)

        return [work("red"), work("blue")]

    def abandoned(self, url):
        events = make("writer", url, stream_outputs=True).run(PROMPTS["abandoned"], stream=True)
        first = next(event.content for event in events if isinstance(event, ChatMessageStreamDelta) and event.content)
        with pytest.raises(RuntimeError):  # smolagents goes on where it is closed
            events.close()
        return first

    def choices(self, url):
        return ask(make("writer", model(url, n=2)), PROMPTS["choices"])

    def nested(self, url):
        @tool
        def ask(question: str) -> str:
            """Ask the writer.

            Args:
                question: what.
            """
            return str(make("writer", url).run(question))

        return str(make("boss", url, ask).run(PROMPTS["nested"]))

    def heard_by_step_callbacks(self, url):
        seen = []
        listening = {"step_callbacks": [lambda step, agent: seen.append([agent.name, step.step_number])]}
        return [ask(make("writer", given, **listening), PROMPTS["one_agent"]) for given in (url, Told())] + seen


class Told(Model):
    """A model that is reached without a client."""

    def _answer(self, messages, tools):
        text = text_of(messages[-1])
        if "fail" in text:
            raise ConnectionError("gone")
        if tools and "Observation" not in text:
            return {"name": "add", "arguments": '{"a": 2, "b": 3}'}
        return {"name": "final_answer", "arguments": '{"answer": "it is 5"}'}

    def generate(self, messages, stop_sequences=None, response_format=None, tools_to_call_from=None, **options):
        function = ChatMessageToolCallFunction(**self._answer(messages, tools_to_call_from))
        calls = [ChatMessageToolCall(function=function, id="call-1", type="function")]
        return ChatMessage(role="assistant", content=None, tool_calls=calls)

    def generate_stream(self, messages, stop_sequences=None, response_format=None, tools_to_call_from=None, **options):
        answer = self._answer(messages, tools_to_call_from)
        for piece in ("Action: ", json.dumps({**answer, "arguments": json.loads(answer["arguments"])})):
            yield ChatMessageStreamDelta(content=piece)


@pytest.mark.parametrize("way", [ask, stream])
def test_every_way_to_run_an_agent_is_recorded_alike(way, found_of):
    found = found_of(lambda url: way(make("caller", url, add), PROMPTS["tool_call"]) and None)
    assert [(s.operation, s.agent, s.status) for s in found.spans] == [
        ("invoke_agent", "caller", "ok"),
        ("chat", "caller", "ok"),
        ("execute_tool", "caller", "ok"),
        ("chat", "caller", "ok"),
    ]
    assert {span.parent_id for span in found.spans} == {None, found.spans[0].span_id}


def test_a_managed_agent_works_under_the_call_of_its_manager(found_of):
    boss = lambda url: make("boss", url, managed_agents=[make("writer", url)])  # noqa: E731
    found = found_of(lambda url: ask(boss(url), ASK_WRITER))
    manager, member = [span for span in found.spans if span.operation == names.INVOKE_AGENT]
    (call,) = found.tools
    assert (call.name, call.agent, call.parent_id) == ("writer", "boss", manager.span_id)
    assert member.parent_id == call.span_id
    assert member.attributes[names.AGENT_PATH] == "boss/writer"
    assert "writer answers" in call.attributes[names.TOOL_RESULT]
    assert [chat.agent for chat in found.chats] == ["boss", "writer", "boss"]


def coding(*codes):
    """A script by which `coder` writes one code after the other, and anybody else answers."""

    def script(body, seen):
        if agent_of(body) != "coder":
            return Reply("<code>final_answer('well')</code>")
        step = sum(message["role"] == "assistant" for message in body["messages"])
        return Reply(f"Thought: so\n<code>\n{codes[min(step, len(codes) - 1)]}\n</code>")

    return script


def code(codes, *tools, **options):
    def program(_):
        with ScriptedServer(coding(*codes)) as server:
            agent = make("coder", model(server.url, OpenAIServerModel), *tools, kind=CodeAgent, **options)
            return ask(agent, "hello")

    return program


def test_code_is_a_tool_call_and_what_it_calls_is_under_it(found_of):
    found = found_of(code(["total = add(2, b=3)\nprint(total)", "final_answer(total + 1)"], add))
    assert found.output == "6"
    first, inner, second = found.tools
    assert [(t.name, t.agent, t.status) for t in found.tools] == [
        ("python_interpreter", "coder", "ok"), ("add", "coder", "ok"), ("python_interpreter", "coder", "ok"),
    ]  # fmt: skip
    assert "add(2, b=3)" in json.loads(first.attributes[names.TOOL_ARGUMENTS])["code"]
    assert "Execution logs:\n5" in first.attributes[names.TOOL_RESULT]
    assert inner.parent_id == first.span_id
    assert json.loads(inner.attributes[names.TOOL_ARGUMENTS]) == {"a": 2, "b": 3}
    assert inner.attributes[names.TOOL_RESULT] == "5"
    assert len(found.chats) == 2
    assert {chat.parent_id for chat in found.chats} == {first.parent_id} == {second.parent_id}


def test_code_that_fails_is_an_error(found_of):
    found = found_of(code(["fail('out of order')", "subtract(5, 3)", "final_answer('well')"], fail))
    outcomes = [(call.name, call.status) for call in found.tools]
    assert outcomes == [
        ("python_interpreter", "error"), ("fail", "error"), ("python_interpreter", "error"),
        ("python_interpreter", "ok"),
    ]  # fmt: skip
    assert found.tools[1].status_message == "out of order"
    assert "subtract" in found.tools[2].status_message


def test_code_asks_a_managed_agent(found_of):
    def program(_):
        with ScriptedServer(coding("final_answer(writer('hello'))")) as server:
            given = model(server.url, OpenAIServerModel)
            writer = make("writer", given, kind=CodeAgent)
            return ask(make("coder", given, kind=CodeAgent, managed_agents=[writer]), "hello")

    found = found_of(program)
    assert found.output == "well"
    assert [(call.name, call.agent) for call in found.tools] == [
        ("python_interpreter", "coder"), ("writer", "coder"), ("python_interpreter", "writer"),
    ]  # fmt: skip
    member = next(span for span in found.spans if span.operation == names.INVOKE_AGENT and span.agent == "writer")
    assert member.parent_id == found.tools[1].span_id


def test_in_a_replay_code_runs_and_its_tools_do_not(tmp_path):
    def program(url):
        agent = make("coder", model(url, OpenAIServerModel), note, kind=CodeAgent)
        return ask(agent, "say <code>said = note('one'); final_answer(said + '!')</code>")

    outputs, spans = run_twice(program, tmp_path, "smolagents")
    assert outputs[0] == outputs[1]
    assert outputs[0].endswith("is one!")
    replayed = [(span.name, span.attributes.get(names.REPLAYED)) for span in spans if span.operation == "execute_tool"]
    assert sorted(replayed, key=str) == [("note", True), ("python_interpreter", None)]


def test_equal_calls_that_run_in_another_order_keep_their_ids(found_of):
    class Turned(ToolCallingAgent):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.first, self.done = threading.Lock(), threading.Event()

        def execute_tool_call(self, tool_name, arguments):
            if tool_name == "note" and self.first.acquire(blocking=False):
                assert self.done.wait(60)
                return super().execute_tool_call(tool_name, arguments)
            try:
                return super().execute_tool_call(tool_name, arguments)
            finally:
                self.done.set()

    twice = 'call note {"text": "one"}\ncall note {"text": "one"}'
    found = found_of(lambda url: ask(make("caller", url, note, kind=Turned), twice))
    told = tool_results(found.requests[-1].body)
    assert {call.attributes[names.TOOL_CALL_ID]: call.attributes[names.TOOL_RESULT] for call in found.tools} == told
    assert len(told) == 2


def test_a_stream_that_is_left_is_no_error_of_its_agent(found_of):
    found = found_of(TestConformance().abandoned)
    (agent,) = [span for span in found.spans if span.operation == names.INVOKE_AGENT]
    assert (agent.status, agent.attributes[names.ABANDONED]) == ("ok", True)


def test_an_agent_without_a_name_is_called_as_its_kind(found_of):
    assert [chat.agent for chat in found_of(lambda url: ask(make(None, url), "hello")).chats] == ["ToolCallingAgent"]


@pytest.mark.parametrize("way", [ask, stream])
def test_a_model_reached_elsewhere_is_one_chat_span(way, found_of):
    found = found_of(lambda url: way(make("writer", Told(model_id="told"), add), "hello"))
    assert [(chat.agent, chat.status, chat.name) for chat in found.chats] == [("writer", "ok", "told")] * 2
    first, second = found.chats
    request = json.loads(first.attributes[names.REQUEST])
    assert [turn["role"] for turn in request["messages"]] == ["system", "user"]
    assert request["tools"][0]["function"]["name"] == "add"
    answer = json.loads(first.attributes[names.RESPONSE])["choices"][0]["message"]
    assert "add" in json.dumps(answer)
    assert json.loads(second.attributes[names.REQUEST])["messages"][-1]["content"].startswith("Observation:")
    assert first.attributes[names.STREAMED] is (way is stream)
    assert [(call.name, call.attributes[names.TOOL_RESULT]) for call in found.tools] == [("add", "5")]


def test_a_model_reached_elsewhere_that_fails_is_an_error(found_of):
    (chat,) = found_of(lambda url: fails(lambda: ask(make("writer", Told(model_id="told")), "fail"))).chats
    assert (chat.status, chat.status_message, chat.agent) == ("error", "gone", "writer")


def test_only_the_attempts_own_agent_is_rerouted(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    with ScriptedServer() as origin, ScriptedServer() as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",))
        with lightning_smolagents.attach(store=str(tmp_path / "traces.db")) as attachment, use_attempt(attempt):
            boss = make("boss", origin.url, managed_agents=[make("writer", origin.url)])
            ask(boss, ASK_WRITER)
            attachment.flush(60)
        assert {agent_of(request.body) for request in policy.requests} == {"writer"}
        assert {agent_of(request.body) for request in origin.requests} == {"boss"}
        assert len({span_of(request) for request in [*policy.requests, *origin.requests]}) == 3


def test_detaching_ends_what_is_open(operations_until_stopped):
    operations = operations_until_stopped(lambda url, stop: ask(make("caller", url, tool(stop)), "call stop {}"))
    assert operations == ["chat", "execute_tool", "invoke_agent"]
