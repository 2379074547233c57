from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest

from support.listening import check_calls

pytest.importorskip("autogen_agentchat")

import openai
from autogen_agentchat import teams
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent, CodeExecutorAgent, SocietyOfMindAgent
from autogen_agentchat.base import Handoff, Response, TaskResult
from autogen_agentchat.conditions import HandoffTermination, MaxMessageTermination, SourceMatchTermination
from autogen_agentchat.messages import ModelClientStreamingChunkEvent, TextMessage
from autogen_agentchat.teams import (
    BaseGroupChat,
    MagenticOneGroupChat,
    RoundRobinGroupChat,
    SelectorGroupChat,
    Swarm,
)
from autogen_agentchat.tools import AgentTool
from autogen_core import (
    AgentId,
    CancellationToken,
    MessageContext,
    RoutedAgent,
    SingleThreadedAgentRuntime,
    TopicId,
    TypeSubscription,
    message_handler,
)
from autogen_core._message_handler_context import MessageHandlerContext
from autogen_core.code_executor import CodeExecutor, CodeResult
from autogen_core.models import ChatCompletionClient, CreateResult, RequestUsage, SystemMessage, UserMessage
from autogen_core.tool_agent import ToolAgent, tool_agent_caller_loop
from autogen_core.tools import BaseStreamTool, FunctionTool, StaticStreamWorkbench, StaticWorkbench
from autogen_ext.models.openai import OpenAIChatCompletionClient
from autogen_ext.tools.code_execution import PythonCodeExecutionTool
from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel

import lightning_autogen
from lightning_autogen.agents import AutogenAgents
from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.programs import AgentPrograms, note
from lightning_conformance.plugins.replayed import NOTES, run_twice
from lightning_conformance.plugins.script import Reply, agent_of, follow
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    PluginConformance,
    instructions,
    write_note,
)
from lightning_spans import Attempt, use_attempt
from lightning_spans.record.context import current_agent
from lightning_spans.record.tracing.tracers import TRACERS
from lightning_spans.schema import spans as names

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "gpt-4o",
    "structured_output": True,
}


def model(url, **options):
    return OpenAIChatCompletionClient(model=MODEL, base_url=url, model_info=INFO, **options)


def make(name, url_or_model, **options):
    given = model(url_or_model) if isinstance(url_or_model, str) else url_or_model
    return AssistantAgent(name, given, system_message=instructions(name), **options)


async def ask(name, url, prompt, **options):
    result = await make(name, url, **options).run(task=prompt)
    return result.messages[-1].content


def run(coroutine):
    return asyncio.run(coroutine)


async def add(a: int, b: int) -> int:
    return a + b


class TestConformance(AgentPrograms, PluginConformance):
    framework = "autogen"
    tracers = TRACERS
    unsupported: ClassVar[dict[str, str]] = {
        **dict.fromkeys(["responses", "responses_streaming"], "AutoGen's client speaks chat completions alone"),
        "choices": "AutoGen's client refuses `n`",
        "unnamed": "an agent must have a name",
    }

    def patched(self):
        return [
            (AssistantAgent, "on_messages"),
            (AssistantAgent, "on_messages_stream"),
            (AssistantAgent, "_execute_tool_call"),
            (BaseChatAgent, "on_messages_stream"),
            (BaseGroupChat, "run_stream"),
            (MessageHandlerContext, "populate_context"),
        ]

    def make(self, name, url, *tools, **client):
        options = {"tools": list(tools), "reflect_on_tool_use": True} if tools else {}
        return make(name, model(url, **client), **options)

    async def answer(self, agent, prompt):
        return (await agent.run(task=prompt)).messages[-1].content

    def namesakes(self, url):
        async def work(name):
            team = RoundRobinGroupChat([make("writer", url)], termination_condition=MaxMessageTermination(2))
            team._name = name  # `name=` since 0.6.3
            return (await team.run(task=PROMPTS["namesakes"])).messages[-1].content

        async def both():
            return await asyncio.gather(work("red"), work("blue"))

        return run(both())

    def streaming(self, url):
        async def work():
            agent = make("writer", url, model_client_stream=True)
            return [str(getattr(m, "content", "")) async for m in agent.run_stream(task=PROMPTS["streaming"])]

        return run(work())

    def abandoned(self, url):
        async def work():
            agent = make("writer", url, model_client_stream=True)
            async for message in agent.run_stream(task=PROMPTS["abandoned"]):
                if isinstance(message, ModelClientStreamingChunkEvent):
                    return message.content
            return None

        return run(work())

    def cut(self, url):
        seen = []

        async def work():
            agent = make("writer", url, model_client_stream=True)
            async for message in agent.run_stream(task=PROMPTS["cut"]):
                seen.append(message.content)  # noqa: PERF401 - what came before the error counts

        with pytest.raises(Exception) as error:  # noqa: PT011 - which one depends on the version
            run(work())
        return seen, type(error.value).__name__

    def heard_by_the_reader_of_a_team(self, url):
        async def work(given):
            agent = make("writer", given, tools=[add])
            team = RoundRobinGroupChat([agent], termination_condition=MaxMessageTermination(2))
            return [type(message).__name__ async for message in team.run_stream(task=PROMPTS["one_agent"])]

        return [run(work(given)) for given in (url, Elsewhere())]

    def heard_by_the_event_logger(self, url):
        seen = []

        class Hears(logging.Handler):
            def emit(self, record):
                seen.append(type(record.msg).__name__)

        logger, handler = logging.getLogger("autogen_core.events"), Hears()
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            run(ask("caller", url, PROMPTS["tool_call"], tools=[add]))
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
        return seen


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "user-key")


@pytest.fixture
def server():
    with ScriptedServer() as scripted:
        yield scripted


STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@STREAMED
def test_a_round_robin_is_one_tree(streamed, server, seen):
    async def work():
        agents = [make(name, server.url, model_client_stream=streamed) for name in ("left", "right")]
        return await RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(5)).run(task="hello")

    run(work())
    check_calls(seen, server)
    assert [span.agent for span in seen.chats] == ["left", "right", "left", "right"]
    (root,) = [span for span in seen.spans if span.parent_id is None]
    assert (root.operation, root.name) == (names.INVOKE_WORKFLOW, "RoundRobinGroupChat")
    assert len({span.trace_id for span in seen.spans}) == 1


def test_the_calls_that_pick_a_speaker_are_the_managers(seen):
    def picks(body):
        return "role play" in json.dumps(body["messages"])

    def script(body, count):
        return Reply("right") if picks(body) else follow(body, count)

    async def work(url):
        agents = [make(name, url) for name in ("left", "right")]
        ends = MaxMessageTermination(2)
        team = SelectorGroupChat(agents, model_client=model(url), termination_condition=ends)
        return await team.run(task="hello")

    with ScriptedServer(script) as server:
        run(work(server.url))
        check_calls(seen, server, names_of=lambda body: "SelectorGroupChatManager" if picks(body) else agent_of(body))
    assert [span.agent for span in seen.chats] == ["SelectorGroupChatManager", "right"]
    assert seen.above(seen.chats[0]) == [
        (names.INVOKE_AGENT, "SelectorGroupChatManager"),
        (names.INVOKE_WORKFLOW, "SelectorGroupChat"),
    ]


def society(url):
    pair = [make(name, url) for name in ("left", "right")]
    inner = RoundRobinGroupChat(pair, termination_condition=MaxMessageTermination(3))
    agents = [SocietyOfMindAgent("society", team=inner, model_client=model(url)), make("writer", url)]
    return RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(3))


def graph(url):
    nodes = [make(name, url) for name in ("first", "left", "right")]
    edges = teams.DiGraphBuilder()
    for node in nodes:
        edges.add_node(node)
    for node in nodes[1:]:
        edges.add_edge(nodes[0], node)
    return teams.GraphFlow(nodes, graph=edges.build())


def magentic(url):
    return MagenticOneGroupChat([make("writer", url)], model_client=model(url), max_turns=2)


KINDS = {
    "society": (society, {"left", "right", "society", "writer"}, "society"),
    "graph": (graph, {"first", "left", "right"}, None),
    "magentic": (magentic, {"MagenticOneOrchestrator", "writer"}, "MagenticOneOrchestrator"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_kinds_of_teams_are_one_tree_and_their_hidden_calls_are_named(kind, seen):
    build, who, hidden = KINDS[kind]
    if kind == "graph" and not hasattr(teams, "GraphFlow"):
        pytest.skip("this version has no GraphFlow")

    def script(body, count):
        asked = json.dumps(body["messages"])
        if "is_request_satisfied" not in asked:
            return follow(body, count)
        ledger = {"is_request_satisfied": False, "is_progress_being_made": True, "is_in_loop": False}
        ledger |= {"instruction_or_question": "go on", "next_speaker": "writer"}
        return Reply(json.dumps({key: {"reason": "so", "answer": value} for key, value in ledger.items()}))

    async def work(url):
        return await build(url).run(task="hello")

    with ScriptedServer(script) as server:
        run(work(server.url))
        check_calls(seen, server, names_of=lambda body: agent_of(body) or hidden)
    assert {span.agent for span in seen.chats} == who
    assert len([span for span in seen.spans if span.parent_id is None]) == 1


def test_a_swarm_hands_over_with_a_tool(server, seen):
    async def work():
        shared = model(server.url)
        agents = [make("left", shared, handoffs=["right"]), make("right", shared)]
        return await Swarm(agents, termination_condition=SourceMatchTermination(["right"])).run(
            task="call transfer_to_right {}"
        )

    run(work())
    check_calls(seen, server)
    assert [span.agent for span in seen.chats] == ["left", "right"]
    (handoff,) = seen.tools
    assert (handoff.name, handoff.agent, handoff.status) == ("transfer_to_right", "left", "ok")
    assert handoff.attributes[names.HANDOFF] == "right"


def test_a_handoff_of_another_name_says_to_whom(server, seen):
    async def work():
        shared = model(server.url)
        agents = [make("left", shared, handoffs=[Handoff(target="right", name="escalate")]), make("right", shared)]
        ends = SourceMatchTermination(["right"])
        return await Swarm(agents, termination_condition=ends).run(task="call escalate {}")

    run(work())
    (handoff,) = seen.tools
    assert (handoff.name, handoff.attributes[names.HANDOFF]) == ("escalate", "right")


class Calculator(CodeExecutor):
    """Runs code by counting its letters."""

    async def execute_code_blocks(self, code_blocks, cancellation_token):
        total = sum(len(block.code) for block in code_blocks)
        return CodeResult(exit_code=int(total > 10), output=f"{total} letters")

    async def start(self): ...
    async def stop(self): ...
    async def restart(self): ...


@pytest.mark.parametrize(("code", "status"), [("1 + 1", "ok"), ("1 + 1 + 1 + 1", "error")])
def test_code_that_an_agent_runs_is_a_tool_call(code, status, seen):
    async def work():
        coder = CodeExecutorAgent("coder", Calculator())
        message = TextMessage(content=f"```python\n{code}\n```", source="user")
        await coder.on_messages([message], CancellationToken())

    run(work())
    (span,) = seen.tools
    assert (span.name, span.agent, span.status) == ("code_executor", "coder", status)
    assert json.loads(span.attributes[names.TOOL_ARGUMENTS])["code_blocks"][0]["code"].strip() == code
    assert span.attributes[names.TOOL_RESULT].endswith("letters")


@pytest.mark.parametrize("code", ["1 + 1", "1 + 1 + 1 + 1"])
def test_code_that_an_agent_runs_is_not_run_again_in_a_replay(code, tmp_path):
    made = []

    class Counting(Calculator):
        async def execute_code_blocks(self, code_blocks, cancellation_token):
            made.append(code_blocks)
            return await super().execute_code_blocks(code_blocks, cancellation_token)

    async def work(url):
        coder = CodeExecutorAgent("coder", Counting())
        message = TextMessage(content=f"```python\n{code}\n```", source="user")
        said = await coder.on_messages([message], CancellationToken())
        return said.chat_message.content

    (first, second), spans = run_twice(lambda url: run(work(url)), tmp_path, "autogen")
    assert first == second
    assert len(made) == 1
    assert [span.attributes[names.REPLAYED] for span in spans if span.operation == names.EXECUTE_TOOL] == [True]


def test_code_that_a_tool_runs_is_that_tools_call(server, seen):
    async def work():
        tools = [PythonCodeExecutionTool(Calculator())]
        caller = make("caller", server.url, tools=tools, reflect_on_tool_use=True)
        await caller.run(task='call CodeExecutor {"code": "1 + 1"}')

    run(work())
    assert [span.name for span in seen.tools] == ["CodeExecutor"]


@STREAMED
def test_an_agent_as_a_tool_is_under_the_tool(streamed, server, seen):
    async def work():
        writer = make("writer", server.url)
        tool = AgentTool(writer, return_value_as_last_message=True)
        boss = make("boss", server.url, tools=[tool], reflect_on_tool_use=True, model_client_stream=streamed)
        return (await boss.run(task='call writer {"task": "hi"}')).messages[-1].content

    assert "[writer answers 'hi']" in run(work())
    check_calls(seen, server)
    assert [span.agent for span in seen.chats] == ["boss", "writer", "boss"]
    inner = [span for span in seen.chats if span.agent == "writer"][0]  # noqa: RUF015
    assert seen.above(inner) == [
        (names.INVOKE_AGENT, "writer"),
        (names.EXECUTE_TOOL, "writer"),
        (names.INVOKE_AGENT, "boss"),
    ]
    assert {s.attributes[names.AGENT_PATH] for s in seen.of(names.INVOKE_AGENT)} == {"boss", "boss/writer"}


def test_agents_of_one_name_in_two_teams_are_told_apart(server, seen):
    async def team(kind, word):
        agents = [make("writer", server.url), make("rewriter", server.url)]
        ends = MaxMessageTermination(3)
        options = {"model_client": model(server.url)} if kind is SelectorGroupChat else {}
        return await kind(agents, termination_condition=ends, **options).run(task=f"hello {word}")

    async def work():
        await asyncio.gather(team(RoundRobinGroupChat, "one"), team(RoundRobinGroupChat, "two"))

    run(work())
    check_calls(seen, server)
    assert len([span for span in seen.spans if span.parent_id is None]) == 2
    for span in seen.chats:
        words = {word for word in ("one", "two") if f"hello {word}" in span.attributes[names.REQUEST]}
        same = [s for s in seen.chats if s.trace_id == span.trace_id]
        assert all(f"hello {word}" in s.attributes[names.REQUEST] for word in words for s in same)


def test_a_teams_agents_are_its_own_on_a_runtime_that_was_started_elsewhere(server, seen):
    async def one(runtime, number):
        with use_attempt(Attempt(f"r{number}", f"a{number}")):
            agents = [make(name, server.url_of(f"m{number}")) for name in ("left", "right")]
            ends = MaxMessageTermination(3)
            await RoundRobinGroupChat(agents, termination_condition=ends, runtime=runtime).run(task=f"hi {number}")

    async def work():
        runtime = SingleThreadedAgentRuntime()
        runtime.start()
        await asyncio.gather(*(one(runtime, number) for number in range(3)))
        await runtime.stop()

    run(work())
    check_calls(seen, server)
    by_id = {span.span_id: span for span in seen.chats}
    for request in server.requests:
        assert by_id[request.headers["traceparent"].split("-")[2]].attempt_id == f"a{request.path[2]}"
    assert len([span for span in seen.spans if span.parent_id is None]) == 3
    assert len(seen.of(names.INVOKE_AGENT)) == len(seen.chats) == 6
    for span in seen.chats:
        assert seen.above(span) == [(names.INVOKE_AGENT, span.agent), (names.INVOKE_WORKFLOW, "RoundRobinGroupChat")]


@dataclass
class Question:
    text: str


class Worker(RoutedAgent):
    """An agent that is written for AutoGen's core alone."""

    def __init__(self, url, tool):
        super().__init__("works")
        self._client = openai.AsyncOpenAI(base_url=url)
        self._tool = tool

    @message_handler
    async def answer(self, message: Question, ctx: MessageContext) -> str:
        number = await self._tool.run_json({"a": 1, "b": 2}, ctx.cancellation_token)
        asked = [{"role": "system", "content": instructions("worker")}, {"role": "user", "content": str(number)}]
        said = await self._client.chat.completions.create(model=MODEL, messages=asked)
        return said.choices[0].message.content


def test_teams_that_run_at_once_in_threads_are_known_until_they_end(recorder):
    follower = AutogenAgents(recorder, "autogen")
    switch_s = sys.getswitchinterval()

    async def run_stream(team):
        yield follower._teams[team._team_id]
        yield TaskResult(messages=[])

    async def work(team):
        return [item async for item in follower.wrap_run_stream(run_stream)(team)]

    def in_thread(number):
        return [len(asyncio.run(work(SimpleNamespace(_team_id=f"{number} {turn}")))) for turn in range(100)]

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(in_thread, range(8))) == [[2] * 100] * 8
    finally:
        sys.setswitchinterval(switch_s)
    assert follower._teams == {}


def test_an_agent_of_the_core_has_its_types_name(server, seen):
    async def work():
        runtime = SingleThreadedAgentRuntime()
        tool = FunctionTool(add, "Adds.")
        await Worker.register(runtime, "worker", lambda: Worker(server.url, tool))
        runtime.start()
        said = await runtime.send_message(Question("go"), AgentId("worker", "default"))
        await runtime.stop_when_idle()
        return said

    assert run(work()) == "worker answers '3'"
    check_calls(seen, server)
    (agent,) = seen.of(names.INVOKE_AGENT)
    assert agent.name == "worker"
    assert {span.parent_id for span in [*seen.chats, *seen.tools]} == {agent.span_id}
    assert [(t.name, t.agent, t.attributes[names.TOOL_RESULT]) for t in seen.tools] == [("add", "worker", "3")]


class Asker(RoutedAgent):
    """An agent of the core that asks its model, another agent, or one after the other."""

    def __init__(self, name, url, *, to=None, way="send"):
        super().__init__("asks")
        self._name = name
        self._client = openai.AsyncOpenAI(base_url=url) if url else None
        self._to = to
        self._way = way

    @message_handler
    async def go(self, message: Question, ctx: MessageContext) -> str:
        if self._client is not None:
            asked = [{"role": "system", "content": instructions(self._name)}, {"role": "user", "content": message.text}]
            await self._client.chat.completions.create(model=MODEL, messages=asked)
        if self._to is not None:
            await tell(self, message.text, self._way, AgentId(self._to, self.id.key))
        return "done"


async def tell(sender, text, way, to):
    """Tell an agent of `runtime_of` something; the sender is an agent or the runtime."""
    if way == "send":
        await sender.send_message(Question(text), to)
    else:
        await sender.publish_message(Question(text), TopicId(to.type, to.key))


async def runtime_of(**agents):
    runtime = SingleThreadedAgentRuntime()
    for name, agent in agents.items():
        await Asker.register(runtime, name, agent)
        await runtime.add_subscription(TypeSubscription(name, name))
    return runtime


@pytest.mark.parametrize("way", ["send", "publish"])
@pytest.mark.parametrize("started", ["outside of any", "in another"])
def test_an_agent_of_the_core_works_for_the_attempt_that_told_it(started, way, server, seen):
    with ScriptedServer() as one, ScriptedServer() as two:
        policies = {"0": one, "1": two}
        attempts = {
            key: Attempt(f"r{key}", f"a{key}", endpoint=policy.base, key=f"k{key}", agents=("worker",))
            for key, policy in policies.items()
        }

        async def work():
            runtime = await runtime_of(worker=lambda: Asker("worker", server.url))
            if started == "in another":
                with use_attempt(attempts["0"]):
                    runtime.start()
            else:
                runtime.start()
            for key, attempt in attempts.items():
                with use_attempt(attempt):
                    await tell(runtime, key, way, AgentId("worker", key))
            await runtime.stop_when_idle()

        run(work())
        assert server.requests == []
        for key, policy in policies.items():
            got = [(request.body["messages"][-1]["content"], request.headers) for request in policy.requests]
            assert [(text, headers["authorization"]) for text, headers in got] == [(key, f"Bearer k{key}")]
        asked = {json.loads(s.attributes[names.REQUEST])["messages"][-1]["content"]: s.attempt_id for s in seen.chats}
        assert asked == {"0": "a0", "1": "a1"}
        assert len({span.trace_id for span in seen.spans}) == 2


@pytest.mark.parametrize("way", ["send", "publish"])
@pytest.mark.parametrize("first", [True, False], ids=["asks first", "only tells"])
def test_an_agent_of_the_core_that_another_told_is_under_it(first, way, server, seen):
    async def work():
        runtime = await runtime_of(
            boss=lambda: Asker("boss", server.url if first else None, to="editor", way=way),
            editor=lambda: Asker("editor", server.url, to="worker", way=way),
            worker=lambda: Asker("worker", server.url),
        )
        runtime.start()
        await runtime.send_message(Question("go"), AgentId("boss", "default"))
        await runtime.stop_when_idle()

    run(work())
    check_calls(seen, server)
    assert [span.agent for span in seen.chats] == [*["boss"] * first, "editor", "worker"]
    assert seen.above(seen.chats[-1]) == [(names.INVOKE_AGENT, name) for name in ("worker", "editor", "boss")]
    assert len(seen.of(names.INVOKE_AGENT)) == 3
    assert len({span.trace_id for span in seen.spans}) == 1


def test_a_tool_that_a_tool_agent_runs_is_the_callers(server, seen):
    tools = [FunctionTool(add, "Adds.")]

    class Caller(RoutedAgent):
        @message_handler
        async def go(self, message: Question, ctx: MessageContext) -> str:
            asked = [SystemMessage(content=instructions("caller")), UserMessage(content=message.text, source="user")]
            runs = AgentId("executor", self.id.key)
            said = await tool_agent_caller_loop(self, runs, model(server.url), asked, tools)
            return said[-1].content

    async def work():
        runtime = SingleThreadedAgentRuntime()
        await ToolAgent.register(runtime, "executor", lambda: ToolAgent("runs tools", tools))
        await Caller.register(runtime, "caller", lambda: Caller("calls"))
        runtime.start()
        said = await runtime.send_message(Question(PROMPTS["tool_call"]), AgentId("caller", "default"))
        await runtime.stop_when_idle()
        return said

    assert "[5]" in run(work())
    check_calls(seen, server)
    (tool,) = seen.tools
    assert (tool.name, tool.agent, tool.attributes[names.TOOL_RESULT]) == ("add", "caller", "5")
    assert {seen.above(span)[0] for span in [*seen.chats, tool]} == {(names.INVOKE_AGENT, "caller")}
    assert [span.name for span in seen.of(names.INVOKE_AGENT)] == ["caller"]
    assert len({span.trace_id for span in seen.spans}) == 1


@pytest.mark.parametrize("way", ["on_messages", "on_messages_stream"])
def test_an_agent_that_is_given_messages_directly_is_named(way, server, seen):
    async def work():
        agent = make("writer", server.url)
        given = [TextMessage(content="hello", source="user")]
        if way == "on_messages":
            return (await agent.on_messages(given, CancellationToken())).chat_message.content
        stream = agent.on_messages_stream(given, CancellationToken())
        return [m async for m in stream if isinstance(m, Response)][0].chat_message.content  # noqa: RUF015

    assert run(work()) == "writer answers 'hello'"
    check_calls(seen, server)
    assert [span.name for span in seen.of(names.INVOKE_AGENT)] == ["writer"]


class Own(BaseChatAgent):
    """A chat agent of the user's own, defined while nothing is attached."""

    def __init__(self, name, url):
        super().__init__(name, "of the user's own")
        self._client = openai.AsyncOpenAI(base_url=url)

    @property
    def produced_message_types(self):
        return (TextMessage,)

    async def on_messages(self, messages, cancellation_token):
        asked = [{"role": "system", "content": instructions(self.name)}, {"role": "user", "content": "hello"}]
        said = await self._client.chat.completions.create(model=MODEL, messages=asked)
        return Response(chat_message=TextMessage(content=said.choices[0].message.content, source=self.name))

    async def on_reset(self, cancellation_token):
        pass


def test_an_agent_of_the_users_own_class_is_named(server, seen):
    class Later(Own):
        async def on_messages(self, messages, cancellation_token):
            return await super().on_messages(messages, cancellation_token)

    async def work():
        agents = [Own("early", server.url), Later("late", server.url)]
        await RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(3)).run(task="hello")
        await agents[0].run(task="hello")

    run(work())
    check_calls(seen, server)
    assert [span.name for span in seen.of(names.INVOKE_AGENT)] == ["early", "late", "early"]


def test_a_reader_of_a_stream_is_outside_of_the_agent(server, seen):
    async def work():
        client = openai.AsyncOpenAI(base_url=server.url)
        agent = make("writer", server.url, model_client_stream=True)
        async for _ in agent.run_stream(task="say a b c"):
            assert current_agent() is None
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "mine"}])
        stream = agent.run_stream(task="say d e f")
        await anext(stream)
        await stream.aclose()
        assert not [key for key in otel_context.get_current() if key.startswith("lightning-")]

    run(work())
    check_calls(seen, server)
    assert {span.agent for span in seen.chats if '"mine"' in span.attributes[names.REQUEST]} == {None}


def test_a_stream_that_is_left_behind_ends_its_agent(server, seen):
    async def work():
        team = RoundRobinGroupChat([make("writer", server.url)], termination_condition=MaxMessageTermination(2))
        async for message in team.run_stream(task="hello"):
            if getattr(message, "source", None) == "writer":
                break
        await make("rewriter", server.url).run(task="hello")

    run(work())
    check_calls(seen, server)
    assert len([span for span in seen.spans if span.parent_id is None]) == 2


def test_a_sync_tool_in_an_executor_keeps_its_agent(server, seen):
    def look_up(word: str) -> str:
        assert threading.current_thread() is not threading.main_thread()
        client = openai.OpenAI(base_url=server.url)
        asked = [{"role": "system", "content": instructions("caller")}, {"role": "user", "content": word}]
        return client.chat.completions.create(model=MODEL, messages=asked).choices[0].message.content

    run(ask("caller", server.url, 'call look_up {"word": "moon"}', tools=[look_up]))
    check_calls(seen, server)
    (inner,) = [span for span in seen.chats if (names.EXECUTE_TOOL, "look_up") in seen.above(span)]
    assert inner.agent == "caller"


class Counted(BaseModel):
    to: int


class Count(BaseStreamTool[Counted, TextMessage, Counted]):
    """A streaming tool."""

    def __init__(self):
        super().__init__(Counted, Counted, "count", "Counts.")

    async def run(self, args, cancellation_token):
        return Counted(to=args.to)

    async def run_stream(self, args, cancellation_token) -> AsyncGenerator[TextMessage | Counted, None]:
        if args.to < 0:
            raise ValueError("can't count down")
        for number in range(args.to):
            yield TextMessage(content=str(number), source="count")
        yield Counted(to=args.to)


def test_a_streaming_tool_is_one_span(server, seen):
    async def work():
        agent = make("caller", server.url, tools=[Count()])
        return [type(m).__name__ async for m in agent.run_stream(task='call count {"to": 3}\ncall count {"to": -1}')]

    run(work())
    check_calls(seen, server)
    good, bad = sorted(seen.tools, key=lambda span: span.status, reverse=True)
    assert (good.status, json.loads(good.attributes[names.TOOL_RESULT])) == ("ok", {"to": 3})
    assert (bad.status, bad.attributes[names.ERROR_TYPE]) == ("error", "ValueError")
    assert "can't count down" in bad.status_message
    assert {span.agent for span in seen.tools} == {"caller"}


def test_a_streaming_tool_that_a_program_runs_itself_is_one_span(seen):
    async def work():
        items = Count().run_json_stream(args={"to": 2}, cancellation_token=CancellationToken(), call_id="c1")
        return [type(item).__name__ async for item in items]

    assert run(work()) == ["TextMessage", "TextMessage", "Counted"]
    (tool,) = seen.tools
    assert (tool.name, tool.attributes[names.TOOL_CALL_ID], tool.status) == ("count", "c1", "ok")
    assert json.loads(tool.attributes[names.TOOL_RESULT]) == {"to": 2}


def test_tool_calls_that_no_tool_answers_are_errors(server, seen):
    run(ask("caller", server.url, "call nothing {}\ncall add {broken", tools=[add]))
    check_calls(seen, server)
    assert sorted((span.name, span.status) for span in seen.tools) == [("add", "error"), ("nothing", "error")]
    assert {span.attributes[names.TOOL_ARGUMENTS] for span in seen.tools} == {"{}", "{broken"}


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


@pytest.mark.parametrize("by", ["agent", "program"])
def test_tools_of_a_local_mcp_workbench(by, server, seen, tmp_path):
    mcp = pytest.importorskip("autogen_ext.tools.mcp", exc_type=ImportError)
    (tmp_path / "double_server.py").write_text(MCP_SERVER)
    params = mcp.StdioServerParams(
        command=sys.executable, args=[str(tmp_path / "double_server.py")], read_timeout_seconds=30
    )

    async def work():
        async with mcp.McpWorkbench(params) as workbench:
            if by == "program":
                with lightning_autogen.agent("caller"):
                    return (await workbench.call_tool("double", {"number": 21})).to_text()
            return await ask("caller", server.url, 'call double {"number": 21}', workbench=workbench)

    assert "42" in run(work())
    (tool,) = seen.tools
    assert (tool.name, tool.agent, tool.status) == ("double", "caller", "ok")
    assert json.loads(tool.attributes[names.TOOL_ARGUMENTS]) == {"number": 21}
    assert "42" in tool.attributes[names.TOOL_RESULT]


class Elsewhere(ChatCompletionClient):
    """A client that does not use openai's; `cached` as a cache around another one would say it."""

    def __init__(self, *, cached=False, error=None):
        self.cached = cached
        self.error = error

    async def create(self, messages, **options):
        if self.error:
            raise self.error
        usage = RequestUsage(prompt_tokens=3, completion_tokens=2)
        return CreateResult(finish_reason="stop", content="from elsewhere", usage=usage, cached=self.cached)

    async def create_stream(self, messages, **options):
        yield "from "
        yield "elsewhere"
        yield await Elsewhere.create(self, messages)

    model_info = capabilities = INFO

    async def close(self):
        pass

    def actual_usage(self):
        return RequestUsage(prompt_tokens=0, completion_tokens=0)

    total_usage = actual_usage

    def count_tokens(self, messages, **options):
        return 0

    remaining_tokens = count_tokens


@STREAMED
def test_a_model_reached_elsewhere_is_one_chat_span(streamed, seen):
    assert run(ask("writer", Elsewhere(), "hello", model_client_stream=streamed)) == "from elsewhere"
    (chat,) = seen.chats
    assert (chat.agent, chat.status) == ("writer", "ok")
    assert json.loads(chat.attributes[names.REQUEST])["messages"] == [
        {"role": "system", "content": "You are writer."},
        {"role": "user", "content": "hello"},
    ]
    assert chat.attributes[names.OUTPUT_TOKENS] == 2
    assert chat.attributes[names.FINISH_REASONS] == ["stop"]
    assert seen.above(chat) == [(names.INVOKE_AGENT, "writer")]


def test_an_answer_from_a_cache_is_no_call(seen):
    run(ask("writer", Elsewhere(cached=True), "hello"))
    assert not seen.chats


def test_a_model_reached_elsewhere_that_fails_is_an_error(seen):
    with pytest.raises(ConnectionError):
        run(ask("writer", Elsewhere(error=ConnectionError("gone")), "hello"))
    (chat,) = seen.chats
    assert (chat.status, chat.status_message, chat.agent) == ("error", "gone", "writer")
    assert [span.status for span in seen.of(names.INVOKE_AGENT)] == ["error"]


def test_the_users_own_tracing_is_as_it_was(server, tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_SPOOL", str(tmp_path / "spool"))
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(otel_trace, "_TRACER_PROVIDER", provider)

    async def work():
        agents = [make(name, server.url, tools=[add], reflect_on_tool_use=True) for name in ("left", "right")]
        ends = HandoffTermination("nobody") | MaxMessageTermination(5)
        async for _ in RoundRobinGroupChat(agents, termination_condition=ends).run_stream(
            task='call add {"a": 2, "b": 3}'
        ):
            pass
        async for _ in agents[0].run_stream(task='call add {"a": 2, "b": 3}'):
            with provider.get_tracer("mine").start_as_current_span("read"):
                pass

    def shape():
        spans = exporter.get_finished_spans()
        by_id = {span.context.span_id: span.name for span in spans}
        kept = [s for s in spans if not s.name.startswith("autogen ")]  # those have random names
        found = sorted((s.name, by_id.get(s.parent.span_id, "?") if s.parent else "") for s in kept)
        exporter.clear()
        return [(name, parent if not parent.startswith("autogen ") else "autogen") for name, parent in found]

    run(work())
    alone = shape()
    with lightning_autogen.attach(store=str(tmp_path / "traces.db")):
        run(work())
    assert shape() == alone
    assert any(name == "execute_tool add" for name, _ in alone)


def test_detaching_ends_what_is_open(operations_until_stopped):
    operations = operations_until_stopped(
        lambda url, stop: run(ask("caller", url, "call stop {}", tools=[stop], reflect_on_tool_use=True))
    )
    assert operations == ["chat", "execute_tool", "invoke_agent"]


def test_detach_restores_classes_that_came_later(seen, tmp_path):
    class Later(Own):
        async def on_messages(self, messages, cancellation_token):
            raise AssertionError("never called")

    patched = inspect.getattr_static(Later, "on_messages")
    lightning_autogen.attach(store=str(tmp_path / "traces.db")).detach()
    assert inspect.getattr_static(Later, "on_messages") is patched.__wrapped__
    assert "__init_subclass__" not in vars(BaseChatAgent)


# Tools in a replay


def replayed(program, folder):
    """Run a program and a replay of it; give what both gave, how often a tool did something, and its spans."""
    before = len(NOTES)
    outputs, spans = run_twice(program, folder, "autogen")
    tools = [span for span in spans if span.operation == names.EXECUTE_TOOL]
    assert {span.attributes[names.REPLAYED] for span in tools} == {True}
    return outputs, len(NOTES) - before, tools


class Asked(BaseModel):
    text: str


class Found(BaseModel):
    text: str


class Streaming(BaseStreamTool[Asked, str, Found]):
    def __init__(self):
        super().__init__(Asked, Found, "note", "Note a text, step by step.")

    async def run(self, args, cancellation_token):
        return Found(text=write_note(args.text))

    async def run_stream(self, args, cancellation_token):
        yield "begun"
        yield Found(text=write_note(args.text))


@pytest.mark.parametrize("kind", [StaticWorkbench, StaticStreamWorkbench])
@pytest.mark.parametrize("text", ["one", "fail"])
def test_a_tool_of_a_workbench_is_not_run_again_in_a_replay(text, kind, tmp_path):
    def program(url):
        tools = kind([FunctionTool(note, "Note.")])
        prompt = f'call note {{"text": "{text}"}}'
        return run(ask("caller", url, prompt, workbench=tools, reflect_on_tool_use=True))

    (first, second), made, (span,) = replayed(program, tmp_path)
    assert first == second
    assert (made, span.status) == (1, "error" if text == "fail" else "ok")


def test_a_streaming_tool_gives_its_result_in_a_replay(tmp_path):
    async def program(url):
        tool = Streaming()
        told = await ask("caller", url, 'call note {"text": "a"}', tools=[tool], reflect_on_tool_use=True)
        items = [item async for item in tool.run_json_stream({"text": "b"}, CancellationToken())]
        return told, items[-1]

    (first, second), made, _ = replayed(program, tmp_path)
    assert first == second
    assert type(second[1]) is Found
    assert made == 2


def test_a_tool_that_a_program_runs_itself_gives_what_it_gave(tmp_path):
    async def data(text: str) -> dict[str, str]:
        return {"seen": write_note(text)}

    async def program(url):
        tool = FunctionTool(data, "Look.")
        result = await StaticWorkbench([tool]).call_tool("data", {"text": "a"})
        return await tool.run_json({"text": "b"}, CancellationToken()), result.result, result.is_error

    (first, second), made, _ = replayed(program, tmp_path)
    assert first == second
    assert type(second[0]) is dict
    assert made == 2
