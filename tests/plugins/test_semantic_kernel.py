from __future__ import annotations

import asyncio
import random

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("semantic_kernel")

from semantic_kernel import Kernel
from semantic_kernel.agents import (
    AgentGroupChat,
    ChatCompletionAgent,
    ConcurrentOrchestration,
    HandoffOrchestration,
    OpenAIResponsesAgent,
    OrchestrationHandoffs,
    SequentialOrchestration,
)
from semantic_kernel.agents.orchestration.orchestration_base import OrchestrationBase, OrchestrationResult
from semantic_kernel.agents.runtime import InProcessRuntime
from semantic_kernel.agents.strategies import DefaultTerminationStrategy
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.filters import FilterTypes
from semantic_kernel.filters.kernel_filters_extension import KernelFilterExtension
from semantic_kernel.functions import (
    KernelFunctionFromMethod,
    KernelFunctionFromPrompt,
    KernelPlugin,
    kernel_function,
)

import lightning_semantic_kernel
from lightning_conformance.plugins.programs import AgentPrograms, add
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    PluginConformance,
    instructions,
)
from lightning_spans.record.tracing.tracers import TRACERS
from lightning_spans.schema import spans as names


def service(url, **options):
    return OpenAIChatCompletion(MODEL, async_client=openai.AsyncOpenAI(base_url=url, **options))


def make(name, url, *tools, more=None, **options):
    functions = [KernelFunctionFromMethod(method=kernel_function(one), plugin_name="tools") for one in tools]
    plugins = [KernelPlugin(name="tools", functions=functions)] if tools else []
    given = {"name": name, "instructions": instructions(name), "plugins": plugins, **(more or {})}
    return ChatCompletionAgent(service=service(url, **options), **given)


def responding(url):
    client = openai.AsyncOpenAI(base_url=url)
    return OpenAIResponsesAgent(
        ai_model_id=MODEL, client=client, name="writer", instructions=instructions("writer"), store_enabled=False
    )


async def answer(agent, prompt, **options):
    return str(await agent.get_response(prompt, **options))


async def pieces(agent, prompt):
    return [str(item) async for item in agent.invoke_stream(prompt)]


def ask(name, url, scenario, *tools, **options):
    return asyncio.run(answer(make(name, url, *tools, **options), PROMPTS[scenario]))


class TestConformance(AgentPrograms, PluginConformance):
    framework = "semantic-kernel"
    unsupported = {"choices": "an agent asks for one choice"}  # noqa: RUF012
    tracers = TRACERS  # it uses OpenTelemetry itself

    def patched(self):
        methods = [(ChatCompletionAgent, name) for name in ("get_response", "invoke", "invoke_stream")]
        tools = [(Kernel, "invoke_function_call"), (KernelFilterExtension, "construct_call_stack")]
        own = [(kind, "_invoke_internal") for kind in (KernelFunctionFromMethod, KernelFunctionFromPrompt)]
        return [*methods, *tools, *own, (OrchestrationBase, "invoke"), (OrchestrationResult, "get")]

    def make(self, name, url, *tools, **client):
        return make(name, url, *tools, **client)

    async def answer(self, agent, prompt):
        return await answer(agent, prompt)

    async def pieces(self, agent, prompt):
        return await pieces(agent, prompt)

    def responses(self, url):
        return asyncio.run(answer(responding(url), PROMPTS["responses"]))

    def responses_streaming(self, url):
        return asyncio.run(pieces(responding(url), PROMPTS["responses_streaming"]))

    def unnamed(self, url):
        async def work():
            random.seed(1)  # the name that Semantic Kernel invents is sent along
            with lightning_semantic_kernel.agent("writer"):
                unnamed = ChatCompletionAgent(service=service(url), instructions=instructions("writer"))
                return await answer(unnamed, PROMPTS["unnamed"])

        return asyncio.run(work())

    def namesakes(self, url):
        output = []
        for team in ("red", "blue"):
            with lightning_semantic_kernel.agent(team):
                output.append(ask("writer", url, "namesakes"))
        return output

    def abandoned(self, url):
        async def leave():
            async for piece in make("writer", url).invoke_stream(PROMPTS["abandoned"]):
                return str(piece)
            return None

        return asyncio.run(leave())

    def heard_by_filters_and_callbacks(self, url):
        seen = []

        def hears(kind):
            async def hear(context, next):  # noqa: A002 - Semantic Kernel passes it by this name
                seen.append(f"{kind.value} of {context.function.name} begins")
                await next(context)
                seen.append(f"{kind.value} of {context.function.name} ends")

            return hear

        async def hear_message(message):
            seen.append(f"message of {message.role.value}")

        async def work():
            caller = make("caller", url, add)
            for kind in (FilterTypes.AUTO_FUNCTION_INVOCATION, FilterTypes.FUNCTION_INVOCATION):
                caller.kernel.add_filter(kind, hears(kind))
            for invoke in (caller.invoke, caller.invoke_stream):
                seen.extend(
                    [str(item) async for item in invoke(PROMPTS["tool_call"], on_intermediate_message=hear_message)]
                )

        asyncio.run(work())
        return seen


@pytest.mark.parametrize("kind", [SequentialOrchestration, ConcurrentOrchestration])
def test_agents_of_an_orchestration_are_one_trace(kind, found_of):
    async def work(url):
        runtime = InProcessRuntime()
        runtime.start()
        result = await kind(members=[make(name, url) for name in ("writer", "checker")]).invoke("hello", runtime)
        await result.get()
        await runtime.stop_when_idle()

    found = found_of(work).spans
    assert sorted(span.agent for span in found if span.operation == names.CHAT) == ["checker", "writer"]
    assert len({span.trace_id for span in found}) == 1
    roots = [(span.operation, span.name, span.status) for span in found if span.parent_id is None]
    assert roots == [(names.INVOKE_WORKFLOW, kind.__name__, "ok")]


def test_agents_that_hand_over_are_one_trace(found_of):
    async def work(url):
        members = [make(name, url) for name in ("boss", "writer")]
        handoffs = OrchestrationHandoffs().add("boss", "writer", "for words")
        runtime = InProcessRuntime()
        runtime.start()
        result = await HandoffOrchestration(members=members, handoffs=handoffs).invoke(
            "call Handoff-transfer_to_writer {}", runtime
        )
        await result.get(timeout=30)
        await runtime.stop_when_idle()

    found = found_of(work).spans
    assert {"boss", "writer"} <= {span.agent for span in found if span.operation == names.CHAT}
    assert len({span.trace_id for span in found}) == 1


def test_a_group_chat_is_one_trace(found_of):
    async def work(url):
        members = [make(name, url) for name in ("writer", "checker")]
        chat = AgentGroupChat(agents=members, termination_strategy=DefaultTerminationStrategy(maximum_iterations=2))
        await chat.add_chat_message("hello")
        async for _ in chat.invoke():
            pass

    found = found_of(work).spans
    assert [span.agent for span in found if span.operation == names.CHAT] == ["writer", "checker"]
    assert [span.name for span in found if span.parent_id is None] == ["AgentGroupChat"]


def test_an_agent_as_a_function_is_below_the_call(found_of):
    async def work(url):
        boss = make("boss", url, more={"plugins": [make("writer", url)]})
        await answer(boss, 'call writer-writer {"messages": "hello"}')

    found = found_of(work).spans
    assert {span.attributes[names.AGENT_PATH] for span in found if span.operation == names.INVOKE_AGENT} == {
        "boss",
        "boss/writer",
    }
