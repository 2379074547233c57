from __future__ import annotations

import asyncio
import json
import sys
import threading

import pytest

pytest.importorskip("pydantic_ai")

import openai
import pydantic_ai
from opentelemetry import context as otel_context
from pydantic import BaseModel
from pydantic_ai import Agent, CallToolsNode, ModelRequestNode, ModelRetry, UnexpectedModelBehavior
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart, ToolReturn
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_graph import End

import lightning_pydantic_ai
from lightning_conformance.plugins.program import span_of
from lightning_conformance.plugins.programs import AgentPrograms, add, fail, note
from lightning_conformance.plugins.replayed import NOTES, run_twice
from lightning_conformance.plugins.script import Reply, ScriptedToolCall, agent_of
from lightning_conformance.plugins.server import ScriptedServer
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    REPLAY_PROMPTS,
    PluginConformance,
    instructions,
    write_note,
)
from lightning_pydantic_ai.tools import TOOL_CALL, ToolManager
from lightning_spans import Attempt, agent, open_store, use_attempt
from lightning_spans.record.context import current_agent
from lightning_spans.schema import spans as names

NEW = not pydantic_ai.__version__.startswith("1.")


def model(url, kind=OpenAIChatModel, **options):
    return kind(MODEL, provider=OpenAIProvider(openai_client=openai.AsyncOpenAI(base_url=url, **options)))


def make(name, url_or_model, *tools, **options):
    given = model(url_or_model) if isinstance(url_or_model, str) else url_or_model
    return Agent(given, name=name, instructions=instructions(name), tools=tools, **options)


async def ask(name, url, prompt, *tools, **options):
    return (await make(name, url, *tools, **options).run(prompt)).output


async def stream(name, url, prompt, **options):
    async with make(name, url, **options).run_stream(prompt) as result:
        return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]


def run(coroutine):
    return asyncio.run(coroutine)


class TestConformance(AgentPrograms, PluginConformance):
    framework = "pydantic-ai"
    unsupported = {} if NEW else {"abandoned": "Pydantic AI 1 reads a stream that was left to its end itself"}

    def patched(self):
        return [(Agent, "iter"), (ToolManager, TOOL_CALL), (WrapperModel, "request"), (FunctionModel, "request_stream")]

    def make(self, name, url, *tools, **client):
        return make(name, model(url, **client), *tools)

    async def answer(self, agent, prompt):
        return (await agent.run(prompt)).output

    async def pieces(self, agent, prompt):
        async with agent.run_stream(prompt) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    def one_agent(self, url):
        return make("writer", url).run_sync(PROMPTS["one_agent"]).output

    def unnamed(self, url):
        with agent("writer"):
            return Agent(model(url), instructions=instructions("writer")).run_sync(PROMPTS["unnamed"]).output

    def namesakes(self, url):
        async def work(team):
            async def consult() -> str:
                return await ask("writer", url, PROMPTS["namesakes"])

            return await ask(team, url, "call consult {}", consult)

        async def both():
            return await asyncio.gather(work("red"), work("blue"))

        return run(both())

    def abandoned(self, url):
        async def work():
            async with make("writer", url).run_stream(PROMPTS["abandoned"]) as result:
                async for piece in result.stream_text(delta=True, debounce_by=None):
                    return piece
            return None

        return run(work())

    def responses(self, url):
        return run(ask("writer", model(url, OpenAIResponsesModel), PROMPTS["responses"]))

    def responses_streaming(self, url):
        return run(stream("writer", model(url, OpenAIResponsesModel), PROMPTS["responses_streaming"]))

    def choices(self, url):
        return run(ask("writer", url, PROMPTS["choices"], model_settings={"extra_body": {"n": 2}}))

    def tool_error(self, url):
        with pytest.raises(ValueError, match="out of order") as error:
            run(ask("caller", url, PROMPTS["tool_error"], fail))
        return str(error.value)

    def effect_fails(self, url):
        with pytest.raises(ValueError, match="out of order") as error:
            run(ask("caller", url, REPLAY_PROMPTS["effect_fails"], note))
        return str(error.value)

    def heard_by_an_event_stream_handler(self, url):
        seen = []

        async def hear(context, events):
            seen.extend([type(event).__name__ async for event in events])

        async def work():
            for given in (url, model(url, OpenAIResponsesModel), FunctionModel(answers, stream_function=streams)):
                await make("writer", given, add).run(PROMPTS["one_agent"], event_stream_handler=hear)

        run(work())
        return seen


def above(found, span):
    """The spans around one, innermost first."""
    by_id = {other.span_id: other for other in found.spans}
    line = []
    while span.parent_id is not None:
        span = by_id[span.parent_id]
        line.append((span.operation, span.name))
    return line


async def each(items):
    return [item async for item in items]


async def by_iter(agent, prompt):
    async with agent.iter(prompt) as steps:
        async for _ in steps:
            pass


async def by_run_stream(agent, prompt):
    async with agent.run_stream(prompt) as result:
        await result.get_output()


WAYS = {
    "run": lambda agent, prompt: run(agent.run(prompt)),
    "run_sync": lambda agent, prompt: agent.run_sync(prompt),
    "iter": lambda agent, prompt: run(by_iter(agent, prompt)),
    "run_stream": lambda agent, prompt: run(by_run_stream(agent, prompt)),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_an_agent_is_recorded_alike(way, found_of):
    found = found_of(lambda url: WAYS[way](make("caller", url, add), PROMPTS["tool_call"]) and None)
    assert [(s.operation, s.agent, s.status) for s in found.spans] == [
        ("invoke_agent", "caller", "ok"),
        ("chat", "caller", "ok"),
        ("execute_tool", "caller", "ok"),
        ("chat", "caller", "ok"),
    ]
    assert {span.parent_id for span in found.spans} == {None, found.spans[0].span_id}


async def by_next(steps):
    node = steps.next_node
    while not isinstance(node, End):
        node = await steps.next(node)
        yield


async def by_for(steps):
    async for _ in steps:
        yield


async def by_stream(steps):
    async for node in steps:
        if isinstance(node, ModelRequestNode | CallToolsNode):
            async with node.stream(steps.ctx) as items:
                async for _ in items:
                    yield
        yield


async def by_left_stream(steps):
    async for node in steps:
        if isinstance(node, CallToolsNode):
            async with node.stream(steps.ctx):
                yield


each_drive = pytest.mark.parametrize("drive", [by_next, by_for, by_stream, by_left_stream])


@each_drive
def test_runs_that_are_driven_in_turns_keep_their_agents(drive, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk")

    async def work(url):
        left, right = (make(name, url, add) for name in ("left", "right"))
        async with left.iter(PROMPTS["tool_call"]) as one, right.iter(PROMPTS["tool_call"]) as two:
            driven = [drive(one), drive(two)]
            while driven:
                driven = [run for run in driven if await anext(run, run) is not run]

    with ScriptedServer() as origin, ScriptedServer() as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("right",))
        with lightning_pydantic_ai.attach(store=str(tmp_path / "traces.db")) as attachment, use_attempt(attempt):
            run(work(origin.url))
            attachment.flush(60)
        spans = policy.spans
        agents = {span.span_id: span.name for span in spans if span.operation == names.INVOKE_AGENT}
        chats = {span.span_id: span.agent for span in spans if span.operation == names.CHAT}
        assert sorted(agents.values()) == ["left", "right"]
        for server, name in ((origin, "left"), (policy, "right")):
            assert [agent_of(request.body) for request in server.requests] == [name] * 2
            assert [chats[span_of(request)] for request in server.requests] == [name] * 2
        inside = [span for span in spans if span.span_id not in agents]
        assert sorted(span.agent for span in inside) == ["left"] * 3 + ["right"] * 3
        assert all(agents[span.parent_id] == span.agent for span in inside)


@each_drive
def test_a_step_of_a_run_is_inside_of_what_its_caller_traces_and_leaves_him_as_he_was(drive, found_of):
    seen = []

    async def look() -> str:
        seen.append(otel_context.get_value("mine"))
        return "seen"

    async def work(url):
        async with make("left", url, look).iter("call look {}") as steps, make("right", url).iter("hello"):
            token = otel_context.attach(otel_context.set_value("mine", "here"))
            await each(drive(steps))
            assert current_agent() == "right"  # as before: whose block it is
            otel_context.detach(token)

    found_of(work)
    assert seen == ["here"]


def test_a_run_that_was_entered_in_another_task_keeps_its_agent(found_of):
    async def work(url):
        begun, done = asyncio.Future(), asyncio.Event()

        async def enter():
            async with make("caller", url, add).iter(PROMPTS["tool_call"]) as steps:
                begun.set_result(steps)
                await done.wait()

        entering = asyncio.create_task(enter())
        await each(await begun)
        await ask("writer", url, "hello")
        done.set()
        await entering

    found = found_of(work)
    assert [span.agent for span in found.chats] == ["caller", "caller", "writer"]
    assert [span.agent for span in found.tools] == ["caller"]
    assert above(found, found.chats[0]) == above(found, found.tools[0]) == [(names.INVOKE_AGENT, "caller")]
    assert above(found, found.chats[2]) == [(names.INVOKE_AGENT, "writer")]


def test_an_agent_is_called_as_pydantic_ai_itself_would_call_it(found_of):
    def program(url):
        scribe = Agent(model(url), instructions=instructions("scribe"))
        return scribe.run_sync("hello").output, Agent(model(url)).run_sync("hello").output

    found = found_of(program)
    assert [span.agent for span in found.chats] == ["scribe", "agent"]


def test_a_tool_that_wants_another_try_and_one_whose_arguments_do_not_fit_are_errors(found_of):
    def look(word: str) -> str:
        raise ModelRetry("not that word")

    def program(url):
        with pytest.raises(UnexpectedModelBehavior):
            run(ask("caller", url, 'call look {"word": "x"}', look, retries=0))
        with pytest.raises(UnexpectedModelBehavior):
            run(ask("caller", url, 'call add {"a": "one", "b": 2}', add, retries=0))

    found = found_of(program)
    assert sorted((span.name, span.status) for span in found.tools) == [("add", "error"), ("look", "error")]
    asked = {span.name: json.loads(span.attributes[names.TOOL_ARGUMENTS]) for span in found.tools}
    assert asked == {"look": {"word": "x"}, "add": {"a": "one", "b": 2}}
    assert all(span.status_message for span in found.tools)


class Answer(BaseModel):
    text: str


def test_the_form_of_an_answer_is_no_tool(tmp_path):
    def form(body, seen):
        return Reply(tool_calls=[ScriptedToolCall("final_result", '{"text": "done"}')])

    with ScriptedServer(form) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "sk")
        with lightning_pydantic_ai.attach(store=str(tmp_path / "traces.db")) as attachment:
            assert run(ask("writer", server.url, "hello", output_type=Answer)) == Answer(text="done")
            attachment.flush(60)
    store = open_store(str(tmp_path / "traces.db"))
    assert sorted(span.operation for span in store.spans()) == ["chat", "invoke_agent"]
    store.close()


def test_a_client_called_inside_a_tool_is_the_tools_agents(found_of):
    def program(url):
        def look_up(word: str) -> str:
            assert threading.current_thread() is not threading.main_thread()
            client = openai.OpenAI(base_url=url)
            messages = [{"role": "system", "content": instructions("caller")}, {"role": "user", "content": word}]
            return client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content

        return run(ask("caller", url, 'call look_up {"word": "moon"}', look_up))

    found = found_of(program)
    assert len(found.chats) == len(found.requests) == 3
    (inner,) = [span for span in found.chats if (names.EXECUTE_TOOL, "look_up") in above(found, span)]
    assert inner.agent == "caller"


def answers(messages, info):
    if any(part.part_kind == "tool-return" for message in messages for part in message.parts):
        return ModelResponse(parts=[TextPart("it is 5")])
    return ModelResponse(parts=[ToolCallPart("add", {"a": 2, "b": 3}, tool_call_id="call-1")])


async def streams(messages, info):
    yield "from "
    yield "elsewhere"


@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "wrapped"])
def test_a_model_reached_elsewhere_is_one_chat_span(wrapped, found_of):
    def program(url):
        given = FunctionModel(answers, stream_function=streams)
        given = WrapperModel(given) if wrapped else given
        return run(ask("writer", given, "hello", add)), "".join(run(stream("writer", given, "hello")))

    found = found_of(program)
    assert found.output == ("it is 5", "from elsewhere")
    assert [(chat.agent, chat.status) for chat in found.chats] == [("writer", "ok")] * 3
    first, second, third = found.chats
    request = json.loads(first.attributes[names.REQUEST])
    assert request["messages"][-1] == {"role": "user", "content": "hello"}
    assert request["tools"][0]["function"]["parameters"]["required"] == ["a", "b"]
    asked = json.loads(first.attributes[names.RESPONSE])["choices"][0]["message"]["tool_calls"]
    assert asked[0]["id"] == found.tools[0].attributes[names.TOOL_CALL_ID] == "call-1"
    roles = [turn["role"] for turn in json.loads(second.attributes[names.REQUEST])["messages"]]
    assert roles[-2:] == ["assistant", "tool"]
    assert json.loads(third.attributes[names.RESPONSE])["choices"][0]["message"]["content"] == "from elsewhere"
    assert third.attributes[names.STREAMED] is True


def test_a_model_reached_elsewhere_that_fails_is_an_error(found_of):
    def gone(messages, info):
        raise ConnectionError("gone")

    def program(url):
        with pytest.raises(ConnectionError):
            run(ask("writer", FunctionModel(gone), "hello"))

    (chat,) = found_of(program).chats
    assert (chat.status, chat.status_message, chat.agent) == ("error", "gone", "writer")


def test_a_model_that_wraps_a_wired_one_is_one_span(found_of):
    found = found_of(lambda url: run(ask("writer", WrapperModel(model(url)), "hello")))
    assert len(found.chats) == len(found.requests) == 1
    assert found.chats[0].attributes[names.FRAMEWORK] == "openai"


MCP_SERVER = """
try:
    from mcp.server.mcpserver import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server
server = Server("doubles")
@server.tool()
def double(number: int) -> int:
    return 2 * number
server.run()
"""


def test_tools_of_a_local_mcp_server(found_of, tmp_path):
    mcp = pytest.importorskip("pydantic_ai.mcp", exc_type=ImportError)
    (tmp_path / "double_server.py").write_text(MCP_SERVER)
    arguments = [str(tmp_path / "double_server.py")]

    async def work(url):
        from fastmcp.client.transports import StdioTransport

        toolset = mcp.MCPToolset(StdioTransport(sys.executable, arguments), init_timeout=60)
        return await ask("caller", url, 'call double {"number": 21}', toolsets=[toolset])

    found = found_of(work)
    assert "42" in found.output
    (tool,) = found.tools
    assert (tool.name, tool.agent, tool.status) == ("double", "caller", "ok")
    assert "42" in tool.attributes[names.TOOL_RESULT]


def test_a_run_that_is_cancelled_leaves_nothing_behind(found_of, under_way):
    async def work(url):
        task = asyncio.create_task(ask("writer", url, "wait 5"))
        await under_way()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        client = openai.AsyncOpenAI(base_url=url)
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "nobody"}])

    found = found_of(work)
    assert [(span.agent, span.status) for span in found.chats] == [("writer", "error"), (None, "ok")]
    assert [span.status for span in found.spans if span.operation == names.INVOKE_AGENT] == ["error"]


def test_detaching_ends_what_is_open(operations_until_stopped):
    operations = operations_until_stopped(lambda url, stop: run(ask("caller", url, "call stop {}", stop)))
    assert operations == ["chat", "execute_tool", "invoke_agent"]


def test_only_the_attempts_own_agent_is_rerouted_from_inside_a_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    with ScriptedServer() as origin, ScriptedServer() as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",))

        async def consult() -> str:
            return await ask("writer", origin.url, "hello")

        with lightning_pydantic_ai.attach(store=str(tmp_path / "traces.db")) as attachment, use_attempt(attempt):
            run(ask("boss", origin.url, "call consult {}", consult))
            attachment.flush(60)
        assert {agent_of(request.body) for request in policy.requests} == {"writer"}
        assert {agent_of(request.body) for request in origin.requests} == {"boss"}
        assert len({span_of(request) for request in [*policy.requests, *origin.requests]}) == 3


# Tools in a replay


def replayed(program, folder):
    """Run a program and a replay of it; give what both gave, how often a tool did something, and its spans."""
    before = len(NOTES)
    outputs, spans = run_twice(program, folder, "pydantic-ai")
    tools = [span for span in spans if span.operation == names.EXECUTE_TOOL]
    assert {span.attributes[names.REPLAYED] for span in tools} == {True}
    return outputs, len(NOTES) - before, tools


def test_data_and_what_goes_with_it_comes_back_as_it_was(tmp_path):
    def look(text: str) -> ToolReturn:
        """Look."""
        return ToolReturn(return_value={"seen": write_note(text)}, content=["look"], metadata={"at": (1, 2)})

    async def program(url):
        result = await make("caller", url, look).run('call look {"text": "a"}')
        parts = [part for message in result.all_messages() for part in message.parts]
        returned = next(part for part in parts if part.part_kind == "tool-return")
        return result.output, returned.content, returned.metadata

    (first, second), made, _ = replayed(program, tmp_path)
    assert first == second
    assert second[2] == {"at": (1, 2)}
    assert made == 1


def test_a_tool_that_asks_for_another_try_asks_alike(tmp_path):
    def choosy(text: str) -> str:
        """Note."""
        raise ModelRetry(write_note(text))

    (first, second), made, (span,) = replayed(
        lambda url: run(ask("caller", url, 'call choosy {"text": "a"}', choosy)), tmp_path
    )
    assert first == second
    assert "is a" in first
    assert (made, span.status) == (1, "error")
