from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

from support.listening import check_calls

agents = pytest.importorskip("agents")

import openai
from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrail,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    OutputGuardrail,
    RunConfig,
    RunHooks,
    Runner,
    function_tool,
    generation_span,
    handoff,
    trace,
)
from agents.mcp import MCPServerStdio
from agents.tool_context import ToolContext
from agents.tracing import TracingProcessor, get_trace_provider
from agents.tracing import spans as sdk_spans
from agents.tracing import traces as sdk_traces

from lightning_conformance import ScriptedServer
from lightning_conformance.plugins import programs
from lightning_conformance.plugins.programs import AgentPrograms
from lightning_conformance.plugins.replayed import NOTES, run_twice
from lightning_conformance.plugins.script import answer, follow, pieces
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    PluginConformance,
    instructions,
    write_note,
)
from lightning_openai import other_clients
from lightning_openai_agents.agents import SdkScope, SdkTracker
from lightning_spans import Attempt, use_attempt
from lightning_spans.record.context import settle_context
from lightning_spans.schema import spans as names


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "user-key")
    agents.set_trace_processors([])  # else the SDK's own uploader calls its makers


def model(url, kind=OpenAIChatCompletionsModel, **options):
    return kind(MODEL, openai.AsyncOpenAI(base_url=url, **options))


def make(name, url_or_model, **options):
    given = model(url_or_model) if isinstance(url_or_model, str) else url_or_model
    return Agent(name=name, instructions=instructions(name), model=given, **options)


def run(coroutine):
    return asyncio.run(coroutine)


async def ask(name, url, prompt, **options):
    return (await Runner.run(make(name, url, **options), prompt)).final_output


add, fail, note = map(function_tool, (programs.add, programs.fail, programs.note))


class TestConformance(AgentPrograms, PluginConformance):
    framework = "openai-agents"
    unsupported: ClassVar[dict[str, str]] = {"unnamed": "an agent must have a name"}

    def patched(self):
        return [
            (owner, name)
            for owner in (sdk_spans.SpanImpl, sdk_spans.NoOpSpan, sdk_traces.TraceImpl, sdk_traces.NoOpTrace)
            for name in ("start", "finish", "set_error")
            if name in vars(owner)
        ] + [(ToolContext, "from_agent_context")]

    def make(self, name, url, *tools, **client):
        return make(name, model(url, **client), tools=list(tools))

    async def answer(self, agent, prompt):
        return (await Runner.run(agent, prompt)).final_output

    async def pieces(self, agent, prompt):
        result = Runner.run_streamed(agent, prompt)
        return [*[event.type async for event in result.stream_events()], result.final_output]

    def tool(self, function):
        return function_tool(function)

    def namesakes(self, url):
        async def work(team):
            tool = make("writer", url).as_tool("ask", "Ask the writer.")
            return await ask(team, url, f'call ask {{"input": "{PROMPTS["namesakes"]}"}}', tools=[tool])

        async def both():
            return await asyncio.gather(work("red"), work("blue"))

        return run(both())

    def responses(self, url):
        return run(ask("writer", model(url, OpenAIResponsesModel), PROMPTS["responses"]))

    def responses_streaming(self, url):
        async def work():
            writer = make("writer", model(url, OpenAIResponsesModel))
            result = Runner.run_streamed(writer, PROMPTS["responses_streaming"])
            return [event.type async for event in result.stream_events()], result.final_output

        return run(work())

    def choices(self, url):
        settings = ModelSettings(extra_body={"n": 2})
        return run(ask("writer", url, PROMPTS["choices"], model_settings=settings))

    def abandoned(self, url):
        async def work():
            result = Runner.run_streamed(make("writer", url), PROMPTS["abandoned"])
            async for event in result.stream_events():
                if event.type == "raw_response_event":
                    return event.data.type
            return None

        return run(work())

    def unknown_tool(self, url):
        with pytest.raises(ModelBehaviorError) as error:
            run(ask("caller", url, PROMPTS["unknown_tool"], tools=[add]))
        return str(error.value)

    def cut(self, url):
        async def work():
            result = Runner.run_streamed(make("writer", url), PROMPTS["cut"])
            seen = []
            with pytest.raises(Exception) as error:  # noqa: PT011 - which one depends on the version
                seen.extend([event.type async for event in result.stream_events()])
            return seen, type(error.value).__name__

        return run(work())

    def heard_by_hooks_and_processors(self, url):
        hooks, processor = Hooks(), Processor()
        agents.set_trace_processors([processor])
        try:
            answered = run(ask("writer", url, PROMPTS["one_agent"], hooks=None))
            for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
                run(self._hooked(model(url, kind), hooks))
        finally:
            agents.set_trace_processors([])
        return answered, hooks.seen, processor.seen

    async def _hooked(self, given, hooks):
        prompted = make("caller", given, tools=[add]), PROMPTS["tool_call"]
        await Runner.run(*prompted, hooks=hooks)
        async for _ in Runner.run_streamed(*prompted, hooks=hooks).stream_events():
            pass


class Hooks(RunHooks):
    def __init__(self):
        self.seen = []

    async def on_agent_start(self, context, agent):
        self.seen.append(("start", agent.name))

    async def on_agent_end(self, context, agent, output):
        self.seen.append(("end", agent.name, output))

    async def on_llm_start(self, context, agent, system_prompt, input_items):
        self.seen.append(("model", agent.name, system_prompt, len(input_items)))

    async def on_llm_end(self, context, agent, response):
        self.seen.append(("answer", agent.name, len(response.output)))

    async def on_tool_start(self, context, agent, tool):
        self.seen.append(("tool", agent.name, tool.name))

    async def on_tool_end(self, context, agent, tool, result):
        self.seen.append(("result", agent.name, tool.name, str(result)))


class Processor(TracingProcessor):
    def __init__(self):
        self.seen = []

    def on_trace_start(self, trace):
        self.seen.append(("trace", trace.name))

    def on_trace_end(self, trace):
        self.seen.append(("trace end", trace.name))

    def on_span_start(self, span):
        self.seen.append(("span", span.span_data.type))

    def on_span_end(self, span):
        exported = span.export()
        self.seen.append(("span end", exported["span_data"]["type"], exported["error"]))

    def shutdown(self):
        pass

    def force_flush(self):
        pass


@pytest.fixture
def server():
    with ScriptedServer() as scripted:
        yield scripted


KINDS = pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


async def start(agent, prompt, *, streamed, **options):
    if not streamed:
        return (await Runner.run(agent, prompt, **options)).final_output
    result = Runner.run_streamed(agent, prompt, **options)
    async for _ in result.stream_events():
        pass
    return result.final_output


@KINDS
@STREAMED
def test_a_handoff_is_two_agents_one_after_the_other(kind, streamed, server, seen):
    async def work():
        shared = model(server.url, kind)
        writer = make("writer", shared)
        return await start(make("triage", shared, handoffs=[writer]), "call transfer_to_writer {}", streamed=streamed)

    assert run(work()).startswith("writer answers")
    check_calls(seen, server)
    assert [span.agent for span in seen.chats] == ["triage", "writer"]
    agents_seen = seen.of(names.INVOKE_AGENT)
    assert [span.name for span in agents_seen] == ["triage", "writer"]
    assert agents_seen[0].end_ns <= agents_seen[1].start_ns
    (run_span,) = seen.of(names.INVOKE_WORKFLOW)
    assert {span.parent_id for span in agents_seen} == {run_span.span_id}
    (over,) = seen.tools
    assert (over.name, over.agent, over.status) == ("transfer_to_writer", "triage", "ok")
    assert over.attributes[names.HANDOFF] == "writer"
    assert over.attributes[names.TOOL_ARGUMENTS] == "{}"
    assert over.attributes[names.TOOL_CALL_ID]


@KINDS
def test_a_handoff_of_another_name_is_told_from_tools_beside_it(kind, server, seen):
    async def work():
        shared = model(server.url, kind)
        after = handoff(make("writer", shared), tool_name_override="escalate")
        boss = make("triage", shared, handoffs=[after], tools=[add])
        return await start(boss, 'call add {"a": 1, "b": 2}\ncall escalate {}', streamed=False)

    run(work())
    assert {(span.name, span.attributes.get(names.HANDOFF)) for span in seen.tools} == {
        ("add", None),
        ("escalate", "writer"),
    }
    assert len({span.attributes[names.TOOL_CALL_ID] for span in seen.tools}) == 2


@KINDS
@STREAMED
def test_an_agent_as_a_tool_is_under_the_tool(kind, streamed, server, seen):
    async def work():
        shared = model(server.url, kind)
        writer = make("writer", shared)
        boss = make("boss", shared, tools=[writer.as_tool("ask", "Ask the writer.")])
        prompt = 'call ask {"input": "one"}\ncall ask {"input": "two"}'
        return await start(boss, prompt, streamed=streamed)

    assert "[writer answers 'one'] [writer answers 'two']" in run(work())
    check_calls(seen, server)
    assert sorted(span.agent for span in seen.chats) == ["boss", "boss", "writer", "writer"]
    (calls,) = {tuple(seen.above(span)) for span in seen.chats if span.agent == "writer"}
    assert calls[:3] == ((names.INVOKE_AGENT, "writer"), (names.EXECUTE_TOOL, "ask"), (names.INVOKE_AGENT, "boss"))
    assert {s.attributes[names.AGENT_PATH] for s in seen.of(names.INVOKE_AGENT)} == {"boss", "boss/writer"}
    assert {(span.agent, span.status) for span in seen.tools} == {("boss", "ok")}
    assert len({span.attributes[names.TOOL_CALL_ID] for span in seen.tools}) == 2


@KINDS
def test_tools_have_arguments_result_and_status(kind, server, seen):
    prompt = 'call add {"a": 2, "b": 3}\ncall fail {"reason": "out of order"}'
    run(ask("caller", model(server.url, kind), prompt, tools=[add, fail]))
    check_calls(seen, server)
    good, bad = sorted(seen.tools, key=lambda span: span.name)
    assert json.loads(good.attributes[names.TOOL_ARGUMENTS]) == {"a": 2, "b": 3}
    assert (good.attributes[names.TOOL_RESULT], good.status) == ("5", "ok")
    assert (bad.status, bad.status_message) == ("error", "out of order")
    assert bad.attributes[names.ERROR_TYPE] == "ValueError"


def test_a_tool_that_ends_the_run_is_an_error_all_the_way_up(server, seen):
    @function_tool(failure_error_function=None)
    def fatal(reason: str) -> str:
        raise ValueError(reason)

    with pytest.raises(agents.UserError):
        run(ask("caller", server.url, 'call fatal {"reason": "no"}', tools=[fatal]))
    (tool,) = seen.tools
    assert tool.status_message == "no"
    assert {s.status for s in [*seen.of(names.INVOKE_AGENT), *seen.of(names.INVOKE_WORKFLOW)]} == {"error"}


def test_a_run_inside_an_except_block_is_no_error(server, seen):
    try:
        raise KeyError("of the program's own")
    except KeyError:
        run(ask("writer", server.url, "hello"))
    assert {span.status for span in seen.spans} == {"ok"}


def test_turns_that_run_out_are_an_error_of_the_agent(server, seen):
    async def work():
        agent = make("caller", server.url, tools=[add], model_settings=ModelSettings(tool_choice="required"))
        await Runner.run(agent, 'call add {"a": 2, "b": 3}', max_turns=1)

    with pytest.raises(agents.MaxTurnsExceeded):
        run(work())
    assert [span.status for span in seen.of(names.INVOKE_AGENT)] == ["error"]


@STREAMED
@pytest.mark.parametrize("off", ["everywhere", "for this run"])
def test_names_survive_when_tracing_is_disabled(off, streamed, server, seen):
    async def work():
        shared = model(server.url)
        boss = make("boss", shared, tools=[make("writer", shared).as_tool("ask", "Ask."), fail])
        prompt = 'call ask {"input": "one"}\ncall fail {"reason": "out of order"}'
        config = RunConfig(tracing_disabled=off == "for this run", trace_include_sensitive_data=False)
        await start(boss, prompt, streamed=streamed, run_config=config)

    agents.set_tracing_disabled(off == "everywhere")
    try:
        run(work())
    finally:
        agents.set_tracing_disabled(False)
    check_calls(seen, server)
    asked, failed = sorted(seen.tools, key=lambda span: span.name)
    assert json.loads(asked.attributes[names.TOOL_ARGUMENTS]) == {"input": "one"}
    assert (failed.status, failed.status_message) == ("error", "out of order")
    assert [s.agent for s in seen.chats] == ["boss", "writer", "boss"]
    assert len([span for span in seen.spans if span.parent_id is None]) == 1


def test_no_processor_is_added_and_none_removed(seen):
    own = Processor()
    agents.add_trace_processor(own)
    assert get_trace_provider()._multi_processor._processors == (own,)


def test_a_trace_of_the_users_holds_all_runs_in_it(server, seen):
    async def work():
        shared = model(server.url)
        with trace("whole", group_id="chat-1"):
            await asyncio.gather(*(Runner.run(make(name, shared), "hello") for name in ("left", "right")))

    run(work())
    check_calls(seen, server)
    (root,) = [span for span in seen.spans if span.parent_id is None]
    assert (root.operation, root.name) == (names.INVOKE_WORKFLOW, "whole")
    assert root.attributes[names.CONVERSATION_ID] == "chat-1"


@STREAMED
def test_a_guardrails_agent_is_an_agent_of_its_own(streamed, server, seen):
    async def work(tripped):
        shared = model(server.url)

        async def check(context, agent, given):
            judged = await Runner.run(make("guard", shared), "say fine")
            return GuardrailFunctionOutput(output_info=judged.final_output, tripwire_triggered=tripped)

        writer = make("writer", shared, input_guardrails=[InputGuardrail(guardrail_function=check)])
        await start(writer, "wait 0.05", streamed=streamed)

    run(work(tripped=False))
    check_calls(seen, server)
    assert {span.agent for span in seen.chats} == {"guard", "writer"}
    seen.spans.clear()
    with pytest.raises(agents.InputGuardrailTripwireTriggered):
        run(work(tripped=True))
    assert [s.status for s in seen.of(names.INVOKE_AGENT) if s.name == "writer"] == ["error"]
    assert [s.status for s in seen.of(names.INVOKE_AGENT) if s.name == "guard"] == ["ok"]


def test_the_agent_of_an_output_guardrail_is_an_agent_of_its_own(server, seen):
    async def check(context, agent, given):
        judged = await Runner.run(make("judge", server.url), "say fine")
        return GuardrailFunctionOutput(output_info=judged.final_output, tripwire_triggered=False)

    run(ask("writer", server.url, "hello", output_guardrails=[OutputGuardrail(guardrail_function=check)]))
    check_calls(seen, server)
    assert [span.agent for span in seen.chats] == ["writer", "judge"]


def test_parallel_runs_inside_parallel_tools_keep_their_places(server, seen):
    @function_tool(name_override="ask")
    async def ask_both(question: str) -> str:
        return " ".join(await asyncio.gather(*(ask(name, server.url, question) for name in ("left", "right"))))

    run(ask("boss", server.url, 'call ask {"question": "a"}\ncall ask {"question": "b"}', tools=[ask_both]))
    check_calls(seen, server)
    assert sorted(span.agent for span in seen.chats) == ["boss", "boss", "left", "left", "right", "right"]
    inner = [span for span in seen.chats if span.agent != "boss"]
    assert {(names.EXECUTE_TOOL, "ask") in seen.above(span) for span in inner} == {True}
    assert len({span.trace_id for span in seen.spans}) == 1


MCP_SERVER = """
try:
    from mcp.server.mcpserver import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server
server = Server("numbers")
@server.tool()
def double(number: int) -> int:
    return 2 * number
@server.tool()
def refuse(reason: str) -> str:
    raise ValueError(reason)
server.run()
"""


async def ask_mcp(server, folder, prompt):
    (folder / "double_server.py").write_text(MCP_SERVER)
    params = {"command": sys.executable, "args": [str(folder / "double_server.py")]}
    async with MCPServerStdio(params=params, client_session_timeout_seconds=30) as mcp:
        return await ask("caller", server.url, prompt, mcp_servers=[mcp])


def test_tools_of_a_local_mcp_server(server, seen, tmp_path):
    assert "42" in run(ask_mcp(server, tmp_path, 'call double {"number": 21}'))
    check_calls(seen, server)
    (tool,) = seen.tools
    assert (tool.name, tool.agent, tool.status) == ("double", "caller", "ok")
    assert json.loads(tool.attributes[names.TOOL_ARGUMENTS]) == {"number": 21}
    assert "42" in tool.attributes[names.TOOL_RESULT]


def test_a_tool_that_fails_on_its_mcp_server_is_an_error(server, seen, tmp_path):
    run(ask_mcp(server, tmp_path, 'call refuse {"reason": "no such moon"}\ncall double {"number": 21}'))
    check_calls(seen, server)
    tools = {tool.name: tool for tool in seen.tools}
    assert {name: tool.status for name, tool in tools.items()} == {"refuse": "error", "double": "ok"}
    assert "Error executing tool refuse" in tools["refuse"].status_message
    assert tools["refuse"].agent == "caller"


def test_a_client_called_inside_a_tool_is_the_tools_agents(server, seen):
    @function_tool
    def look_up(word: str) -> str:
        client = openai.OpenAI(base_url=server.url)
        messages = [{"role": "system", "content": instructions("caller")}, {"role": "user", "content": word}]

        def call(_):
            return client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content

        with ThreadPoolExecutor(1) as pool:
            return next(pool.map(call, [0]))

    run(ask("caller", server.url, 'call look_up {"word": "moon"}', tools=[look_up]))
    check_calls(seen, server)
    (inner,) = [span for span in seen.chats if (names.EXECUTE_TOOL, "look_up") in seen.above(span)]
    assert inner.agent == "caller"


def test_nothing_stays_behind_when_a_run_is_over(server, seen):
    async def work():
        shared = model(server.url)
        result = Runner.run_streamed(make("writer", shared), "say " + "word " * 50)
        async for event in result.stream_events():
            if event.type == "raw_response_event":
                break
        await Runner.run(make("rewriter", shared), "hello")
        client = openai.AsyncOpenAI(base_url=server.url)
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "nobody"}])
        result.cancel()
        await asyncio.sleep(0.05)

    run(work())
    assert [s.agent for s in seen.chats if "nobody" in s.attributes[names.REQUEST]] == [None]
    assert {seen.above(span)[-1] for span in seen.chats if span.agent == "rewriter"} == {
        (names.INVOKE_WORKFLOW, "Agent workflow")
    }
    (writer,) = [span for span in seen.of(names.INVOKE_AGENT) if span.name == "writer"]
    assert not [s for s in seen.chats if s.agent == "rewriter" and s.trace_id == writer.trace_id]


def test_detaching_ends_what_is_open(operations_until_stopped):
    operations = operations_until_stopped(
        lambda url, stop: run(ask("caller", url, "call stop", tools=[function_tool(stop)]))
    )
    assert operations == ["chat", "execute_tool", "invoke_agent", "invoke_workflow"]


def test_detaching_ends_what_is_open_while_others_begin(recorder, sink):
    tracker = SdkTracker(recorder, "openai-agents")

    class Busy(SdkScope):
        def is_mask(self):
            tracker.scopes.setdefault("another", SdkScope(None, "agent", settle_context()))  # as a thread does
            return False

    tracker.scopes["one"] = Busy(None, "agent", settle_context())
    tracker.begin_agent("writer")
    tracker.stop()
    assert [span.name for span in sink.spans] == ["writer"]


def test_loops_in_threads_keep_their_attempts_apart(server, seen):
    def work(number):
        with use_attempt(Attempt(f"r{number}", f"a{number}")):
            run(ask("caller", server.url_of(f"m{number}"), 'call add {"a": 2, "b": 3}', tools=[add]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_id = {span.span_id: span for span in seen.chats}
    for request in server.requests:
        assert by_id[request.headers["traceparent"].split("-")[2]].attempt_id == f"a{request.path[2]}"
    assert {span.attempt_id for span in seen.spans} == {"a0", "a1", "a2"}


class Elsewhere(agents.Model):
    """A model that is not reached through the openai client, but says what it does in the SDK's spans."""

    def __init__(self, *, fails=False):
        self.fails = fails

    async def get_response(self, *args, **kwargs):
        with generation_span(model="elsewhere-1", model_config={"temperature": 0.5, "base_url": None}) as span:
            if self.fails:
                raise ConnectionError("gone")
            span.span_data.input = [{"role": "user", "content": "hello"}]
            span.span_data.output = [{"role": "assistant", "content": "from elsewhere"}]
            span.span_data.usage = {"input_tokens": 3, "output_tokens": 2}
        message = {"type": "output_text", "text": "from elsewhere", "annotations": []}
        item = openai.types.responses.ResponseOutputMessage(
            id="m", type="message", role="assistant", status="completed", content=[message]
        )
        return agents.ModelResponse(output=[item], usage=agents.Usage(), response_id=None)

    def stream_response(self, *args, **kwargs):
        raise AssertionError("not streamed here")


def test_a_model_reached_elsewhere_is_one_chat_span(seen):
    assert run(ask("writer", Elsewhere(), "hello")) == "from elsewhere"
    (chat,) = seen.chats
    assert (chat.agent, chat.name, chat.status) == ("writer", "elsewhere-1", "ok")
    assert json.loads(chat.attributes[names.REQUEST])["messages"] == [{"role": "user", "content": "hello"}]
    assert chat.attributes[names.REQUEST_TEMPERATURE] == 0.5
    assert chat.attributes[names.OUTPUT_TOKENS] == 2
    assert seen.above(chat)[0] == (names.INVOKE_AGENT, "writer")


def test_a_model_reached_elsewhere_that_fails_is_an_error(seen):
    with pytest.raises(ConnectionError):
        run(ask("writer", Elsewhere(fails=True), "hello"))
    (chat,) = seen.chats
    assert (chat.status, chat.status_message, chat.agent) == ("error", "gone", "writer")


@pytest.mark.skipif(not hasattr(agents, "responses_websocket_session"), reason="this version has no websocket")
@STREAMED
def test_responses_over_a_websocket_are_recorded_and_said_to_be_untrainable(streamed, seen, caplog):
    websockets = pytest.importorskip("websockets.asyncio.server")
    from agents.models.openai_responses import OpenAIResponsesWSModel

    async def serve(connection):
        async for frame in connection:
            body = json.loads(frame)
            whole = answer("/responses", body, follow(body, 0), 0)
            for event in pieces("/responses", body, whole):
                await connection.send(json.dumps(event))

    async def work():
        async with websockets.serve(serve, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            url = f"http://127.0.0.1:{port}/v1"
            given = model(url, OpenAIResponsesWSModel, websocket_base_url=f"ws://127.0.0.1:{port}/v1")
            output = await start(make("writer", given), "hello", streamed=streamed)
            with contextlib.suppress(Exception):
                await given.close()
            return output

    other_clients._told.clear()
    attempt = Attempt("r", "a", endpoint="http://127.0.0.1:9", agents=("writer",))
    with use_attempt(attempt), caplog.at_level(logging.WARNING, logger="lightning_spans"):
        assert run(work()).startswith("writer answers")
    (chat,) = seen.chats
    assert (chat.agent, chat.status, chat.attributes[names.ENDPOINT]) == ("writer", "ok", "/responses")
    assert chat.attributes[names.RESPONSE_ID].startswith("resp_")
    assert names.REROUTED not in chat.attributes
    assert "'writer' is to be trained" in caplog.text


# Tools in a replay


def replayed(program, folder):
    """Run a program and a replay of it; give what both gave, how often a tool did something, and its spans."""
    before = len(NOTES)
    outputs, spans = run_twice(program, folder, "openai-agents")
    tools = [span for span in spans if span.operation == names.EXECUTE_TOOL]
    assert {span.attributes[names.REPLAYED] for span in tools} == {True}
    return outputs, len(NOTES) - before, tools


NOTING_SERVER = MCP_SERVER.replace(
    "server.run()",
    """
@server.tool()
def note(text: str) -> str:
    with open(FILE, "a") as file:
        file.write(text)
    if text == "fail":
        raise ValueError("out of order")
    return "noted " + text
server.run()
""",
)


@pytest.mark.parametrize("text", ["one", "fail"])
def test_a_tool_of_an_mcp_server_is_not_run_again_in_a_replay(text, tmp_path):
    noted_in = tmp_path / "notes"
    (tmp_path / "noting_server.py").write_text(f"FILE = {str(noted_in)!r}\n{NOTING_SERVER}")

    async def program(url):
        params = {"command": sys.executable, "args": [str(tmp_path / "noting_server.py")]}
        async with MCPServerStdio(params=params, client_session_timeout_seconds=30) as mcp:
            return await ask("caller", url, f'call note {{"text": "{text}"}}', mcp_servers=[mcp])

    (first, second), _, (span,) = replayed(program, tmp_path)
    assert first == second
    assert noted_in.read_text() == text
    assert span.status == ("error" if text == "fail" else "ok")


def test_a_tool_that_ends_the_run_ends_a_replay_alike(tmp_path):
    @function_tool(failure_error_function=None)
    def fatal(text: str) -> str:
        return write_note(text)

    def program(url):
        with pytest.raises(agents.UserError) as error:
            run(ask("caller", url, 'call fatal {"text": "fail"}', tools=[fatal]))
        return str(error.value)

    (first, second), made, (span,) = replayed(program, tmp_path)
    assert first == second
    assert (made, span.status) == (1, "error")


def test_results_that_the_trace_may_not_hold_come_back_all_the_same(tmp_path):
    @function_tool
    def data(text: str) -> dict[str, str]:
        return {"seen": write_note(text)}

    async def program(url):
        config = RunConfig(trace_include_sensitive_data=False)
        caller = make("caller", url, tools=[note, data])
        prompt = 'call note {"text": "a"}\ncall data {"text": "b"}'
        result = await Runner.run(caller, prompt, run_config=config)
        return result.final_output, [item.output for item in result.new_items if item.type == "tool_call_output_item"]

    (first, second), made, _ = replayed(program, tmp_path)
    assert first == second
    assert type(second[1][1]) is dict
    assert made == 2


@pytest.mark.skipif(not hasattr(agents, "RunState"), reason="this version knows no approvals")
@pytest.mark.parametrize("decision", ["approve", "reject"])
def test_a_tool_that_waits_for_approval_is_no_call_before_it_runs(decision, tmp_path):
    async def work(url):
        caller = make("caller", url, tools=[function_tool(programs.note, needs_approval=True)])
        waiting = await Runner.run(caller, 'call note {"text": "a"}')
        state = waiting.to_state()
        for item in waiting.interruptions:
            getattr(state, decision)(item)
        return (await Runner.run(caller, state)).final_output

    before = len(NOTES)
    (first, second), spans = run_twice(lambda url: run(work(url)), tmp_path, "openai-agents")
    results = [span.attributes[names.TOOL_RESULT] for span in spans if span.operation == names.EXECUTE_TOOL]
    assert first == second
    assert len(NOTES) - before == len(results) == (1 if decision == "approve" else 0)
    assert all(result in first for result in results)


def test_the_result_of_a_rejected_call_is_its_message(seen):
    with agents.trace("run"), agents.function_span("note") as span:
        span.span_data.output = agents.FunctionToolResult(tool=note, output="not approved", run_item=None)
    (tool,) = seen.tools
    assert tool.attributes[names.TOOL_RESULT] == "not approved"


@pytest.mark.skipif(not hasattr(agents, "ToolTimeoutError"), reason="this version knows no time limits of tools")
@pytest.mark.parametrize("behavior", ["error_as_result", "raise_exception"])
def test_a_tool_that_its_time_limit_cuts_off_is_an_error_in_a_replay_too(behavior, tmp_path):
    @function_tool(timeout=0.5, timeout_behavior=behavior)
    async def stuck(text: str) -> str:
        write_note(text)
        await asyncio.Event().wait()

    def program(url):
        try:
            return run(ask("caller", url, 'call stuck {"text": "a"}', tools=[stuck]))
        except agents.ToolTimeoutError as error:
            return str(error)

    before = len(NOTES)
    (first, second), spans = run_twice(program, tmp_path, "openai-agents")
    (tool,) = [span for span in spans if span.operation == names.EXECUTE_TOOL]
    assert first == second
    assert "timed out" in first
    assert (len(NOTES) - before, tool.status) == (1, "error")
    assert "timed out" in tool.status_message


def test_what_invokes_a_tool_is_one_object_in_its_span_and_outside_of_it(server, seen):
    found = []

    @agents.function_tool
    def look() -> str:
        found.append(look.on_invoke_tool)
        return "seen"

    found.append(look.on_invoke_tool)
    run(ask("caller", server.url, "call look {}", tools=[look]))
    assert len(found) == 2
    assert found[0] is found[1] is look.on_invoke_tool


def test_tools_are_what_they_were_when_nothing_is_attached(tmp_path):
    before = note.on_invoke_tool
    replayed(lambda url: run(ask("caller", url, 'call note {"text": "a"}', tools=[note])), tmp_path)
    assert note.on_invoke_tool is before
    assert "on_invoke_tool" not in vars(agents.FunctionTool)
