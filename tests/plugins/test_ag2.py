from __future__ import annotations

import asyncio
import json

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("ag2")

from ag2 import Agent, MemoryStream, TaskConfig, ToolResult
from ag2.config import OpenAIConfig, OpenAIResponsesConfig
from ag2.events import ModelMessageChunk
from ag2.middleware import BaseMiddleware, Middleware
from ag2.tools import executor
from ag2.tools.final import FunctionTool

import lightning_ag2
from lightning_conformance.plugins.programs import AgentPrograms, add
from lightning_conformance.plugins.replayed import run_twice
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    PluginConformance,
    instructions,
)
from lightning_spans.schema import spans as names


def make(name, url, *tools, kind=OpenAIConfig, middleware=(), tasks=None, **options):
    config = kind(model=MODEL, base_url=url, **options)
    return Agent(name, instructions(name), config=config, tools=tools, middleware=middleware, tasks=tasks)


async def answer(agent, prompt, **options):
    return (await agent.ask(prompt, **options)).body


async def pieces(agent, prompt):
    found, stream = [], MemoryStream()
    stream.where(ModelMessageChunk).subscribe(lambda event: found.append(event.content), sync_to_thread=False)
    return [*found, await answer(agent, prompt, stream=stream)]


def ask(name, url, scenario, *tools, **options):
    return asyncio.run(answer(make(name, url, *tools, **options), PROMPTS[scenario]))


class TestConformance(AgentPrograms, PluginConformance):
    framework = "ag2"
    unsupported = {  # noqa: RUF012
        "abandoned": "AG2 reads a model's stream to its end, whoever listens",
        "unnamed": "an agent must have a name",
    }

    def patched(self):
        return [(Agent, "_turn_scope"), (executor, "_execute_call"), (FunctionTool, "__call__")]

    def make(self, name, url, *tools, **client):
        return make(name, url, *tools, **client)

    async def answer(self, agent, prompt):
        return await answer(agent, prompt)

    def streaming(self, url):
        return asyncio.run(pieces(make("writer", url, streaming=True), PROMPTS["streaming"]))

    def cut(self, url):
        writer = make("writer", url, streaming=True)
        return self.error_of(lambda: asyncio.run(pieces(writer, PROMPTS["cut"])))

    def responses(self, url):
        return ask("writer", url, "responses", kind=OpenAIResponsesConfig)

    def responses_streaming(self, url):
        return asyncio.run(
            pieces(make("writer", url, kind=OpenAIResponsesConfig, streaming=True), PROMPTS["responses_streaming"])
        )

    def namesakes(self, url):
        output = []
        for team in ("red", "blue"):
            with lightning_ag2.agent(team):
                output.append(ask("writer", url, "namesakes"))
        return output

    def choices(self, url):
        return ask("writer", url, "choices", n=2)

    def unreadable_arguments(self, url):
        with pytest.raises(json.JSONDecodeError) as error:  # when AG2 sends the call back to the model
            ask("caller", url, "unreadable_arguments", add)
        return str(error.value)

    def heard_by_middleware_and_subscribers(self, url):
        seen = []

        class Hears(BaseMiddleware):
            async def on_turn(self, call_next, event, context):
                seen.append(f"turn of {type(event).__name__}")
                return await call_next(event, context)

            async def on_llm_call(self, call_next, events, context):
                seen.append(f"call with {len(events)} events")
                return await call_next(events, context)

            async def on_tool_execution(self, call_next, event, context):
                seen.append(f"tool {event.name}")
                return await call_next(event, context)

        async def work(kind):
            stream = MemoryStream()
            stream.subscribe(lambda event: seen.append(type(event).__name__), sync_to_thread=False)
            caller = make("caller", url, add, kind=kind, middleware=[Middleware(Hears)])
            await answer(caller, PROMPTS["tool_call"], stream=stream)

        for kind in (OpenAIConfig, OpenAIResponsesConfig):
            asyncio.run(work(kind))
        return seen


def test_an_agent_as_a_tool_and_a_subtask_are_below_it(found_of):
    async def work(url):
        writer = make("writer", url).as_tool(description="Writes.")
        await answer(make("boss", url, writer), 'call task_writer {"objective": "write"}')
        await answer(make("lead", url, tasks=TaskConfig(prompt=instructions("part"))), 'call run_subtask {"task": "a"}')

    found = found_of(work).spans
    paths = {span.attributes[names.AGENT_PATH] for span in found if span.operation == names.INVOKE_AGENT}
    assert paths == {"boss", "boss/writer", "lead", "lead/subtask"}
    assert {span.agent for span in found if span.operation == names.CHAT} == {"boss", "writer", "lead", "subtask"}


def test_a_turn_that_is_watched_while_it_runs_is_one_span(found_of):
    async def work(url):
        async with make("writer", url).run("hello") as turn:
            turn.start()
            await turn.result()

    assert [(span.operation, span.agent) for span in found_of(work).spans] == [
        ("invoke_agent", "writer"),
        ("chat", "writer"),
    ]


@pytest.mark.parametrize("returned", [{"sum": 5}, [1, "two"], ToolResult("five", {"sum": 5}), None])
def test_what_a_tool_returned_is_given_again(returned, tmp_path):
    def look(question: str) -> object:
        return returned

    def program(url):
        return asyncio.run(answer(make("caller", url, look), 'call look {"question": "how many"}'))

    (recorded, replayed), _ = run_twice(program, tmp_path, "ag2")
    assert replayed == recorded
