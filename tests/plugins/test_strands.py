from __future__ import annotations

import asyncio
import json
import os

import pytest

pytest.importorskip("strands")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else LiteLLM asks the net for prices

import strands
from strands import Agent
from strands.hooks import AfterInvocationEvent, BeforeInvocationEvent, MessageAddedEvent
from strands.models.model import Model
from strands.models.openai import OpenAIModel
from strands.multiagent import GraphBuilder, Swarm
from strands.multiagent.graph import Graph
from strands.tools.executors._executor import ToolExecutor

import lightning_strands
from lightning_conformance.plugins import programs
from lightning_conformance.plugins.program import span_of
from lightning_conformance.plugins.programs import AgentPrograms
from lightning_conformance.plugins.script import Reply, ScriptedToolCall, agent_of
from lightning_conformance.plugins.server import ScriptedServer
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    PluginConformance,
    instructions,
)
from lightning_spans import Attempt, agent, use_attempt
from lightning_spans.schema import spans as names
from lightning_strands.agents import way_of

try:
    from strands.models.openai_responses import OpenAIResponsesModel
except ImportError:  # before 1.23
    OpenAIResponsesModel = None


ADD = PROMPTS["tool_call"]
EVENTS = (BeforeInvocationEvent, MessageAddedEvent, AfterInvocationEvent)


def model(url, kind=OpenAIModel, params=None, **options):
    return kind(client_args={"base_url": url, **options}, model_id=MODEL, params=params or {})


def make(name, url_or_model, *tools, **options):
    given = model(url_or_model) if isinstance(url_or_model, str) else url_or_model
    options = {"callback_handler": None, **options}
    return Agent(model=given, name=name, system_prompt=instructions(name), tools=list(tools), **options)


def ask(agent, prompt):
    return str(agent(prompt)).strip()


async def aask(agent, prompt):
    return str(await agent.invoke_async(prompt)).strip()


async def stream(agent, prompt):
    return [event["data"] async for event in agent.stream_async(prompt) if "data" in event]


def run(coroutine):
    return asyncio.run(coroutine)


add = strands.tool(programs.add)


class TestConformance(AgentPrograms, PluginConformance):
    framework = "strands"
    unsupported = {"unreadable_arguments": "Strands puts an empty object in their place"} | (
        {}
        if OpenAIResponsesModel
        else dict.fromkeys(["responses", "responses_streaming"], "there is no model for them before 1.23")
    )

    def patched(self):
        return [
            (Agent, "stream_async"),
            (Agent, "structured_output_async"),
            (Graph, way_of(Graph)),
            (Swarm, way_of(Swarm)),
            (ToolExecutor, "_stream"),
            (Told, "stream"),
        ]

    def make(self, name, url, *tools, **client):
        return make(name, model(url, **client), *tools)

    def ask(self, agent, prompt):
        return ask(agent, prompt)

    async def answer(self, agent, prompt):
        return await aask(agent, prompt)

    async def pieces(self, agent, prompt):
        return await stream(agent, prompt)

    def tool(self, function):
        return strands.tool(function)

    def unnamed(self, url):
        with agent("writer"):
            return ask(
                Agent(model=model(url), system_prompt=instructions("writer"), callback_handler=None), PROMPTS["unnamed"]
            )

    def namesakes(self, url):
        def work(team):
            @strands.tool
            def consult() -> str:
                """Consult."""
                return ask(make("writer", url), PROMPTS["namesakes"])

            return ask(make(team, url, consult), "call consult {}")

        return [work("red"), work("blue")]

    def abandoned(self, url):
        async def work():
            events = make("writer", url).stream_async(PROMPTS["abandoned"])
            async for event in events:
                if "data" in event:
                    return event["data"]
            return None

        return run(work())

    def responses(self, url):
        return ask(make("writer", model(url, OpenAIResponsesModel)), PROMPTS["responses"])

    def responses_streaming(self, url):
        return run(stream(make("writer", model(url, OpenAIResponsesModel)), PROMPTS["responses_streaming"]))

    def choices(self, url):
        return ask(make("writer", model(url, params={"n": 2})), PROMPTS["choices"])

    def heard_by_a_callback_handler(self, url):
        seen = []
        for given in (url, Told()):
            ask(make("caller", given, add, callback_handler=lambda **event: seen.append(sorted(event))), ADD)
        return seen

    def heard_by_hooks(self, url):
        seen = []
        for given in (url, Told()):
            heard = make("caller", given, add)
            for event in EVENTS:
                heard.hooks.add_callback(event, lambda event: seen.append(type(event).__name__))
            ask(heard, ADD)
        return seen


class Told(Model):
    """A model that is reached without a client."""

    def update_config(self, **config):
        pass

    def get_config(self):
        return {"model_id": "told"}

    async def structured_output(self, output_model, prompt, system_prompt=None, **kwargs):
        yield {"output": output_model(text="done")}

    async def stream(self, messages, tool_specs=None, system_prompt=None, **kwargs):
        parts = messages[-1]["content"]
        if parts[0].get("text") == "fail":
            raise ConnectionError("gone")
        yield {"messageStart": {"role": "assistant"}}
        if tool_specs and not any("toolResult" in part for part in parts):
            yield {"contentBlockStart": {"start": {"toolUse": {"name": "add", "toolUseId": "call-1"}}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": '{"a": 2, '}}}}
            yield {"contentBlockDelta": {"delta": {"toolUse": {"input": '"b": 3}'}}}}
            yield {"contentBlockStop": {}}
            yield {"messageStop": {"stopReason": "tool_use"}}
            return
        yield {"contentBlockStart": {"start": {}}}
        for piece in ("it ", "is 5"):
            yield {"contentBlockDelta": {"delta": {"text": piece}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "end_turn"}}
        usage = {"inputTokens": 3, "outputTokens": 2, "totalTokens": 5}
        yield {"metadata": {"usage": usage, "metrics": {"latencyMs": 1}}}


WAYS = {
    "call": ask,
    "invoke_async": lambda agent, prompt: run(aask(agent, prompt)),
    "stream_async": lambda agent, prompt: run(stream(agent, prompt)),
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


def test_a_graph_is_one_trace_and_its_nodes_are_the_agents(found_of):
    def program(url):
        builder = GraphBuilder()
        for name in ("writer", "critic"):
            builder.add_node(make(name, url), name)
        builder.add_edge("writer", "critic")
        return str(builder.build()("hello").status)

    found = found_of(program)
    assert [chat.agent for chat in found.chats] == ["writer", "critic"]
    (root,) = [span for span in found.spans if span.parent_id is None]
    assert (root.operation, root.name, root.status) == (names.INVOKE_WORKFLOW, "Graph", "ok")


def test_a_swarm_is_one_trace_and_hands_over_by_a_tool(found_of):
    def script(body, seen):
        if agent_of(body) == "boss" and body["messages"][-1]["role"] == "user":
            arguments = '{"agent_name": "writer", "message": "write"}'
            return Reply(tool_calls=[ScriptedToolCall("handoff_to_agent", arguments)])
        return Reply("done")

    def program(url):
        with ScriptedServer(script) as server:
            return str(Swarm([make("boss", server.url), make("writer", server.url)])("hello").status)

    found = found_of(program)
    assert {chat.agent for chat in found.chats} == {"boss", "writer"}
    assert [(tool.name, tool.agent, tool.status) for tool in found.tools] == [("handoff_to_agent", "boss", "ok")]
    (root,) = [span for span in found.spans if span.parent_id is None]
    assert (root.operation, root.name) == (names.INVOKE_WORKFLOW, "Swarm")


def test_a_handoff_to_an_agent_that_is_not_there_is_an_error_and_hands_over_to_nobody(found_of):
    def script(body, seen):
        if body["messages"][-1]["role"] == "user":
            arguments = '{"agent_name": "nobody", "message": "write"}'
            return Reply(tool_calls=[ScriptedToolCall("handoff_to_agent", arguments)])
        return Reply("done")

    def program(url):
        with ScriptedServer(script) as server:
            return str(Swarm([make("boss", server.url), make("writer", server.url)])("hello").status)

    (tool,) = found_of(program).tools
    assert (tool.name, tool.status) == ("handoff_to_agent", "error")
    assert names.HANDOFF not in tool.attributes


def test_a_tool_that_does_not_exist_is_an_error(found_of):
    found = found_of(lambda url: ask(make("caller", url, add), 'call multiply {"a": 2}'))
    (tool,) = found.tools
    assert (tool.name, tool.agent, tool.status) == ("multiply", "caller", "error")
    assert "multiply" in tool.status_message
    assert json.loads(tool.attributes[names.TOOL_ARGUMENTS]) == {"a": 2}


def test_arguments_that_do_not_fit_are_an_error(found_of):
    (tool,) = found_of(lambda url: ask(make("caller", url, add), 'call add {"a": "one", "b": 2}')).tools
    assert (tool.name, tool.status) == ("add", "error")
    assert tool.status_message


def test_a_model_reached_elsewhere_is_one_chat_span(found_of):
    found = found_of(lambda url: ask(make("writer", Told(), add), "hello"))
    assert found.output == "it is 5"
    assert [(chat.agent, chat.status) for chat in found.chats] == [("writer", "ok")] * 2
    first, second = found.chats
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


def test_a_model_reached_elsewhere_that_fails_is_an_error(found_of):
    def program(url):
        with pytest.raises(Exception, match="gone"):
            ask(make("writer", Told()), "fail")

    (chat,) = found_of(program).chats
    assert (chat.status, chat.status_message, chat.agent) == ("error", "gone", "writer")


def test_a_provider_of_litellms_own_is_one_chat_span_with_its_agent(found_of):
    litellm = pytest.importorskip("strands.models.litellm", exc_type=ImportError)

    def program(url):
        given = litellm.LiteLLMModel(client_args={"api_base": url}, model_id=f"hosted_vllm/{MODEL}")
        return ask(make("caller", given, add), PROMPTS["tool_call"])

    found = found_of(program)
    assert len(found.requests) == len(found.chats) == 2
    assert [chat.agent for chat in found.chats] == ["caller"] * 2


def test_only_the_attempts_own_agent_is_rerouted_from_inside_a_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    with ScriptedServer() as origin, ScriptedServer() as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",))

        @strands.tool
        def consult() -> str:
            """Consult."""
            return ask(make("writer", origin.url), "hello")

        with lightning_strands.attach(store=str(tmp_path / "traces.db")) as attachment, use_attempt(attempt):
            ask(make("boss", origin.url, consult), "call consult {}")
            attachment.flush(60)
        assert {agent_of(request.body) for request in policy.requests} == {"writer"}
        assert {agent_of(request.body) for request in origin.requests} == {"boss"}
        assert len({span_of(request) for request in [*policy.requests, *origin.requests]}) == 3


def test_detaching_ends_what_is_open(operations_until_stopped):
    operations = operations_until_stopped(
        lambda url, stop: ask(make("caller", url, strands.tool(stop)), "call stop {}")
    )
    assert operations == ["chat", "execute_tool", "invoke_agent"]
