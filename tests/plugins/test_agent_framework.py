from __future__ import annotations

import asyncio

import pytest

openai = pytest.importorskip("openai")
framework = pytest.importorskip("agent_framework")
orchestrations = pytest.importorskip("agent_framework.orchestrations")

from agent_framework import Agent, FunctionTool, _tools, tool
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient

import lightning_agent_framework
from lightning_conformance.plugins.programs import AgentPrograms, add
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    PluginConformance,
    instructions,
)


def make(name, url, *tools, **options):
    kind = options.pop("kind", OpenAIChatCompletionClient)
    client = kind(model=MODEL, async_client=openai.AsyncOpenAI(base_url=url, **options))
    return Agent(
        client, instructions(name), name=name, tools=[tool(one, approval_mode="never_require") for one in tools] or None
    )


async def answer(agent, prompt, **options):
    return (await agent.run(prompt, **options)).text


async def pieces(agent, prompt):
    return [update.text async for update in agent.run(prompt, stream=True)]


def ask(name, url, scenario, *tools, **options):
    return asyncio.run(answer(make(name, url, *tools, **options), PROMPTS[scenario]))


class TestConformance(AgentPrograms, PluginConformance):
    framework = "agent-framework"

    def patched(self):
        return [
            (Agent, "run"),
            (framework.RawAgent, "run"),
            (framework.Workflow, "run"),
            (_tools, "_execute_single_function_call"),
            (FunctionTool, "_invoke_function"),
        ]

    def make(self, name, url, *tools, **client):
        return make(name, url, *tools, **client)

    async def answer(self, agent, prompt):
        return await answer(agent, prompt)

    async def pieces(self, agent, prompt):
        return await pieces(agent, prompt)

    def responses(self, url):
        return ask("writer", url, "responses", kind=OpenAIChatClient)

    def responses_streaming(self, url):
        return asyncio.run(pieces(make("writer", url, kind=OpenAIChatClient), PROMPTS["responses_streaming"]))

    def unnamed(self, url):
        async def work():
            client = OpenAIChatCompletionClient(model=MODEL, async_client=openai.AsyncOpenAI(base_url=url))
            with lightning_agent_framework.agent("writer"):
                return await answer(Agent(client, instructions("writer")), PROMPTS["unnamed"])

        return asyncio.run(work())

    def namesakes(self, url):
        output = []
        for team in ("red", "blue"):
            with lightning_agent_framework.agent(team):
                output.append(ask("writer", url, "namesakes"))
        return output

    def abandoned(self, url):
        async def leave():
            async for piece in make("writer", url).run(PROMPTS["abandoned"], stream=True):
                return piece.text
            return None

        return asyncio.run(leave())

    def choices(self, url):
        return asyncio.run(answer(make("writer", url), PROMPTS["choices"], options={"n": 2}))

    def heard_by_middleware(self, url):
        seen = []

        def hears(kind):
            async def hear(context, call_next):
                seen.append(f"{kind.__name__} begins")
                await call_next()
                seen.append(f"{kind.__name__} ends with {type(context.result).__name__}")

            return kind(hear)

        kinds = (framework.agent_middleware, framework.chat_middleware, framework.function_middleware)
        for kind in (OpenAIChatClient, OpenAIChatCompletionClient):
            caller = make("caller", url, add, kind=kind)
            asyncio.run(answer(caller, PROMPTS["tool_call"], middleware=[hears(one) for one in kinds]))
        return seen


def test_an_agent_without_middleware_is_an_agent_too(found_of):
    async def work(url):
        client = OpenAIChatCompletionClient(model=MODEL, async_client=openai.AsyncOpenAI(base_url=url))
        await answer(framework.RawAgent(client, instructions("raw"), name="raw"), "hello")

    found = found_of(work).spans
    assert sorted((span.operation, span.agent) for span in found) == [("chat", "raw"), ("invoke_agent", "raw")]


def test_agents_of_a_workflow_are_one_trace(found_of):
    async def work(url):
        team = [make(name, url) for name in ("writer", "checker")]
        await orchestrations.SequentialBuilder(participants=team).build().run("hello")

    found = found_of(work).spans
    assert sorted(span.agent for span in found if span.operation == "chat") == ["checker", "writer"]
    assert len({span.trace_id for span in found}) == 1
    [run] = [span for span in found if span.parent_id is None]
    assert run.operation == "invoke_workflow"


def test_the_name_of_an_unnamed_workflow_is_the_same_in_every_run(found_of):
    async def work(url):
        await framework.WorkflowBuilder(start_executor=make("writer", url)).build().run("hello")

    assert [span.name for span in found_of(work).spans if span.operation == "invoke_workflow"] == ["WorkflowBuilder"]


def test_an_approved_tool_call_is_one_span(found_of):
    async def work(url):
        client = OpenAIChatCompletionClient(model=MODEL, async_client=openai.AsyncOpenAI(base_url=url))
        caller = Agent(client, instructions("caller"), name="caller", tools=[tool(add, approval_mode="always_require")])
        for approved in (True, False):
            session = caller.create_session()  # newer versions run a tool only if the session holds the request
            waiting = await caller.run(PROMPTS["tool_call"], session=session)
            [request] = [one for message in waiting.messages for one in message.contents if "approval" in one.type]
            decision = framework.Message("user", [request.to_function_approval_response(approved)])
            await caller.run(decision, session=session)

    [ran] = [span for span in found_of(work).spans if span.operation == "execute_tool"]
    assert (ran.agent, ran.status) == ("caller", "ok")


@pytest.mark.skipif(not hasattr(_tools, "_as_user_input_pause"), reason="older versions give the model an error")
def test_a_tool_that_the_program_carries_out_after_an_approval_has_no_span(found_of):
    async def work(url):
        client = OpenAIChatCompletionClient(model=MODEL, async_client=openai.AsyncOpenAI(base_url=url))
        schema = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}}
        declared = FunctionTool(name="add", description="Add.", input_model=schema, approval_mode="always_require")
        caller = Agent(client, instructions("caller"), name="caller", tools=[declared])
        session = caller.create_session()
        waiting = await caller.run(PROMPTS["tool_call"], session=session)
        [request] = [one for message in waiting.messages for one in message.contents if "approval" in one.type]
        decision = framework.Message("user", [request.to_function_approval_response(True)])
        left = await caller.run(decision, session=session)
        assert [one.type for message in left.messages for one in message.contents] == ["function_call"]

    assert [span for span in found_of(work).spans if span.operation == "execute_tool"] == []


def test_agents_that_hand_over_are_one_trace(found_of):
    async def work(url):
        boss, writer = make("boss", url), make("writer", url)
        for agent in (boss, writer):
            agent.require_per_service_call_history_persistence = True  # newer versions of HandoffBuilder require this
        team = orchestrations.HandoffBuilder(participants=[boss, writer]).with_start_agent(boss)
        async for _ in team.add_handoff(boss, [writer]).build().run("call handoff_to_writer {}", stream=True):
            pass

    found = found_of(work).spans
    assert [span.agent for span in found if span.operation == "chat"] == ["boss", "writer"]
    assert [span.name for span in found if span.operation == "execute_tool"] == ["handoff_to_writer"]
    assert len({span.trace_id for span in found}) == 1
