from __future__ import annotations

import asyncio
import gc
import json
import operator
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Annotated, Any, TypedDict

import httpx
import openai
import pytest

pytest.importorskip("langgraph")

from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult, GenerationChunk
from langchain_core.prompt_values import StringPromptValue
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import InjectedToolCallId, ToolException, tool
from langchain_core.tracers import context as tracers_context
from langchain_openai import ChatOpenAI, OpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, Send, interrupt
from opentelemetry import context as otel_context

from lightning_conformance.plugins.program import record
from lightning_conformance.plugins.replayed import NOTES, run_twice
from lightning_conformance.plugins.script import agent_of
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
from lightning_langchain import agent, attach, libraries
from lightning_langchain.agents import ChainRun
from lightning_openai import patch
from lightning_spans import Attempt, emit_reward, open_store, use_attempt
from lightning_spans.record.context import current_agent, settle_context
from lightning_spans.record.instrument.scope import current_scope
from lightning_spans.record.recorder import current_span
from lightning_spans.schema import spans as names

try:
    from langchain.agents import create_agent

    PROMPT = "system_prompt"
except ImportError:  # langchain 0.3
    from langgraph.prebuilt import create_react_agent as create_agent

    PROMPT = "prompt"


def model(url, **options):
    return ChatOpenAI(base_url=url, model=MODEL, **options)


def make(url, name, tools=(), *, called=None, **options):
    """An agent whose instructions name it; `called` is the name of its graph."""
    prompt = {PROMPT: instructions(name)}
    return create_agent(model(url, **options), list(tools), **prompt, **({"name": called} if called else {}))


def named(url, name, tools=(), **options):
    return make(url, name, tools, called=name, **options)


def user(text):
    return {"messages": [HumanMessage(text)]}


def last(state):
    return state["messages"][-1].content


def asked(name, text):
    return [SystemMessage(instructions(name)), HumanMessage(text)]


@tool
def add(a: int, b: int) -> int:
    """Return the sum of two numbers."""
    return a + b


@tool
def fail(reason: str) -> str:
    """Fail for a reason."""
    raise ValueError(reason)


@tool
def note(text: str) -> str:
    """Note a text."""
    return write_note(text)


class Notes(TypedDict):
    notes: Annotated[list[str], operator.add]


def graph_of(*nodes, edges, name=None, state=Notes):
    """A graph of functions, whose names are those of the nodes."""
    builder = StateGraph(state)
    for node in nodes:
        builder.add_node(*node) if isinstance(node, tuple) else builder.add_node(node)
    for start, end in edges:
        builder.add_edge(start, end)
    return builder.compile(name=name) if name else builder.compile()


def node(url, name, text, **options):
    """A node that asks the model with the instructions of an agent of its name."""

    def work(state):
        return {"notes": [model(url, **options).invoke(asked(name, text)).content]}

    return name, work


async def run_async(url, name):
    """Run a graph of one agent."""

    async def work(state):
        return {"notes": [(await model(url).ainvoke(asked(name, "hello"))).content]}

    return await graph_of((name, work), edges=[(START, name)]).ainvoke({"notes": []})


class Events(BaseCallbackHandler):
    """A user's own callbacks."""

    def __init__(self):
        self.seen = []

    def on_chain_start(self, serialized, inputs, **kwargs):
        self.seen.append(["chain", kwargs.get("name")])

    def on_chat_model_start(self, serialized, messages, **kwargs):
        self.seen.append(["model", [message.content for message in messages[0]]])

    def on_llm_end(self, response, **kwargs):
        self.seen.append(["answer", response.generations[0][0].text])

    def on_chain_end(self, outputs, **kwargs):
        self.seen.append(["end"])


class TestConformance(PluginConformance):
    framework = "langchain"

    def patched(self):
        return [(owner, name) for owner, name, _ in patch._PATCHES]

    def one_agent(self, url):
        return last(named(url, "writer").invoke(user(PROMPTS["one_agent"])))

    def unnamed(self, url):
        with agent("writer"):
            return last(make(url, "writer").invoke(user(PROMPTS["unnamed"])))

    def several_agents(self, url):
        names = ("writer", "rewriter", "writer_2")
        nodes = [node(url, name, PROMPTS["several_agents"]) for name in names]
        return graph_of(*nodes, edges=pairwise((START, *names))).invoke({"notes": []})

    def namesakes(self, url):
        text = PROMPTS["namesakes"]
        teams = [(team, graph_of(node(url, "writer", text), edges=[(START, "writer")])) for team in ("red", "blue")]
        return graph_of(*teams, edges=[(START, "red"), ("red", "blue")]).invoke({"notes": []})

    def responses(self, url):
        return str(last(named(url, "writer", use_responses_api=True).invoke(user(PROMPTS["responses"]))))

    def responses_streaming(self, url):
        writer = named(url, "writer", use_responses_api=True)
        parts = writer.stream(user(PROMPTS["responses_streaming"]), stream_mode="messages")
        return [str(part.content) for part, _ in parts]

    def choices(self, url):
        return last(named(url, "writer", n=2).invoke(user(PROMPTS["choices"])))

    def streaming(self, url):
        parts = named(url, "writer").stream(user(PROMPTS["streaming"]), stream_mode="messages")
        return [part.content for part, _ in parts]

    def abandoned(self, url):
        def writer(state):
            parts = model(url).stream(asked("writer", PROMPTS["abandoned"]))
            return {"notes": [next(parts).content]}

        return graph_of(writer, edges=[(START, "writer")]).invoke({"notes": []})

    def tool_call(self, url):
        return last(named(url, "caller", [add]).invoke(user(PROMPTS["tool_call"])))

    def parallel_tools(self, url):
        return last(named(url, "caller", [add]).invoke(user(PROMPTS["parallel_tools"])))

    def tool_error(self, url):
        try:
            return last(named(url, "caller", [fail]).invoke(user(PROMPTS["tool_error"])))
        except ValueError as error:
            return str(error)

    def unknown_tool(self, url):
        return last(named(url, "caller", [add]).invoke(user(PROMPTS["unknown_tool"])))

    def unreadable_arguments(self, url):
        return last(named(url, "caller", [add]).invoke(user(PROMPTS["unreadable_arguments"])))

    def parallel(self, url):
        text = PROMPTS["parallel"]
        both = graph_of(node(url, "left", text), node(url, "right", text), edges=[(START, "left"), (START, "right")])
        return sorted(both.invoke({"notes": []})["notes"])

    def nested(self, url):
        @tool
        def ask(question: str) -> str:
            """Ask the writer."""
            return last(named(url, "writer").invoke(user(question)))

        return last(named(url, "boss", [ask]).invoke(user(PROMPTS["nested"])))

    async def asynchronous(self, url):
        text = user(PROMPTS["asynchronous"])
        answers = await asyncio.gather(*(named(url, name).ainvoke(text) for name in ("writer", "rewriter")))
        return [last(answer) for answer in answers]

    async def awaited(self, url):
        return last(await named(url, "writer").ainvoke(user(PROMPTS["awaited"])))

    def threads(self, url):
        def writer(state):
            with ThreadPoolExecutor(2) as pool:
                answers = pool.map(lambda n: model(url).invoke(asked("writer", f"hello {n}")), range(2))
                return {"notes": [answer.content for answer in answers]}

        return graph_of(writer, edges=[(START, "writer")]).invoke({"notes": []})

    def retried(self, url):
        return last(named(url, "writer").invoke(user(PROMPTS["retried"])))

    def failed(self, url):
        with pytest.raises(openai.InternalServerError) as error:
            named(url, "writer", max_retries=0).invoke(user(PROMPTS["failed"]))
        return str(error.value).splitlines()[0]

    def slow(self, url):
        with pytest.raises(openai.APITimeoutError) as error:
            named(url, "writer", max_retries=0, timeout=TIMEOUT_S).invoke(user(PROMPTS["slow"]))
        return type(error.value).__name__

    def cut(self, url):
        with pytest.raises(Exception) as error:  # noqa: PT011 - which one depends on the version
            list(named(url, "writer", streaming=True).stream(user(PROMPTS["cut"])))
        return type(error.value).__name__

    def heard_by_an_agents_callbacks(self, url):
        events = Events()
        answer = named(url, "writer").invoke(user(PROMPTS["one_agent"]), config={"callbacks": [events]})
        return [last(answer), events.seen]

    def heard_by_listeners_of_chat_models(self, url):
        return [heard(lambda: model(url)), heard(lambda: FakeListChatModel(responses=["xy", "z"]))]

    def heard_by_listeners_of_completion_models(self, url):
        single = (
            "invoke",
            "stream",
            "ainvoke",
            "astream",
        )  # a batch would be one request
        theirs = heard(lambda: OpenAI(base_url=url, model=MODEL), single)
        return [theirs, heard(lambda: FakeListLLM(responses=["xy", "z"]))]

    def effects(self, url):
        return last(named(url, "caller", [note]).invoke(user(REPLAY_PROMPTS["effects"])))

    def effect_fails(self, url):
        try:
            return last(named(url, "caller", [note]).invoke(user(REPLAY_PROMPTS["effect_fails"])))
        except ValueError as error:
            return str(error)

    async def effects_awaited(self, url):
        @tool("note")
        async def take_note(text: str) -> str:
            """Note a text."""
            return write_note(text)

        return last(await named(url, "caller", [take_note]).ainvoke(user(REPLAY_PROMPTS["effects_awaited"])))


@pytest.fixture
def spans_of(tmp_path):
    """Return a function that runs a program attached, and gives its spans, after what every program must keep."""

    def run(program):
        found = record(program, tmp_path, framework="langchain", tracer="embedded")
        known = {span.span_id for span in found.spans}
        assert all(span.parent_id is None or span.parent_id in known for span in found.spans)
        assert len(found.chats) == len(found.requests) or not found.requests
        assert current_agent() is None
        assert current_span() is None
        return found

    return run


def agents(found):
    """Who is on each call, and who was told to be."""
    return {(span.agent, agent_of(request.body)) for request, span in found.calls()}


def path_of(found, name):
    return {s.attributes[names.AGENT_PATH] for s in found.spans if s.operation == names.INVOKE_AGENT and s.name == name}


def above(found, span):
    """The spans around one, innermost first."""
    by_id = {other.span_id: other for other in found.spans}
    line = []
    while span.parent_id is not None:
        span = by_id[span.parent_id]
        line.append((span.operation, span.name))
    return line


# Who is at work


def test_an_agent_without_a_name_has_that_of_its_node(spans_of):
    def program(url):
        inner = make(url, "drafter", [add])
        graph_of(("drafter", inner), edges=[(START, "drafter")], state=MessagesState).invoke(user(PROMPTS["tool_call"]))

    found = spans_of(program)
    assert agents(found) == {("drafter", "drafter")}
    assert [span.agent for span in found.tools] == ["drafter"]


@pytest.mark.parametrize("compiled", ["writer", None])
def test_the_name_of_a_run_renames_no_agent(compiled, spans_of):
    def program(url):
        graph = graph_of(node(url, "agent", "hello"), edges=[(START, "agent")], name=compiled)
        return [graph.invoke({"notes": []}, config)["notes"] for config in ({}, {"run_name": "task 17"})]

    first, second = spans_of(program).chats
    assert first.agent == second.agent == (compiled or "agent")


def test_a_nodes_own_agent_of_the_same_name_is_the_same_agent(spans_of):
    def program(url):
        inner = named(url, "writer")
        graph_of(("writer", inner), edges=[(START, "writer")], state=MessagesState).invoke(user("hello"))

    found = spans_of(program)
    assert agents(found) == {("writer", "writer")}
    assert path_of(found, "writer") == {"writer"}
    assert len([span for span in found.spans if span.operation == names.INVOKE_AGENT]) == 1


def test_subgraphs_and_equal_names_are_told_apart_by_their_path(spans_of):
    def program(url):
        inner = [graph_of(node(url, "writer", f"say {i}"), edges=[(START, "writer")]) for i in range(2)]
        edges = [(START, "first"), ("first", "second")]
        graph_of(("first", inner[0]), ("second", inner[1]), edges=edges, name="team").invoke({"notes": []})

    found = spans_of(program)
    assert agents(found) == {("writer", "writer")}
    assert path_of(found, "writer") == {"team/first/writer", "team/second/writer"}


def test_each_branch_of_a_fan_out_is_a_span_of_its_own(spans_of):
    def program(url):
        builder = StateGraph(Notes)
        builder.add_node("planner", lambda state: {"notes": []})
        builder.add_node("worker", lambda sent: {"notes": [model(url).invoke(asked("worker", sent["task"])).content]})
        builder.add_edge(START, "planner")
        builder.add_conditional_edges("planner", lambda _: [Send("worker", {"task": f"say {n}"}) for n in range(3)])
        builder.compile().invoke({"notes": []})

    found = spans_of(program)
    assert agents(found) == {("worker", "worker")}
    assert len([span for span in found.spans if span.name == "worker"]) == len(found.chats) == 3
    assert len({span.parent_id for span in found.chats}) == 3


def test_a_tool_call_belongs_to_the_agent_that_asked_for_it(spans_of):
    def program(url):
        def asks(name):
            def work(state):
                messages = [SystemMessage(instructions(name)), *state["messages"]]
                return {"messages": [model(url).bind_tools([add]).invoke(messages)]}

            return work

        for name in ("writer", "rewriter"):
            builder = StateGraph(MessagesState)
            builder.add_node(name, asks(name))
            builder.add_node("shared", ToolNode([add]))
            builder.add_edge(START, name)
            builder.add_conditional_edges(name, tools_condition, {"tools": "shared", END: END})
            builder.add_edge("shared", name)
            builder.compile().invoke(user(PROMPTS["tool_call"]))

    found = spans_of(program)
    assert agents(found) == {("writer", "writer"), ("rewriter", "rewriter")}
    assert [span.agent for span in found.tools] == ["writer", "rewriter"]


@pytest.mark.parametrize("how", ["interrupt_before", "in the tool"])
@pytest.mark.parametrize("called", ["tools", "shared"])
def test_a_tool_call_that_waited_for_approval_belongs_to_the_agent_that_asked_for_it(spans_of, called, how):
    @tool
    def pay(amount: int) -> int:
        """Pay."""
        return interrupt("fine?") if how == "in the tool" else amount

    def program(url):
        def writer(state):
            messages = [SystemMessage(instructions("writer")), *state["messages"]]
            return {"messages": [model(url).bind_tools([pay]).invoke(messages)]}

        builder = StateGraph(MessagesState).add_node(writer).add_node(called, ToolNode([pay]))
        builder.add_edge(START, "writer").add_edge(called, "writer")
        builder.add_conditional_edges("writer", tools_condition, {"tools": called, END: END})
        before = [called] if how == "interrupt_before" else []
        graph = builder.compile(checkpointer=InMemorySaver(), interrupt_before=before)
        config = {"configurable": {"thread_id": "t"}}
        graph.invoke(user('call pay {"amount": 5}'), config)
        return last(graph.invoke(Command(resume=5) if how == "in the tool" else None, config))

    found = spans_of(program)
    assert "[5]" in found.output
    assert {span.agent for span in found.tools} == {"writer"}
    assert [span.attributes.get(names.TOOL_RESULT) for span in found.tools][-1] == "5"
    assert len(found.tools) == (2 if how == "in the tool" else 1)


def with_tool(url, called):
    """A graph of a writer and the tool that it calls."""

    def writer(state):
        messages = [SystemMessage(instructions("writer")), *state["messages"]]
        return {"messages": [model(url).bind_tools([called]).invoke(messages)]}

    builder = StateGraph(MessagesState).add_node(writer).add_node("tools", ToolNode([called]))
    builder.add_edge(START, "writer").add_edge("tools", "writer")
    return builder.add_conditional_edges("writer", tools_condition)


def test_calls_that_wait_for_approval_in_several_rollouts_are_kept_apart(spans_of):
    """Each has a checkpointer of its own, and the same name for its conversation; they go on at once."""
    both = threading.Barrier(2)

    @tool
    def pay(amount: int) -> int:
        """Pay."""
        both.wait(60)
        return amount

    def program(url):
        config = {"configurable": {"thread_id": "1"}}
        graphs = [
            with_tool(url, pay).compile(checkpointer=InMemorySaver(), interrupt_before=["tools"]) for _ in range(2)
        ]

        def go(number, given):
            with use_attempt(Attempt(f"r{number}", f"a{number}")):
                graphs[number].invoke(given, config)

        for number in range(2):
            go(number, user('call pay {"amount": 5}'))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(go, range(2), [None, None]))

    found = spans_of(program)
    assert {(span.attempt_id, span.agent) for span in found.tools} == {("a0", "writer"), ("a1", "writer")}


@pytest.mark.parametrize("order", [("left", "right"), ("right", "left")])
def test_equal_calls_of_two_agents_are_told_apart(spans_of, monkeypatch, order):
    monkeypatch.setattr(
        "lightning_conformance.plugins.script._call_id", lambda key, choice, index: f"functions.add:{index}"
    )

    def program(url):
        def team(state):
            calls = {}
            for name in ("left", "right"):  # both ask before a tool is called
                with agent(name):
                    answer = model(url).bind_tools([add]).invoke(asked(name, PROMPTS["tool_call"]))
                calls[name] = answer.tool_calls[0]
            for name in order:
                with agent(name):
                    add.invoke(calls[name])
            return state

        graph_of(team, edges=[(START, "team")]).invoke({"notes": []})

    found = spans_of(program)
    assert [(span.agent, above(found, span)[0]) for span in found.tools] == [
        (name, ("invoke_agent", name)) for name in order
    ]
    assert {span.attributes[names.TOOL_CALL_ID] for span in found.tools} == {"functions.add:0"}


def test_with_agent_inside_a_node_is_the_innermost(spans_of):
    def program(url):
        def writer(state):
            with agent("critic"):
                model(url).invoke(asked("critic", "hello"))
            return {"notes": [model(url).invoke(asked("writer", "hello")).content]}

        graph_of(writer, edges=[(START, "writer")]).invoke({"notes": []})

    found = spans_of(program)
    assert agents(found) == {("critic", "critic"), ("writer", "writer")}
    assert ("invoke_agent", "writer") in above(found, next(s for s in found.chats if s.agent == "critic"))


def test_with_agent_around_a_graph_names_what_has_no_name(spans_of):
    def program(url):
        with agent("outer"):
            chain = ChatPromptTemplate.from_messages([("system", instructions("outer")), ("user", "{x}")]) | model(url)
            chain.batch([{"x": "say 1"}, {"x": "say 2"}])
            make(url, "outer").invoke(user("hello"))
            named(url, "writer").invoke(user("hello"))

    found = spans_of(program)
    assert agents(found) == {("outer", "outer"), ("writer", "writer")}
    assert len([span for span in found.spans if span.parent_id is None]) == 1


def test_calls_of_the_plain_client_belong_to_the_node_or_tool_they_are_made_in(spans_of):
    def program(url):
        def ask(text):
            messages = [{"role": "system", "content": instructions("caller")}, {"role": "user", "content": text}]
            openai.OpenAI(base_url=url).chat.completions.create(model=MODEL, messages=messages)

        @tool
        def look_up(what: str) -> str:
            """Look something up."""
            ask(f"say {what}")
            return what

        named(url, "caller", [look_up]).invoke(user('call look_up {"what": "it"}'))

        def caller(state):
            ask("say hello")
            with ThreadPoolExecutor(1) as pool:
                pool.submit(ask, "say in a thread").result()
            return {"notes": []}

        graph_of(caller, edges=[(START, "caller")]).invoke({"notes": []})

    found = spans_of(program)
    assert agents(found) == {("caller", "caller")}
    inside = [span for span in found.chats if above(found, span)[0] == ("execute_tool", "look_up")]
    assert len(inside) == 1


def test_after_an_async_tool_the_node_is_at_work_again(spans_of):
    def program(url):
        async def writer(state):
            await add.ainvoke({"a": 1, "b": 2})
            async with openai.AsyncOpenAI(base_url=url) as client:
                messages = [{"role": "system", "content": instructions("writer")}, {"role": "user", "content": "say x"}]
                await client.chat.completions.create(model=MODEL, messages=messages)
            await model(url).ainvoke(asked("writer", "hello"))
            return {"notes": []}

        asyncio.run(graph_of(writer, edges=[(START, "writer")]).ainvoke({"notes": []}))

    found = spans_of(program)
    assert agents(found) == {("writer", "writer")}
    assert {above(found, span)[0] for span in found.chats} == {("invoke_agent", "writer")}


@pytest.mark.parametrize("how", ["invoke", "ainvoke", "stream", "astream", "astream_events", "batch", "abatch"])
def test_every_way_to_run_an_agent_is_recorded_alike(spans_of, how):
    def program(url):
        boss = named(url, "boss", [add])
        task = user(PROMPTS["tool_call"])

        async def each(items):
            async for _ in items:
                pass

        {
            "invoke": lambda: boss.invoke(task),
            "ainvoke": lambda: asyncio.run(boss.ainvoke(task)),
            "stream": lambda: list(boss.stream(task, stream_mode=["messages", "updates"])),
            "astream": lambda: asyncio.run(each(boss.astream(task, stream_mode="messages"))),
            "astream_events": lambda: asyncio.run(each(boss.astream_events(task, version="v2"))),
            "batch": lambda: boss.batch([task]),
            "abatch": lambda: asyncio.run(boss.abatch([task])),
        }[how]()

    found = spans_of(program)
    assert [(s.operation, s.agent, s.status) for s in found.spans] == [
        ("invoke_agent", "boss", "ok"),
        ("chat", "boss", "ok"),
        ("execute_tool", "boss", "ok"),
        ("chat", "boss", "ok"),
    ]
    assert {span.parent_id for span in found.spans} == {None, found.spans[0].span_id}


def test_a_graph_that_nobody_streams_on_ends(spans_of):
    def program(url):
        parts = named(url, "writer").stream(user("hello there"), stream_mode="messages")
        next(parts)
        parts.close()

    found = spans_of(program)
    assert agents(found) == {("writer", "writer")}
    assert found.spans[0].attributes[names.ABANDONED] is True


def test_tasks_of_the_functional_api_are_agents(spans_of):
    def program(url):
        @task
        def writer(text):
            return model(url).invoke(asked("writer", text)).content

        @task
        def critic(text):
            return model(url).invoke(asked("critic", text)).content

        @entrypoint()
        def flow(text):
            both = writer(text), critic(text)
            return [one.result() for one in both]

        return flow.invoke("wait 0.05")

    found = spans_of(program)
    assert agents(found) == {("writer", "writer"), ("critic", "critic")}
    assert len([span for span in found.spans if span.parent_id is None]) == 1


def test_a_graph_that_was_interrupted_goes_on_under_the_same_names(spans_of):
    def program(url):
        def draft(state):
            return {"notes": [model(url).invoke(asked("draft", "hello")).content]}

        def check(state):
            return {"notes": [model(url).invoke(asked("check", interrupt("fine?"))).content]}

        builder = StateGraph(Notes).add_sequence([draft, check]).add_edge(START, "draft")
        graph, config = builder.compile(checkpointer=InMemorySaver()), {"configurable": {"thread_id": "t"}}
        graph.invoke({"notes": []}, config)
        graph.invoke(Command(resume="yes"), config)

    found = spans_of(program)
    assert agents(found) == {("draft", "draft"), ("check", "check")}
    assert {span.status for span in found.spans} == {"ok"}
    assert {s.attributes.get(names.CONVERSATION_ID) for s in found.spans if s.parent_id is None} == {"t"}


def test_agents_at_once_inside_tools_at_once_keep_their_places(spans_of):
    @tool
    async def ask(question: str) -> str:
        """Ask both."""
        both = await asyncio.gather(*(named(at[0], name).ainvoke(user(question)) for name in ("left", "right")))
        return " ".join(map(last, both))

    at = []

    def program(url):
        at.append(url)
        return asyncio.run(
            named(url, "boss", [ask]).ainvoke(user('call ask {"question": "a"}\ncall ask {"question": "b"}'))
        )

    found = spans_of(program)
    assert agents(found) == {(name, name) for name in ("boss", "left", "right")}
    inner = [span for span in found.chats if span.agent != "boss"]
    assert len(inner) == 4
    assert all(("execute_tool", "ask") in above(found, span) for span in inner)


def test_several_prompts_in_one_generate_are_a_span_each(spans_of):
    found = spans_of(lambda url: model(url).generate([asked("a", "say 1"), asked("a", "say 2")]))
    assert len(found.chats) == 2


@pytest.mark.parametrize(
    ("goal", "told"), [("writer", "writer"), ([Send("writer", {"messages": []})], "writer"), (END, None), ((), None)]
)
def test_a_handoff_between_agents_is_no_error_and_says_to_whom(goal, told, spans_of):
    def program(url):
        @tool
        def hand_over(to: str) -> Command:
            """Hand over."""
            return Command(update={"messages": [ToolMessage("handed over", tool_call_id=self_id[0])]}, goto=goal)

        self_id = ["?"]

        def caller(state):
            answer = model(url).bind_tools([hand_over]).invoke(asked("caller", 'call hand_over {"to": "writer"}'))
            self_id[0] = answer.tool_calls[0]["id"]
            return {"messages": [answer]}

        def writer(state):
            return {"messages": []}

        nodes = [caller, ("tools", ToolNode([hand_over])), writer]
        graph_of(*nodes, edges=[(START, "caller"), ("caller", "tools")], state=MessagesState).invoke(user("hello"))

    found = spans_of(program)
    assert {span.status for span in found.spans} == {"ok"}
    assert found.tools[0].attributes[names.TOOL_RESULT] == "handed over"
    assert found.tools[0].attributes.get(names.HANDOFF) == told


def test_a_tool_that_the_program_runs_itself_is_not_taken_for_unknown(spans_of):
    def program(url):
        def caller(state):
            answer = model(url).bind_tools([add]).invoke(asked("caller", 'call subtract {"a": 2, "b": 3}'))
            return {"messages": [answer]}

        def tools(state):  # knows more than the model was offered
            (call,) = state["messages"][-1].tool_calls
            return {"messages": [ToolMessage("-1", tool_call_id=call["id"])]}

        edges = [(START, "caller"), ("caller", "hands")]
        graph_of(caller, ("hands", tools), edges=edges, state=MessagesState).invoke(user("hello"))

    assert not spans_of(program).tools


def executor(url):
    executors = pytest.importorskip("langchain.agents")
    if not hasattr(executors, "AgentExecutor"):
        pytest.skip("langchain 1.x has no AgentExecutor")
    prompt = ChatPromptTemplate.from_messages(
        [("system", instructions("caller")), ("user", "{input}"), ("placeholder", "{agent_scratchpad}")]
    )
    caller = executors.create_tool_calling_agent(model(url), [add], prompt)
    return executors.AgentExecutor(agent=caller, tools=[add])


def test_an_unknown_tool_of_an_executor_is_one_error(spans_of):
    (span,) = spans_of(lambda url: executor(url).invoke({"input": 'call sub {"a": 1}'})).tools
    assert (span.name, span.status) == ("sub", "error")
    assert "not a valid tool" in span.status_message
    assert span.attributes[names.TOOL_ARGUMENTS] == '{"a":1}'


def test_parallel_calls_of_one_unknown_tool_are_an_error_each(spans_of):
    prompt = 'call sub {"a": 1}\ncall sub {"a": 2}'
    found = spans_of(lambda url: asyncio.run(executor(url).ainvoke({"input": prompt})))
    assert [span.attributes[names.TOOL_ARGUMENTS] for span in found.tools] == ['{"a":1}', '{"a":2}']
    assert len({span.attributes[names.TOOL_CALL_ID] for span in found.tools}) == 2


def test_a_call_of_an_unknown_tool_that_nobody_answers_is_an_error(spans_of):
    def program(url):
        model(url).bind_tools([add]).invoke(asked("caller", 'call subtract {"a": 2, "b": 3}'))

    (span,) = spans_of(program).tools
    assert (span.name, span.status, span.status_message) == ("subtract", "error", "there is no tool 'subtract'")


def test_equal_calls_of_tools_that_begin_at_once_are_taken_once_each():
    from lightning_langchain.tools import take_request
    from lightning_spans.record.instrument.tool_requests import ToolRequest

    class Contested(list):
        def remove(self, known):
            super().remove(known)
            if known.call_id == "one":
                raise ValueError("another thread was first")

    requests = Contested(ToolRequest(call_id, "add", {"a": 1}, "x") for call_id in ("one", "two"))
    assert take_request(requests, "add", None, {"a": 1}, "x").call_id == "two"
    assert take_request(requests, "add", None, {"a": 1}, "x") is None


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_equal_calls_of_one_answer_keep_their_ids_in_whatever_order_they_begin(spans_of, way):
    """As they do where a graph's node of tools runs them in threads."""
    call = 'call add {"a": 2, "b": 3}'

    def program(url):
        def backwards(_):
            answer = model(url).bind_tools([add]).invoke(asked("caller", f"{call}\n{call}"))
            run = add.invoke if way == "invoke" else lambda one: asyncio.run(add.ainvoke(one))
            return [run(one).tool_call_id for one in reversed(answer.tool_calls)]

        return RunnableLambda(backwards).invoke({})

    found = spans_of(program)
    assert len(set(found.output)) == 2
    assert [span.attributes[names.TOOL_CALL_ID] for span in found.tools] == found.output


# What comes after an asynchronous run in the same task


def test_runs_of_one_task_hold_none_before_them(spans_of):
    def alive():
        gc.collect()
        return sum(type(known) is ChainRun for known in gc.get_objects())

    async def program(url):
        before = alive()
        for _ in range(20):
            await model(url).ainvoke(asked("writer", "hello"))
            await run_async(url, "writer")
        return alive() - before

    found = spans_of(program)
    assert found.output < 10, "each of 40 holds the one before it"
    assert [span.agent for span in found.chats] == [None, "writer"] * 20


def test_an_attempt_after_an_asynchronous_run_is_the_one_recorded(spans_of):
    async def program(url):
        await run_async(url, "writer")
        with use_attempt(Attempt("outer", "a")):
            await run_async(url, "writer")
            with use_attempt(Attempt("inner", "a")):
                await run_async(url, "writer")
                await model(url).ainvoke(asked("nobody", "hello"))
            await run_async(url, "writer")
        await run_async(url, "writer")

    found = spans_of(program)
    assert [span.rollout_id for span in found.chats] == [None, "outer", "inner", "inner", "outer", None]
    assert [span.agent for span in found.chats] == ["writer"] * 3 + [None] + ["writer"] * 2


def test_an_attempts_agent_is_rerouted_after_an_asynchronous_run(tmp_path):
    async def program(url):
        await run_async(url, "writer")
        await model(url).ainvoke(asked("writer", "hello"))
        with use_attempt(Attempt("outer", "a")), use_attempt(attempt):
            await run_async(url, "writer")
            await run_async(url, "critic")
            with agent("writer"):
                await model(url).ainvoke(asked("writer", "hello"))

    with ScriptedServer() as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="attempt-key", agents=("writer",))
        found = record(program, tmp_path, framework="langchain", tracer="embedded")
        assert [agent_of(request.body) for request in found.requests] == ["writer", "writer", "critic"]
        assert [agent_of(request.body) for request in policy.requests] == ["writer", "writer"]
    assert {span.rollout_id for span in found.spans} == {None}, "what belongs to the attempt goes to its endpoint"


@pytest.mark.parametrize("how", ["a graph", "a stream"])
def test_with_agent_after_an_asynchronous_run_is_a_root(spans_of, how):
    async def program(url):
        if how == "a graph":
            await run_async(url, "writer")
        else:
            async for _ in named(url, "writer").astream(user("hello")):
                pass
        with agent("judge"):
            await model(url).ainvoke(asked("judge", "hello"))

    found = spans_of(program)
    assert path_of(found, "judge") == {"judge"}
    (judge,) = [span for span in found.spans if span.name == "judge"]
    assert judge.parent_id is None
    assert above(found, found.chats[-1]) == [("invoke_agent", "judge")]
    assert found.chats[-1].agent == "judge"


@pytest.mark.parametrize("before", ["a call", "nothing"])
def test_with_agent_inside_a_plain_chain_names_its_calls(spans_of, before):
    def program(url):
        def team(_):
            if before == "a call":
                model(url).invoke(asked("nobody", "hello"))
            for name in ("left", "right"):
                with agent(name):
                    model(url).invoke(asked(name, "hello"))

        RunnableLambda(team).invoke(None)

    found = spans_of(program)
    assert [chat.agent for chat in found.chats][-2:] == ["left", "right"]
    assert above(found, found.chats[-1]) == [("invoke_agent", "right")]


def test_a_reward_in_a_node_after_an_asynchronous_run_belongs_to_the_attempt(spans_of, tmp_path):
    async def program(url):
        async def writer(state):
            emit_reward(0.5)
            return state

        await run_async(url, "writer")
        with use_attempt(Attempt("r", "a")):
            await graph_of(writer, edges=[(START, "writer")]).ainvoke({"notes": []})

    spans_of(program)
    store = open_store(str(tmp_path / "traces.db"))
    assert [(reward.rollout_id, reward.value) for reward in store.rewards()] == [("r", 0.5)]
    store.close()


# Tools


def test_arguments_that_do_not_fit_are_an_error_of_the_tool(spans_of):
    found = spans_of(lambda url: named(url, "caller", [add]).invoke(user('call add {"a": "one", "b": 2}')))
    (span,) = found.tools
    assert span.status == "error"
    assert span.attributes[names.TOOL_ARGUMENTS] == '{"a":"one","b":2}'


def test_a_tool_that_answers_with_an_error_message_is_an_error(spans_of):
    @tool
    def refuse(what: str) -> ToolMessage:
        """Refuse."""
        return ToolMessage("no, not that", tool_call_id="?", status="error")

    found = spans_of(lambda url: refuse.invoke({"what": "it"}))
    (span,) = found.tools
    assert (span.status, span.status_message) == ("error", "no, not that")
    assert span.attributes[names.TOOL_RESULT] == "no, not that"


@pytest.mark.parametrize("awaited", [False, True], ids=["called", "awaited"])
def test_a_failure_that_the_tool_handles_is_an_error_also_without_an_id_of_the_call(awaited, spans_of):
    @tool
    def refuse(what: str) -> str:
        """Refuse."""
        if what == "this":
            raise ToolException("no, not that")
        return what

    refuse.handle_tool_error = refuse.handle_validation_error = True

    def program(url):
        for given in ("this", {}, "it"):
            asyncio.run(refuse.ainvoke({"what": given})) if awaited else refuse.invoke({"what": given})

    handled, invalid, good = spans_of(program).tools
    assert (handled.status, handled.status_message) == ("error", "no, not that")
    assert (invalid.status, good.status) == ("error", "ok")


def test_a_tool_that_is_cut_off_is_an_error_and_the_node_is_at_work_again(spans_of):
    async def program(url):
        limit = asyncio.timeout(None)

        @tool
        async def wait(text: str) -> str:
            """Wait."""
            limit.reschedule(0)
            await asyncio.Event().wait()

        async def writer(state):
            with pytest.raises(TimeoutError):
                async with limit:
                    await wait.ainvoke({"text": "x"})
            await FakeListChatModel(responses=["hi"]).ainvoke("hello")
            return state

        await graph_of(writer, edges=[(START, "writer")]).ainvoke({"notes": []})

    found = spans_of(program)
    (cut,), (chat,) = found.tools, found.chats
    assert (cut.agent, cut.status, cut.attributes[names.ERROR_TYPE]) == ("writer", "error", "CancelledError")
    assert above(found, chat)[0] == ("invoke_agent", "writer")


def test_a_tool_that_is_still_running_when_its_graph_ends_did_not_succeed(spans_of):
    async def program(url):
        begun, left = asyncio.Event(), []

        @tool
        async def wait(text: str) -> str:
            """Wait."""
            begun.set()
            await asyncio.Event().wait()

        async def writer(state):
            left.append(asyncio.create_task(wait.ainvoke({"text": "x"})))
            await begun.wait()
            return state

        await graph_of(writer, edges=[(START, "writer")]).ainvoke({"notes": []})

    (span,) = spans_of(program).tools
    assert (span.status, span.attributes[names.ERROR_TYPE]) == ("error", "CancelledError")


# Models of text, which the openai client reaches at /completions


async def _streamed(llm):
    return "".join([part async for part in llm.astream("hello")])


TEXT_WAYS = {
    "invoke": lambda llm: llm.invoke("hello"),
    "ainvoke": lambda llm: asyncio.run(llm.ainvoke("hello")),
    "stream": lambda llm: "".join(llm.stream("hello")),
    "astream": lambda llm: asyncio.run(_streamed(llm)),
    "two prompts": lambda llm: llm.generate(["hello", "hello again"]).generations[0][0].text,
}


@pytest.mark.parametrize("way", TEXT_WAYS)
def test_a_model_of_text_is_one_span_for_each_request(spans_of, way):
    def program(url):
        llm = OpenAI(base_url=url, model=MODEL)
        writer = ("writer", lambda state: {"notes": [TEXT_WAYS[way](llm)]})
        return graph_of(writer, edges=[(START, "writer")]).invoke({"notes": []})

    found = spans_of(program)
    assert len(found.requests) == len(found.chats) == 1
    (span,) = found.chats
    assert (span.agent, span.attributes[names.ENDPOINT]) == ("writer", "/completions")


# Models that the wire does not see


def test_a_model_without_the_openai_client_is_one_span(spans_of):
    def program(url):
        def writer(state):
            llm = FakeListChatModel(responses=["one", "two words"])
            messages = [HumanMessage("hello")]
            first = llm.invoke(messages)
            messages[0].content = "changed later"
            return {"notes": [first.content, "".join(part.content for part in llm.stream(messages))]}

        return graph_of(writer, edges=[(START, "writer")]).invoke({"notes": []})

    found = spans_of(program)
    first, second = found.chats
    assert found.output == {"notes": ["one", "two words"]}
    assert (first.agent, second.agent) == ("writer", "writer")
    assert '"content":"hello"' in first.attributes[names.REQUEST]
    assert '"content":"one"' in first.attributes[names.RESPONSE]
    assert '"content":"two words"' in second.attributes[names.RESPONSE]


def test_a_failing_model_without_the_openai_client_is_one_error(spans_of):
    class Broken(FakeListChatModel):
        def _call(self, *args, **kwargs):
            raise RuntimeError("out of ink")

    def program(url):
        with pytest.raises(RuntimeError):
            Broken(responses=["never"]).invoke("hello")

    (span,) = spans_of(program).chats
    assert (span.status, span.status_message) == ("error", "out of ink")


class Stuck(BaseChatModel):
    """A model that never answers: who waits for it gives up at once."""

    limit: Any

    @property
    def _llm_type(self):
        return "stuck"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        raise NotImplementedError

    async def _agenerate(self, messages, stop=None, run_manager=None, **kwargs):
        self.limit.reschedule(0)
        await asyncio.Event().wait()


def test_a_model_without_the_openai_client_that_is_not_waited_for_is_an_error(spans_of):
    async def program(url):
        async def writer(state):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(None) as limit:
                    await Stuck(limit=limit).ainvoke("hello")
            return state

        await graph_of(writer, edges=[(START, "writer")]).ainvoke({"notes": []})

    found = spans_of(program)
    (span,) = found.chats
    assert (span.agent, span.status, span.attributes[names.ERROR_TYPE]) == ("writer", "error", "CancelledError")
    assert '"content":"hello"' in span.attributes[names.REQUEST]
    assert above(found, span)[0] == ("invoke_agent", "writer")


@pytest.mark.parametrize("way", ["ainvoke", "abatch"])
def test_a_model_outside_of_all_chains_that_is_not_waited_for_is_an_error(spans_of, way):
    async def program(url):
        async with asyncio.timeout(None) as limit:
            model = Stuck(limit=limit)
            with agent("writer"), pytest.raises(asyncio.CancelledError):
                await (model.ainvoke("hello") if way == "ainvoke" else model.abatch(["hello"]))
            assert current_agent() is None
            raise TimeoutError

    def caught(url):
        with pytest.raises(TimeoutError):
            asyncio.run(program(url))

    (span,) = spans_of(caught).chats
    assert (span.agent, span.status, span.attributes[names.ERROR_TYPE]) == ("writer", "error", "CancelledError")
    assert '"content":"hello"' in span.attributes[names.REQUEST]


@pytest.mark.parametrize("way", ["stream", "astream"])
def test_a_stream_without_the_openai_client_that_its_reader_leaves_is_abandoned(spans_of, way):
    async def program(url):
        async def writer(state):
            llm = FakeListChatModel(responses=["abc def"])
            if way == "stream":
                parts = llm.stream("hello")
                first = next(parts)
                parts.close()
            else:
                parts = llm.astream("hello")
                first = await anext(parts)
                await parts.aclose()
            return {"notes": [first.content]}

        return await graph_of(writer, edges=[(START, "writer")]).ainvoke({"notes": []})

    found = spans_of(program)
    (span,) = found.chats
    assert (span.agent, span.status, span.attributes[names.ABANDONED]) == ("writer", "ok", True)
    assert found.output == {"notes": ["a"]}


class Pieces(FakeListLLM):
    """A model of text that is streamed, letter by letter."""

    def _stream(self, prompt, stop=None, run_manager=None, **kwargs):
        for letter in self.responses[0]:
            yield GenerationChunk(text=letter)


@pytest.mark.parametrize("way", ["stream", "astream"])
@pytest.mark.parametrize("kind", [FakeListChatModel, Pieces])
@pytest.mark.parametrize("by_openai", [True, False])
def test_what_the_reader_of_a_stream_calls_between_its_items_is_no_part_of_it(found_of, by_openai, kind, way):
    async def program(url):
        def judge():
            judge = model(url) if by_openai else FakeListChatModel(responses=["fine"])
            judge.invoke("so far?")

        if way == "stream":
            for _ in kind(responses=["ab"]).stream("write"):
                judge()
        else:
            async for _ in kind(responses=["ab"]).astream("write"):
                judge()

    found = found_of(program)
    asked = [json.loads(span.attributes[names.REQUEST])["messages"][0]["content"] for span in found.chats]
    assert asked.count("write") == 1
    assert asked.count("so far?") == len(asked) - 1 >= 2
    assert {span.parent_id for span in found.chats} == {None}


def test_a_call_of_plain_httpx_after_that_of_a_model_without_the_openai_client_is_recorded(found_of):
    async def program(url):
        with agent("writer"):
            await FakeListChatModel(responses=["hello"]).ainvoke("hello")
            async with httpx.AsyncClient() as client:
                body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
                await client.post(f"{url}/chat/completions", json=body)

    chats = [(span.attributes[names.FRAMEWORK], span.agent) for span in found_of(program).chats]
    assert chats == [("langchain", "writer"), ("httpx", "writer")]


class Wrapped(BaseChatModel):
    """A model that hands on to another one."""

    inner: Any

    @property
    def _llm_type(self):
        return "wrapped"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        return ChatResult(generations=[ChatGeneration(message=AIMessage(self.inner.invoke(messages).content))])


@pytest.mark.parametrize("wired", [True, False])
def test_a_model_that_wraps_another_is_one_span(spans_of, wired):
    def program(url):
        inner = model(url) if wired else FakeListChatModel(responses=["hello"])
        return [Wrapped(inner=inner).invoke("hello").content for _ in range(2)]

    assert len(spans_of(program).chats) == 2


class Router(Wrapped):
    """One class for many providers, as LiteLLM's: some of its calls pass the wire."""

    elsewhere: Any

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        if messages[-1].content == "here":
            return super()._generate(messages, stop, run_manager, **kwargs)
        return self.elsewhere._generate(messages, stop, None, **kwargs)


def test_a_model_is_one_span_wherever_each_of_its_calls_goes(tmp_path):
    def program(url):
        router = Router(inner=model(url), elsewhere=FakeListChatModel(responses=["there"]))
        return [router.invoke(where).content for where in ("here", "elsewhere", "here", "elsewhere")]

    found = record(program, tmp_path, framework="langchain", tracer="embedded")
    assert len(found.requests) == 2
    assert [span.attributes[names.FRAMEWORK] for span in found.chats] == ["openai", "langchain"] * 2
    assert '"content":"elsewhere"' in found.chats[-1].attributes[names.REQUEST]


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("wired", [True, False])
def test_an_answer_from_langchains_cache_is_no_call(spans_of, wired, way):
    from langchain_core.caches import InMemoryCache

    async def ask(llm):
        return [(await llm.ainvoke("hello")).content for _ in range(2)]

    def program(url):
        cache = InMemoryCache()
        llm = model(url, cache=cache) if wired else FakeListChatModel(responses=["one", "two"], cache=cache)
        return asyncio.run(ask(llm)) if way == "ainvoke" else [llm.invoke("hello").content for _ in range(2)]

    found = spans_of(program)
    assert len(found.chats) == 1
    assert len(found.requests) == int(wired)


# Attach and detach


def test_detach_takes_the_hook_away_and_leaves_those_of_others(tmp_path):
    before = list(tracers_context._configure_hooks)
    with attach(store=str(tmp_path / "traces.db")):
        assert len(tracers_context._configure_hooks) == len(before) + 1
    assert tracers_context._configure_hooks == before


def test_detach_in_the_middle_of_a_run_ends_what_is_open(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    with ScriptedServer() as server:
        attachment = attach(store=str(tmp_path / "traces.db"))

        def writer(state):
            model(server.url).invoke(asked("writer", "hello"))
            attachment.flush(60)
            attachment.detach()
            return {"notes": [model(server.url).invoke(asked("writer", "hello")).content]}

        output = graph_of(writer, edges=[(START, "writer")]).invoke({"notes": []})
        assert output == {"notes": ["writer answers 'hello'"]}
        assert len(server.requests) == 2
    store = open_store(str(tmp_path / "traces.db"))
    assert [span.operation for span in store.spans()] == ["invoke_workflow", "invoke_agent", "chat"]
    store.close()


def test_detach_ends_a_span_that_a_request_has_named(tmp_path, monkeypatch):
    sent, named = [], []
    monkeypatch.setattr(
        "lightning_spans.record.delivery.deliver.Delivery.__call__", lambda self, to, spans: sent.extend(spans)
    )

    class Posting(FakeListChatModel):
        def _call(self, *args, **kwargs):
            named.append(httpx.post(f"{server.base}/v1/messages", json={}).request.headers["traceparent"])
            attachment.detach()
            return "hello"

    with ScriptedServer() as server, use_attempt(Attempt("r", "a", endpoint=server.base)):
        attachment = attach(store=str(tmp_path / "traces.db"))
        Posting(responses=[""]).invoke("hello")
    (span,) = [span for span in sent if span.operation == names.CHAT]
    assert named == [f"00-{span.trace_id}-{span.span_id}-01"]


def test_runs_that_nobody_ended_are_let_go_with_their_root():
    from lightning_langchain.agents import ChainRuns

    class NoRecorder:
        pass

    runs = ChainRuns(NoRecorder(), "langchain")
    root = runs.begin_run(1, None, "chain", "root", {})
    runs.begin_run(2, 1, "chain", "child", {})
    runs.end_run(1)
    assert root.inner == {}
    assert runs.scopes == {}


def test_contexts_that_outlive_their_run_are_settled():
    from lightning_langchain.agents import ChainRuns

    runs = ChainRuns(None, "langchain")
    first = runs.begin_run(1, None, "chat", "first", {})
    first.enter(otel_context.get_current())
    second = runs.begin_run(2, None, "chat", "second", {})
    second.enter(otel_context.get_current())
    left = otel_context.get_current()
    runs.end_run(1)  # ends before what began later in the same context, as two streams read in turn do
    assert otel_context.get_current() is left
    runs.end_run(2)
    assert current_scope() is None
    assert current_scope(settle_context(left)) is None


# Tools in a replay


def replayed(program, folder):
    """Run a program and a replay of it; give what both gave, after what every replay must keep."""
    before = len(NOTES)
    outputs, spans = run_twice(program, folder, "langchain")
    made = len(NOTES) - before
    tools = [span for span in spans if span.operation == names.EXECUTE_TOOL]
    assert {span.attributes[names.REPLAYED] for span in tools} == {True}
    return outputs, made, tools


def test_a_tool_that_goes_elsewhere_in_the_graph_does_so_in_a_replay(tmp_path):
    @tool
    def hand_over(text: str, tool_call_id: Annotated[str, InjectedToolCallId]) -> Command:
        """Hand over."""
        message = ToolMessage(write_note(text), tool_call_id=tool_call_id, artifact={"a": 1})
        return Command(goto="second", update={"messages": [message]})

    def program(url):
        def first(state):
            messages = [SystemMessage(instructions("first")), *state["messages"]]
            return {"messages": [model(url).bind_tools([hand_over]).invoke(messages)]}

        def second(state):
            return {"messages": [AIMessage(f"second saw {state['messages'][-1].content!r}")]}

        builder = StateGraph(MessagesState).add_node(first).add_node("tools", ToolNode([hand_over])).add_node(second)
        builder.add_edge(START, "first").add_edge("first", "tools").add_edge("second", END)
        state = builder.compile().invoke(user('call hand_over {"text": "one"}'))
        return last(state), state["messages"][-2].artifact

    (first, second), made, _ = replayed(program, tmp_path)
    assert first == second
    assert first[0].startswith("second saw 'note")
    assert made == 1


def test_data_and_artifacts_come_back_as_they_were(tmp_path):
    @tool(response_format="content_and_artifact")
    def find(text: str) -> tuple[str, dict]:
        """Find."""
        return write_note(text), {"hits": (1, 2)}

    @tool
    def look(text: str) -> dict:
        """Look."""
        return {"seen": write_note(text)}

    def program(url):
        state = named(url, "caller", [find, look]).invoke(user('call find {"text": "a"}\ncall look {"text": "b"}'))
        direct = look.invoke({"text": "c"})
        return last(state), [getattr(message, "artifact", None) for message in state["messages"]], direct

    (first, second), made, tools = replayed(program, tmp_path)
    assert first == second
    assert type(second[2]) is dict
    assert {"hits": (1, 2)} in second[1]
    assert (made, len(tools)) == (3, 3)


@pytest.mark.parametrize(
    "how", [True, "it is out of order", lambda error: f"caught {error}"], ids=["true", "text", "own"]
)
def test_a_failure_that_the_tool_handles_is_told_alike(how, tmp_path):
    @tool
    def note_badly(text: str) -> str:
        """Note."""
        raise ToolException(write_note(text))

    note_badly.handle_tool_error = how
    program = lambda url: last(named(url, "caller", [note_badly]).invoke(user('call note_badly {"text": "a"}')))  # noqa: E731
    (first, second), made, (span,) = replayed(program, tmp_path)
    assert first == second
    assert made == 1
    assert span.status == "error"


def test_a_node_of_tools_tells_of_a_failure_alike(tmp_path):
    def program(url):
        def caller(state):
            messages = [SystemMessage(instructions("caller")), *state["messages"]]
            return {"messages": [model(url).bind_tools([note]).invoke(messages)]}

        builder = (
            StateGraph(MessagesState).add_node(caller).add_node("tools", ToolNode([note], handle_tool_errors=True))
        )
        builder.add_edge(START, "caller").add_edge("tools", "caller")
        builder.add_conditional_edges("caller", tools_condition)
        return last(builder.compile().invoke(user('call note {"text": "fail"}')))

    (first, second), made, (span,) = replayed(program, tmp_path)
    assert first == second
    assert "is out of order" in first
    assert (made, span.attributes[names.ERROR_TYPE]) == (1, "ValueError")


def test_a_tool_that_waits_for_approval_waits_in_a_replay_too(tmp_path):
    @tool
    def pay(amount: int) -> str:
        """Pay."""
        return write_note(f"{amount} {interrupt('fine?')}")

    def program(url):
        graph = with_tool(url, pay).compile(checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "t"}}
        graph.invoke(user('call pay {"amount": 5}'), config)
        return last(graph.invoke(Command(resume="yes"), config))

    before = len(NOTES)
    (first, second), spans = run_twice(program, tmp_path, "langchain")
    assert first == second
    assert len(NOTES) - before == 1
    asked = [span.attributes[names.REPLAYED] for span in spans if span.operation == names.EXECUTE_TOOL]
    assert asked == [False, True]  # it began, and was answered only then


# Graphs of libraries


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return what makes a function one of an installed package."""

    def of(package, function):
        module = types.ModuleType(package)
        module.__file__ = str(tmp_path / "site-packages" / package / "__init__.py")
        monkeypatch.setitem(sys.modules, package, module)
        function.__module__ = f"{package}.graphs"
        return function

    libraries._is_installed.cache_clear()
    yield of
    libraries._is_installed.cache_clear()


def extractor(url, mark=lambda function: function):
    """A graph as a library makes one: its step `extract` asks the model what it is given."""

    def extract(state):
        return {"notes": [model(url).invoke(asked("extractor", state["notes"][0])).content]}

    return graph_of(mark(extract), edges=[(START, "extract")])


def two_nodes(of_billing, of_profile=None):
    def billing(state):
        return {"notes": of_billing.invoke({"notes": ["one"]})["notes"]}

    async def profile(state):
        return {"notes": (await (of_profile or of_billing).ainvoke({"notes": ["two"]}))["notes"]}

    return graph_of(billing, profile, edges=[(START, "billing"), ("billing", "profile")])


def who(found):
    return [(span.agent, span.attributes.get(names.AGENT_PATH)) for span in found.chats]


def either_way(graph, given=None):
    return asyncio.run(graph.ainvoke(given or {"notes": []}))


def test_a_librarys_graph_does_not_take_the_name_from_the_users_node(spans_of, installed):
    found = spans_of(lambda url: either_way(two_nodes(extractor(url, lambda f: installed("trusted", f)))))
    assert who(found) == [("billing", None), ("profile", None)]
    assert {span.name for span in found.spans if span.operation == names.INVOKE_AGENT} == {"billing", "profile"}


def test_an_agent_around_a_librarys_graph_counts(spans_of, installed):
    def program(url):
        graph = extractor(url, lambda f: installed("trusted", f))
        with agent("billing"):
            graph.invoke({"notes": ["one"]})
        graph.invoke({"notes": ["one"]})  # nothing else names this one

    assert who(spans_of(program)) == [("billing", None), ("extract", None)]


def test_an_installed_program_keeps_the_names_of_its_own_graphs(spans_of, installed):
    def program(url):
        graph = two_nodes(extractor(url, lambda f: installed("program", f)))
        for node in graph.builder.nodes.values():
            for function in filter(None, (node.runnable.func, node.runnable.afunc)):
                installed("program", function)
        either_way(graph)

    assert who(spans_of(program)) == [("extract", "billing/extract"), ("extract", "profile/extract")]


def test_a_mark_says_whose_a_graph_is(spans_of, installed):
    def marked(url):
        own = extractor(url).with_config(tags=[libraries.LIBRARY])
        either_way(
            two_nodes(own, extractor(url, lambda f: installed("agents", f)).with_config(tags=[libraries.AGENTS]))
        )

    assert who(spans_of(marked)) == [("billing", None), ("extract", "profile/extract")]


def test_agents_of_one_name_are_selected_by_their_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "unused")
    with ScriptedServer() as origin, ScriptedServer() as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("billing/**",))
        with attach(store=str(tmp_path / "own.db")) as attachment, use_attempt(attempt):
            either_way(two_nodes(extractor(origin.url)))
            attachment.flush()
        (sent,) = policy.requests
        assert sent.body["messages"][-1]["content"] == "one"
        assert sent.headers["x-lightning-agent"] == "billing/extract"
        assert [request.body["messages"][-1]["content"] for request in origin.requests] == ["two"]


class SyncListener(BaseCallbackHandler):
    """A user's own listener, whose methods note what they hear."""

    def __init__(self):
        self.heard = []

    def on_llm_start(self, *_, **__):
        self.heard.append("llm start")

    def on_chat_model_start(self, *_, **__):
        self.heard.append("chat start")

    def on_llm_new_token(self, *_, **__):
        self.heard.append("token")

    def on_llm_end(self, *_, **__):
        self.heard.append("end")

    def on_llm_error(self, *_, **__):
        self.heard.append("error")


class AsyncListener(AsyncCallbackHandler):
    def __init__(self):
        self.heard = []

    async def on_llm_start(self, *_, **__):
        self.heard.append("llm start")

    async def on_chat_model_start(self, *_, **__):
        self.heard.append("chat start")

    async def on_llm_new_token(self, *_, **__):
        self.heard.append("token")

    async def on_llm_end(self, *_, **__):
        self.heard.append("end")

    async def on_llm_error(self, *_, **__):
        self.heard.append("error")


async def asked_in(way, model, config):
    if way == "astream":
        return [item async for item in model.astream("hello", config)]
    if way == "abatch":
        return await model.abatch(["hello", "again"], config)
    if way == "agenerate":
        return await model.agenerate_prompt([StringPromptValue(text=text) for text in "ab"], **config)
    if way == "batch":
        return model.batch(["hello", "again"], config)
    if way == "ainvoke":
        return await model.ainvoke("hello", config)
    return list(model.stream("hello", config)) if way == "stream" else model.invoke("hello", config)


def heard(make_model, ways=("invoke", "stream", "batch", "ainvoke", "astream", "abatch", "agenerate")):
    """Return what a user's own listeners hear of a model, by how it is prompted: how often they heard each."""
    found = {}
    with asyncio.Runner() as loop:  # one, because models of one URL share their connections
        for way in ways:
            listeners = [SyncListener(), AsyncListener()] if way.startswith("a") else [SyncListener()]
            with agent("writer"):
                loop.run(asked_in(way, make_model(), {"callbacks": listeners}))
            found[way] = [sorted(listener.heard) for listener in listeners]
    return found
