"""All frameworks in one process, and in one program: `nox -s together`, where they are all installed."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

os.environ |= {f"CREWAI_{name}": "true" for name in ("DISABLE_TELEMETRY", "DISABLE_TRACKING", "TESTING")}
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"
sdk = pytest.importorskip("agents", reason="needs every framework: nox -s together")
crewai = pytest.importorskip("crewai", reason="needs every framework: nox -s together")
pytest.importorskip("autogen_agentchat", reason="needs every framework: nox -s together")
pytest.importorskip("langgraph", reason="needs every framework: nox -s together")

import openai
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from crewai import LLM, Agent, Crew, Task
from crewai.events.event_bus import CrewAIEventsBus
from crewai.tools import tool as crew_tool
from langchain.agents import create_agent
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

import lightning_autogen
import lightning_crewai
import lightning_langchain
import lightning_openai
import lightning_openai_agents
from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.program import PATIENCE_S, instructions, span_of, user_environment
from lightning_conformance.plugins.script import agent_of
from lightning_openai import patch
from lightning_spans import Attempt, open_store, use_attempt
from lightning_spans.record.tracing.tracers import TRACERS
from lightning_spans.schema import spans as names

MODEL = "test-model"
PLUGINS = [lightning_openai, lightning_langchain, lightning_openai_agents, lightning_autogen, lightning_crewai]
INFO = dict.fromkeys(("function_calling", "json_output", "structured_output"), True) | {
    "vision": False,
    "family": "gpt-4o",
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path / "crewai"))
    sdk.set_trace_processors([])
    with user_environment(tmp_path):
        yield


def attach_all(store, order=PLUGINS, **options):
    return [plugin.attach(store=str(store), **options) for plugin in order]


# One agent of each framework, asked once.


def ask_langchain(name, url, prompt, tools=()):
    graph = create_agent(ChatOpenAI(base_url=url, model=MODEL), tools, system_prompt=instructions(name), name=name)
    return graph.invoke({"messages": [HumanMessage(prompt)]})["messages"][-1].content


async def ask_sdk(name, url, prompt, tools=()):
    model = sdk.OpenAIChatCompletionsModel(MODEL, openai.AsyncOpenAI(base_url=url))
    agent = sdk.Agent(name=name, instructions=instructions(name), model=model, tools=list(tools))
    return (await sdk.Runner.run(agent, prompt)).final_output


async def ask_autogen(name, url, prompt, tools=()):
    client = OpenAIChatCompletionClient(model=MODEL, base_url=url, model_info=INFO)
    agent = AssistantAgent(
        name, client, system_message=instructions(name), tools=list(tools), reflect_on_tool_use=bool(tools)
    )
    return (await agent.run(task=prompt)).messages[-1].content


def crew(name, url, prompt, tools=()):
    llm = LLM(model=MODEL, base_url=url, provider="openai")
    agent = Agent(role=name, goal="to help", backstory="You do as told.", llm=llm, tools=list(tools))
    return Crew(agents=[agent], tasks=[Task(description=f"\n{prompt}\n", expected_output="text", agent=agent)])


def ask_crew(name, url, prompt, tools=()):
    return crew(name, url, prompt, tools).kickoff().raw


def ask_openai(name, url, prompt):
    messages = [{"role": "system", "content": instructions(name)}, {"role": "user", "content": prompt}]
    with lightning_openai.agent(name):
        made = openai.OpenAI(base_url=url).chat.completions.create(model=MODEL, messages=messages)
    return made.choices[0].message.content


# Programs in which one framework works inside another.


def graph_of_all(url):
    """A LangGraph node calls a crew, whose tool runs an SDK agent, whose tool runs AutoGen, whose tool calls openai."""

    def look_up(word: str) -> str:
        """Look a word up, in a thread: AutoGen runs plain functions in one."""
        return ask_openai("librarian", url, word)

    @sdk.function_tool
    async def check(text: str) -> str:
        return await ask_autogen("checker", url, 'call look_up {"word": "moon"}', [look_up])

    @crew_tool("consult")
    def consult(question: str) -> str:
        """Consult the expert."""
        return asyncio.run(ask_sdk("expert", url, 'call check {"text": "the text"}', [check]))

    def plan(state):
        asked = [SystemMessage(instructions("plan")), HumanMessage("plan it")]
        return {"messages": [ChatOpenAI(base_url=url, model=MODEL).invoke(asked)]}

    def team(state):
        return {"messages": [ask_crew("writer", url, 'call consult {"question": "is it so"}', [consult])]}

    builder = StateGraph(MessagesState)
    builder.add_sequence([plan, team])
    builder.add_edge(START, "plan")
    return builder.compile().invoke({"messages": [HumanMessage("go")]})["messages"][-1].content


async def autogen_of_all(url):
    """The other way round: AutoGen calls an agent of the SDK, which calls a crew, which calls a graph."""

    @crew_tool("consult")
    def consult(question: str) -> str:
        """Consult the graph."""
        return ask_langchain("reviewer", url, 'call add {"a": 2, "b": 3}', [add])

    @sdk.function_tool
    async def staff(question: str) -> str:
        return (await crew("writer", url, 'call consult {"question": "what is it"}', [consult]).akickoff()).raw

    async def ask(question: str) -> str:
        """Ask the clerk."""
        return await ask_sdk("clerk", url, 'call staff {"question": "who is it"}', [staff])

    return await ask_autogen("boss", url, 'call ask {"question": "how"}', [ask])


@tool
def add(a: int, b: int) -> int:
    """Return the sum of two numbers."""
    return a + b


PROGRAMS = {
    "graph": (
        graph_of_all,
        {"plan", "writer", "expert", "checker", "librarian"},
        {"consult": "writer", "check": "expert", "look_up": "checker"},
        ["team", "writer", "expert", "checker", "librarian"],
    ),
    "autogen": (
        autogen_of_all,
        {"boss", "clerk", "writer", "reviewer"},
        {"ask": "boss", "staff": "clerk", "consult": "writer", "add": "reviewer"},
        ["boss", "clerk", "writer", "reviewer"],
    ),
}
each_program = pytest.mark.parametrize("name", PROGRAMS)
both_tracers = pytest.mark.parametrize("tracer", TRACERS)


def start(program, url):
    return asyncio.run(program(url)) if inspect.iscoroutinefunction(program) else program(url)


def spans_in(path):
    store = open_store(str(path))
    try:
        return store.spans()
    finally:
        store.close()


def check(spans, server):
    """Every request is one chat span with the agent that made it; nothing is an orphan."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    chats = [span for span in spans if span.operation == names.CHAT]
    assert len(chats) == len(server.requests) > 0
    for request in server.requests:
        span = by_id[span_of(request)]
        assert span.agent == agent_of(request.body)
        assert json.loads(span.attributes[names.REQUEST]) == request.body
        assert span.attributes[names.RESPONSE_ID] == request.answer["id"]
    assert all(span.parent_id is None or span.parent_id in by_id for span in spans)


@both_tracers
@each_program
def test_frameworks_inside_each_other_are_one_tree(name, tracer, tmp_path):
    program, who, tools, path = PROGRAMS[name]
    with ScriptedServer() as alone:
        expected = start(program, alone.url)
    with ScriptedServer() as server:
        attachments = attach_all(tmp_path / "traces.db", tracer=tracer)
        output = start(program, server.url)
        assert attachments[0].flush(PATIENCE_S)
        for attachment in attachments:
            attachment.detach()
        spans = spans_in(tmp_path / "traces.db")
        check(spans, server)
        assert output == expected
        assert len(server.requests) == len(alone.requests)
    assert {span.agent for span in spans if span.operation == names.CHAT} == who
    assert {span.name: span.agent for span in spans if span.operation == names.EXECUTE_TOOL} == tools
    assert len([span for span in spans if span.operation == names.EXECUTE_TOOL]) == len(tools)
    assert len({span.trace_id for span in spans}) == len([span for span in spans if span.parent_id is None]) == 1
    paths = {span.attributes.get(names.AGENT_PATH) for span in spans if span.operation == names.INVOKE_AGENT}
    assert "/".join(path) in paths


@each_program
def test_only_the_named_are_rerouted_whoever_runs_them(name, tmp_path):
    program, who, _, _ = PROGRAMS[name]
    named = {"writer", "checker", "clerk", "reviewer"} & who
    with ScriptedServer() as origin, ScriptedServer() as policy:
        attachments = attach_all(tmp_path / "own.db")
        attempt = Attempt("r", "a", endpoint=policy.base, key="attempt-key", agents=tuple(named))
        with use_attempt(attempt):
            start(program, origin.url)
        assert attachments[0].flush(PATIENCE_S)
        for attachment in attachments:
            attachment.detach()
    assert {agent_of(request.body) for request in policy.requests} == named
    assert {agent_of(request.body) for request in origin.requests} == who - named
    spans = policy.spans
    assert {span.attempt_id for span in spans} == {"a"}
    assert len({span.trace_id for span in spans}) == 1


def test_attempts_of_all_frameworks_at_once_never_mix(tmp_path):
    def work(number, server):
        with use_attempt(Attempt(f"r{number}", f"a{number}")):
            for program, *_ in PROGRAMS.values():
                start(program, server.url_of(f"m{number}"))

    with ScriptedServer() as server:
        attachments = attach_all(tmp_path / "traces.db")
        threads = [threading.Thread(target=work, args=(number, server)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert attachments[0].flush(PATIENCE_S)
        for attachment in attachments:
            attachment.detach()
        spans = spans_in(tmp_path / "traces.db")
        check(spans, server)
        by_id = {span.span_id: span for span in spans}
        for request in server.requests:
            assert by_id[span_of(request)].attempt_id == f"a{request.path[2]}"
    assert len({(span.trace_id, span.attempt_id) for span in spans}) == len({span.trace_id for span in spans}) == 6


def test_side_by_side_in_one_loop_each_has_its_own_tree(tmp_path):
    async def work(url):
        with ThreadPoolExecutor(2) as pool:
            loop = asyncio.get_running_loop()
            return await asyncio.gather(
                ask_sdk("expert", url, "wait 0.05"),
                ask_autogen("checker", url, "wait 0.05"),
                crew("writer", url, "wait 0.05").akickoff(),
                loop.run_in_executor(pool, ask_langchain, "reviewer", url, "wait 0.05"),
                loop.run_in_executor(pool, ask_openai, "librarian", url, "wait 0.05"),
            )

    with ScriptedServer() as server:
        attachments = attach_all(tmp_path / "traces.db")
        asyncio.run(work(server.url))
        assert attachments[0].flush(PATIENCE_S)
        for attachment in attachments:
            attachment.detach()
        spans = spans_in(tmp_path / "traces.db")
        check(spans, server)
    assert len({span.trace_id for span in spans}) == 5


def test_a_model_that_two_frameworks_report_is_one_call(tmp_path):
    """A model without the openai client in a graph, called inside another framework's agent: LangChain reports it."""

    @crew_tool("recall")
    def recall(what: str) -> str:
        """Recall."""
        return FakeListChatModel(responses=["from memory"]).invoke(what).content

    with ScriptedServer() as server:
        attachments = attach_all(tmp_path / "traces.db")
        ask_crew("writer", server.url, 'call recall {"what": "it"}', [recall])
        assert attachments[0].flush(PATIENCE_S)
        for attachment in attachments:
            attachment.detach()
        spans = spans_in(tmp_path / "traces.db")
        chats = [span for span in spans if span.operation == names.CHAT]
        assert len(chats) == len(server.requests) + 1
    assert {span.agent for span in chats} == {"writer"}


@pytest.mark.parametrize("order", [PLUGINS, PLUGINS[::-1]], ids=["forwards", "backwards"])
def test_any_of_them_may_be_detached_first(order, tmp_path):
    patched = [(owner, name) for owner, name, _ in patch._PATCHES] + [(CrewAIEventsBus, "emit")]
    before = [inspect.getattr_static(owner, name) for owner, name in patched]
    with ScriptedServer() as server:
        attachments = attach_all(tmp_path / "traces.db")
        for attachment, plugin in zip(attachments, PLUGINS, strict=True):
            assert plugin.attach(store=str(tmp_path / "traces.db")) is attachment
        first, *rest = attachments if order is PLUGINS else attachments[::-1]
        first.detach()
        graph_of_all(server.url)
        assert rest[0].flush(PATIENCE_S)
        recorded = [span for span in spans_in(tmp_path / "traces.db") if span.operation == names.CHAT]
        assert len(recorded) == len(server.requests)
        for attachment in rest:
            attachment.detach()
        graph_of_all(server.url)
        assert "traceparent" not in server.requests[-1].headers
        assert [s for s in spans_in(tmp_path / "traces.db") if s.operation == names.CHAT] == recorded
    assert all(inspect.getattr_static(owner, name) is was for (owner, name), was in zip(patched, before, strict=True))
