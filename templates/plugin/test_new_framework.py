from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

openai = pytest.importorskip("openai")

import lightning_new_framework
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    REPLAY_PROMPTS,
    TIMEOUT_S,
    PluginConformance,
    instructions,
    noted,
)
from lightning_new_framework.example import Agent


def make(name, url, *tools, **options):
    """Write this in your framework first: most programs below use it."""
    return Agent(name, instructions(name), openai.AsyncOpenAI(base_url=url, **options), MODEL, tools)


def ask(name, url, scenario, *tools, **options):
    return asyncio.run(make(name, url, *tools, **options).run(PROMPTS[scenario]))


async def ask_all(names, url, scenario):
    return await asyncio.gather(*(make(name, url).run(PROMPTS[scenario]) for name in names))


def add(a: int, b: int) -> int:
    return a + b


def fail(reason: str) -> str:
    raise ValueError(reason)


def note(text: str) -> str:
    return noted(text)


class TestConformance(PluginConformance):
    """The conformance kit's programs in this framework. `program.SCENARIOS` and `replayed.REPLAYS` describe each."""

    framework = "new-framework"
    unsupported = dict.fromkeys(["responses", "responses_streaming"], "the example speaks chat completions alone") | {
        "unnamed": "an agent must have a name"
    }

    def patched(self):
        return [(Agent, name) for name in ("run", "stream", "call_tool")]

    def one_agent(self, url):
        return ask("writer", url, "one_agent")

    def several_agents(self, url):
        return [ask(name, url, "several_agents") for name in ("writer", "rewriter", "writer_2")]

    def namesakes(self, url):
        output = []
        for team in ("red", "blue"):
            with lightning_new_framework.agent(team):  # if the framework has teams, write two of those
                output.append(ask("writer", url, "namesakes"))
        return output

    def streaming(self, url):
        async def read():
            return [piece async for piece in make("writer", url).stream(PROMPTS["streaming"])]

        return asyncio.run(read())

    def abandoned(self, url):
        async def leave():
            async for piece in make("writer", url).stream(PROMPTS["abandoned"]):
                return piece
            return None

        return asyncio.run(leave())

    def choices(self, url):
        agent = make("writer", url)
        agent.request_options["n"] = 2
        return asyncio.run(agent.run(PROMPTS["choices"]))

    def tool_call(self, url):
        return ask("caller", url, "tool_call", add)

    def parallel_tools(self, url):
        return ask("caller", url, "parallel_tools", add)

    def tool_error(self, url):
        return ask("caller", url, "tool_error", fail)

    def unknown_tool(self, url):
        return ask("caller", url, "unknown_tool", add)

    def unreadable_arguments(self, url):
        return ask("caller", url, "unreadable_arguments", add)

    def nested(self, url):
        async def ask(question):
            return await make("writer", url).run(question)

        return asyncio.run(make("boss", url, ask).run(PROMPTS["nested"]))

    def parallel(self, url):
        return asyncio.run(ask_all(["left", "right"], url, "parallel"))

    async def asynchronous(self, url):
        return await ask_all(["writer", "rewriter"], url, "asynchronous")

    async def awaited(self, url):
        return await make("writer", url).run(PROMPTS["awaited"])

    def threads(self, url):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda number: asyncio.run(make("writer", url).run(f"hello {number}")), range(2)))

    def retried(self, url):
        return ask("writer", url, "retried")

    def failed(self, url):
        with pytest.raises(openai.InternalServerError) as error:
            ask("writer", url, "failed", max_retries=0)
        return str(error.value)

    def slow(self, url):
        with pytest.raises(openai.APITimeoutError) as error:
            ask("writer", url, "slow", max_retries=0, timeout=TIMEOUT_S)
        return str(error.value)

    def cut(self, url):
        async def read():
            return [piece async for piece in make("writer", url).stream(PROMPTS["cut"])]

        with pytest.raises(Exception) as error:  # noqa: PT011 - which one depends on the client's version
            asyncio.run(read())
        return type(error.value).__name__

    def heard_by_observers(self, url):
        seen = []
        agent = make("writer", url)
        agent.observers.append(seen.append)
        return [asyncio.run(agent.run(PROMPTS["one_agent"])), seen]

    def effects(self, url):
        return asyncio.run(make("caller", url, note).run(REPLAY_PROMPTS["effects"]))

    def effect_fails(self, url):
        return asyncio.run(make("caller", url, note).run(REPLAY_PROMPTS["effect_fails"]))

    async def effects_awaited(self, url):
        async def note(text: str) -> str:
            return noted(text)

        return await make("caller", url, note).run(REPLAY_PROMPTS["effects_awaited"])
