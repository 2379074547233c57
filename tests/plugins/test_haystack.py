from __future__ import annotations

import asyncio
import json
import os
from contextlib import nullcontext

import pytest

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"
pytest.importorskip("haystack.components.agents")

from haystack import Pipeline, SuperComponent, component
from haystack.components.agents import Agent
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.components.generators.chat import openai as completions
from haystack.core.pipeline.base import PipelineBase
from haystack.dataclasses import ChatMessage, ToolCall
from haystack.tools import ComponentTool, Tool, create_tool_from_function
from haystack.utils import Secret

import lightning_haystack
from lightning_conformance.plugins import programs
from lightning_conformance.plugins.program import span_of
from lightning_conformance.plugins.programs import AgentPrograms
from lightning_conformance.plugins.replayed import run_twice
from lightning_conformance.plugins.script import agent_of
from lightning_conformance.plugins.server import ScriptedServer
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    REPLAY_PROMPTS,
    PluginConformance,
    instructions,
    write_note,
)
from lightning_haystack.agents import async_pipeline
from lightning_haystack.tools import HaystackTools
from lightning_spans import Attempt, agent, use_attempt
from lightning_spans.schema import spans as names

Awaited = async_pipeline()
NEW = Awaited is Pipeline  # Haystack 3


def model(url, kind=OpenAIChatGenerator, **options):
    return kind(api_key=Secret.from_env_var("OPENAI_API_KEY"), model=MODEL, api_base_url=url, **options)


def alone(name, url_or_model, *tools, **options):
    given = model(url_or_model) if isinstance(url_or_model, str) else url_or_model
    options = {"max_agent_steps": 5, **options}
    return Agent(chat_generator=given, system_prompt=instructions(name), tools=list(tools), **options)


def make(name, url_or_model, *tools, kind=Pipeline, **options):
    """Return a pipeline of one agent: an agent of Haystack's is called as the component that it is."""
    pipeline = kind()
    pipeline.add_component(name, alone(name, url_or_model, *tools, **options))
    return pipeline


def asked(pipeline, prompt, **options):
    (name,) = pipeline.graph.nodes
    return {name: {"messages": [ChatMessage.from_user(prompt)], **options}}


def said(answer):
    (result,) = answer.values()
    return result["messages"][-1].text


def ask(pipeline, prompt, **options):
    return said(pipeline.run(asked(pipeline, prompt, **options)))


async def aask(pipeline, prompt, **options):
    return said(await pipeline.run_async(asked(pipeline, prompt, **options)))


async def ask_all(who, url, scenario):
    return await asyncio.gather(*(aask(make(name, url, kind=Awaited), PROMPTS[scenario]) for name in who))


def stream(pipeline, prompt):
    pieces = []
    ask(pipeline, prompt, streaming_callback=lambda chunk: pieces.append(chunk.content))
    return pieces


def run(coroutine):
    return asyncio.run(coroutine)


def tool(function, name=None):
    return create_tool_from_function(function, name=name)


add = tool(programs.add)


class TestConformance(AgentPrograms, PluginConformance):
    framework = "haystack"
    unsupported = (
        {}
        if NEW
        else {
            "abandoned": "a stream is told to a callback, so there is no reader who could leave, before Haystack 3",
            "effects_awaited": "a tool is no coroutine function before Haystack 3",
        }
    )

    def patched(self):
        return [
            (Agent, "run"),
            (Agent, "run_async"),
            (PipelineBase, "_create_component_span"),
            (Pipeline, "run"),
            (Awaited, "run_async_generator"),
            (Tool, "invoke"),
            (Told, "run"),
            (Told, "run_async"),
            (completions, "_convert_chat_completion_to_chat_message"),
            (completions, "_convert_streaming_chunks_to_chat_message"),
            *((owner, name) for owner, name, _ in HaystackTools(None, "haystack").places()),
        ]

    def make(self, name, url, *tools, **client):
        return make(name, model(url, **client), *tools)

    def ask(self, agent, prompt):
        return ask(agent, prompt)

    def stream(self, agent, prompt):
        return stream(agent, prompt)

    def tool(self, function):
        return tool(function)

    def unnamed(self, url):
        with agent("writer"):
            return alone("writer", url).run([ChatMessage.from_user(PROMPTS["unnamed"])])["messages"][-1].text

    def namesakes(self, url):
        def work(team):
            def consult() -> str:
                """Consult."""
                return ask(make("writer", url), PROMPTS["namesakes"])

            return ask(make(team, url, tool(consult)), "call consult {}")

        return [work("red"), work("blue")]

    def abandoned(self, url):
        async def work():
            pipeline = make("writer", url)
            handle = pipeline.stream(asked(pipeline, PROMPTS["abandoned"]))
            async for chunk in handle:
                if chunk.content:
                    await handle.aclose()
                    return chunk.content
            return None

        return run(work())

    def responses(self, url):
        return ask(make("writer", model(url, OpenAIResponsesChatGenerator)), PROMPTS["responses"])

    def responses_streaming(self, url):
        return stream(make("writer", model(url, OpenAIResponsesChatGenerator)), PROMPTS["responses_streaming"])

    def choices(self, url):
        return ask(make("writer", model(url, generation_kwargs={"n": 2})), PROMPTS["choices"])

    def unreadable_arguments(self, url):  # Haystack 3 asks again until its steps are used up
        return ask(make("caller", url, add, max_agent_steps=1), PROMPTS["unreadable_arguments"])

    async def effects_awaited(self, url):
        async def note(text: str) -> str:
            """Note a text."""
            return write_note(text)

        return await aask(make("caller", url, tool(note)), REPLAY_PROMPTS["effects_awaited"])

    def parallel(self, url):
        return run(ask_all(["left", "right"], url, "parallel"))

    def nested(self, url):
        def ask_writer(question: str) -> str:
            """Ask the writer."""
            return ask(make("writer", url), question)

        return ask(make("boss", url, tool(ask_writer, "ask")), PROMPTS["nested"])

    async def asynchronous(self, url):
        return await ask_all(["writer", "rewriter"], url, "asynchronous")

    async def awaited(self, url):
        return await aask(make("writer", url, kind=Awaited), PROMPTS["awaited"])

    def heard_by_a_streaming_callback(self, url):
        return stream(make("writer", url), PROMPTS["one_agent"])

    async def heard_by_an_asynchronous_streaming_callback(self, url):
        seen = []

        async def hear(chunk):
            seen.append(chunk.content)

        await aask(make("writer", url, kind=Awaited), PROMPTS["one_agent"], streaming_callback=hear)
        return seen


@component
class Told:
    """A generator that is reached without a client."""

    def __init__(self, model="told"):
        self.model = model

    @component.output_types(replies=list[ChatMessage])
    def run(self, messages: list[ChatMessage], tools: list | None = None):
        if messages[-1].text == "fail":
            raise ConnectionError("gone")
        if tools and not messages[-1].tool_call_results:
            call = ToolCall(id="call-1", tool_name="add", arguments={"a": 2, "b": 3})
            return {"replies": [ChatMessage.from_assistant(tool_calls=[call], meta={"finish_reason": "tool_calls"})]}
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        meta = {"model": "told-1", "finish_reason": "stop", "usage": usage}
        return {"replies": [ChatMessage.from_assistant("it is 5", meta=meta)]}

    @component.output_types(replies=list[ChatMessage])
    async def run_async(self, messages: list[ChatMessage], tools: list | None = None):
        return self.run(messages, tools)


def paths(found):
    """Return the paths of the agents that made the calls, in order."""
    return [chat.attributes.get(names.AGENT_PATH, chat.agent) for chat in found.chats]


WAYS = {
    "run": lambda name, url, *tools: ask(make(name, url, *tools), PROMPTS["tool_call"]),
    "run_async": lambda name, url, *tools: run(aask(make(name, url, *tools, kind=Awaited), PROMPTS["tool_call"])),
    "streamed": lambda name, url, *tools: stream(make(name, url, *tools), PROMPTS["tool_call"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_a_pipeline_is_recorded_alike(way, found_of):
    found = found_of(lambda url: WAYS[way]("caller", url, add) and None)
    by_start = sorted(found.spans, key=lambda span: span.start_ns)
    assert [(s.operation, s.agent, s.status) for s in by_start] == [
        ("invoke_workflow", None, "ok"),
        ("invoke_agent", "caller", "ok"),
        ("chat", "caller", "ok"),
        ("execute_tool", "caller", "ok"),
        ("chat", "caller", "ok"),
    ]
    assert [s.parent_id for s in by_start] == [None, by_start[0].span_id, *[by_start[1].span_id] * 3]


def test_a_generator_is_called_as_its_component_and_components_without_a_model_are_no_agents(found_of):
    def program(url):
        pipeline = Pipeline()
        pipeline.add_component("prompt", ChatPromptBuilder(template=[ChatMessage.from_user("about {{topic}}")]))
        pipeline.add_component("draft", model(url))
        pipeline.add_component("polish", model(url))
        pipeline.connect("prompt.prompt", "draft.messages")
        pipeline.connect("draft.replies", "polish.messages")
        return pipeline.run({"prompt": {"topic": "rain"}})["polish"]["replies"][0].text

    found = found_of(program)
    assert paths(found) == ["draft", "polish"]
    assert {span.name for span in found.spans if span.operation == names.INVOKE_AGENT} == {"draft", "polish"}
    (root,) = [span for span in found.spans if span.parent_id is None]
    assert (root.operation, root.name) == (names.INVOKE_WORKFLOW, "Pipeline")


def test_a_super_component_is_the_agent_around_those_in_its_pipeline(found_of):
    def program(url):
        outer = Pipeline()
        for name in ("profile", "billing"):
            inner = Pipeline()
            inner.add_component("extract", model(url))
            wrapped = SuperComponent(
                pipeline=inner,
                input_mapping={"messages": ["extract.messages"]},
                output_mapping={"extract.replies": "replies"},
            )
            outer.add_component(name, wrapped)
        said = [ChatMessage.from_user("hello")]
        return sorted(outer.run({name: {"messages": said} for name in ("profile", "billing")}))

    assert sorted(paths(found_of(program))) == ["billing/extract", "profile/extract"]


def test_a_component_of_ones_own_is_called_as_itself(found_of):
    def program(url):
        @component
        class Own:
            @component.output_types(text=str)
            def run(self, question: str):
                with agent("checker"):
                    model(url).run([ChatMessage.from_user(question)])
                return {"text": model(url).run([ChatMessage.from_user(question)])["replies"][0].text}

        pipeline = Pipeline()
        pipeline.add_component("own", Own())
        return pipeline.run({"own": {"question": "hello"}})

    assert sorted(paths(found_of(program))) == ["checker", "own"]


def test_a_component_that_fails_is_an_error(found_of):
    def program(url):
        pipeline = Pipeline()
        pipeline.add_component("draft", model(url, max_retries=0))
        with pytest.raises(Exception, match="draft"):
            pipeline.run({"draft": {"messages": [ChatMessage.from_user("fail 500 99")]}})

    found = found_of(program)
    assert {(span.operation, span.status) for span in found.spans} == {
        ("invoke_workflow", "error"),
        ("invoke_agent", "error"),
        ("chat", "error"),
    }


def test_an_agent_as_a_tool_is_called_as_the_tool(found_of):
    def program(url):
        writer = ComponentTool(component=alone("writer", url), name="writer", description="Writes.")
        return ask(make("boss", url, writer), 'call writer {"messages": [' + json.dumps(user("hello")) + "]}")

    found = found_of(program)
    assert sorted(paths(found)) == ["boss", "boss", "boss/writer"]
    (tool,) = found.tools
    assert (tool.name, tool.agent, tool.status) == ("writer", "boss", "ok")
    assert tool.attributes[names.TOOL_RESULT]


def user(text):
    return ChatMessage.from_user(text).to_dict()


def test_an_agent_as_a_tool_is_not_asked_again_in_a_replay(tmp_path):
    def program(url):
        writer = ComponentTool(component=alone("writer", url), name="writer", description="Writes.")
        return ask(make("boss", url, writer), 'call writer {"messages": [' + json.dumps(user("hello")) + "]}")

    (first, second), again = run_twice(program, tmp_path, "haystack")
    assert first == second
    assert {span.agent for span in again if span.operation == names.CHAT} == {"boss"}


def test_an_agent_without_a_name_is_that_of_the_user(found_of):
    def program(url):
        with agent("writer"):
            alone("writer", url).run([ChatMessage.from_user("hello")])
        alone("nobody", url).run([ChatMessage.from_user("hello")])

    assert paths(found_of(program)) == ["writer", "Agent"]


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("way", ["run", "run_async"])
def test_a_tool_that_is_not_there_is_an_error(way, raises, found_of):
    def program(url):
        options = {"raise_on_tool_invocation_failure": raises}
        prompt = 'call multiply {"a": 2}'
        with pytest.raises(Exception, match="multiply") if raises else nullcontext():
            if way == "run":
                ask(make("caller", url, add, **options), prompt)
            else:
                run(aask(make("caller", url, add, kind=Awaited, **options), prompt))

    (tool,) = found_of(program).tools
    assert (tool.name, tool.agent, tool.status) == ("multiply", "caller", "error")
    assert "multiply" in tool.status_message
    assert json.loads(tool.attributes[names.TOOL_ARGUMENTS]) == {"a": 2}


def test_arguments_that_do_not_fit_are_an_error(found_of):
    (tool,) = found_of(lambda url: ask(make("caller", url, add), 'call add {"a": 1, "c": 2}')).tools
    assert (tool.name, tool.status) == ("add", "error")
    assert "argument" in tool.status_message


def test_arguments_that_can_not_be_read_are_an_error_in_a_stream_too(found_of):
    def program(url):
        stream(make("caller", url, add, max_agent_steps=1), PROMPTS["unreadable_arguments"])

    (tool,) = found_of(program).tools
    assert (tool.name, tool.agent, tool.status) == ("add", "caller", "error")
    assert tool.attributes[names.TOOL_ARGUMENTS] == '{"a": 2, "b"'


@pytest.mark.parametrize("way", ["run", "run_async"])
def test_a_model_reached_elsewhere_is_one_chat_span(way, found_of):
    def program(url):
        if way == "run":
            return ask(make("writer", Told(), add), "hello")
        return run(aask(make("writer", Told(), add, kind=Awaited), "hello"))

    found = found_of(program)
    assert found.output == "it is 5"
    assert [(chat.agent, chat.status) for chat in found.chats] == [("writer", "ok")] * 2
    first, second = sorted(found.chats, key=lambda chat: chat.start_ns)
    request = json.loads(first.attributes[names.REQUEST])
    assert [turn["role"] for turn in request["messages"]] == ["system", "user"]
    assert request["tools"][0]["function"]["name"] == "add"
    asked = json.loads(first.attributes[names.RESPONSE])["choices"][0]["message"]["tool_calls"]
    assert asked[0]["id"] == found.tools[0].attributes[names.TOOL_CALL_ID] == "call-1"
    assert json.loads(asked[0]["function"]["arguments"]) == {"a": 2, "b": 3}
    roles = [turn["role"] for turn in json.loads(second.attributes[names.REQUEST])["messages"]]
    assert roles[-2:] == ["assistant", "tool"]
    assert json.loads(second.attributes[names.RESPONSE])["choices"][0]["message"]["content"] == "it is 5"
    assert second.attributes[names.INPUT_TOKENS] == 3


def test_a_generator_reached_elsewhere_that_stands_alone_is_called_as_its_component(found_of):
    def program(url):
        pipeline = Pipeline()
        pipeline.add_component("draft", Told())
        return pipeline.run({"draft": {"messages": [ChatMessage.from_user("hello")]}})["draft"]["replies"][0].text

    found = found_of(program)
    assert paths(found) == ["draft"]


def test_a_generator_around_a_client_is_one_chat_span_of_the_client(found_of):
    @component
    class Around:
        def __init__(self, inner):
            self.inner = inner

        @component.output_types(replies=list[ChatMessage])
        def run(self, messages: list[ChatMessage]):
            return self.inner.run(messages)

    def program(url):
        pipeline = Pipeline()
        pipeline.add_component("draft", Around(model(url)))
        return pipeline.run({"draft": {"messages": [ChatMessage.from_user("hello")]}})["draft"]["replies"][0].text

    found = found_of(program)
    assert len(found.requests) == 1
    assert paths(found) == ["draft"]


def test_a_model_reached_elsewhere_that_fails_is_an_error(found_of):
    def program(url):
        with pytest.raises(Exception, match="gone"):
            ask(make("writer", Told()), "fail")

    (chat,) = found_of(program).chats
    assert (chat.status, chat.status_message, chat.agent) == ("error", "gone", "writer")


def test_only_the_attempts_own_agent_is_rerouted_from_inside_a_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    with ScriptedServer() as origin, ScriptedServer() as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",))

        def consult() -> str:
            """Consult."""
            return ask(make("writer", origin.url), "hello")

        with lightning_haystack.attach(store=str(tmp_path / "traces.db")) as attachment, use_attempt(attempt):
            ask(make("boss", origin.url, tool(consult)), "call consult {}")
            attachment.flush(60)
        assert {agent_of(request.body) for request in policy.requests} == {"writer"}
        assert {agent_of(request.body) for request in origin.requests} == {"boss"}
        assert len({span_of(request) for request in [*policy.requests, *origin.requests]}) == 3


def test_detaching_ends_what_is_open(operations_until_stopped):
    operations = operations_until_stopped(lambda url, stop: ask(make("caller", url, tool(stop)), "call stop {}"))
    assert operations == ["chat", "execute_tool", "invoke_agent", "invoke_workflow"]


@pytest.mark.skipif(not NEW, reason="there is none before Haystack 3")
def test_an_agent_tool_is_one_too(found_of):
    def program(url):
        from haystack.tools import AgentTool

        research = AgentTool(agent=alone("writer", url), name="research", description="Researches.")
        return ask(make("boss", url, research), 'call research {"messages": [' + json.dumps(user("hello")) + "]}")

    found = found_of(program)
    assert paths(found) == ["boss", "boss/research", "boss"]
    (tool,) = found.tools
    assert (tool.name, tool.status) == ("research", "ok")
    assert "{" not in tool.attributes[names.TOOL_RESULT]  # what the writer said, not all that an agent gives
