from __future__ import annotations

import asyncio

import pytest

openai = pytest.importorskip("openai")

import lightning_new_framework
from lightning_conformance.plugins.programs import AgentPrograms
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    PluginConformance,
    instructions,
)
from lightning_new_framework.example import Agent


class TestConformance(AgentPrograms, PluginConformance):
    """The conformance kit's programs in this framework. `program.SCENARIOS` and `replayed.REPLAYS` describe each."""

    framework = "new-framework"
    unsupported = dict.fromkeys(["responses", "responses_streaming"], "the example speaks chat completions alone") | {
        "unnamed": "an agent must have a name"
    }

    def patched(self):
        return [(Agent, name) for name in ("run", "stream", "call_tool")]

    def make(self, name, url, *tools, **client):
        """Write this, `answer` and `pieces` in your framework first: most programs use them."""
        return Agent(name, instructions(name), openai.AsyncOpenAI(base_url=url, **client), MODEL, tools)

    async def answer(self, agent, prompt):
        return await agent.run(prompt)

    async def pieces(self, agent, prompt):
        return [piece async for piece in agent.stream(prompt)]

    def namesakes(self, url):
        output = []
        for team in ("red", "blue"):
            with lightning_new_framework.agent(team):  # if the framework has teams, write two of those
                output.append(self.ask(self.make("writer", url), PROMPTS["namesakes"]))
        return output

    def abandoned(self, url):
        async def leave():
            async for piece in self.make("writer", url).stream(PROMPTS["abandoned"]):
                return piece
            return None

        return asyncio.run(leave())

    def choices(self, url):
        agent = self.make("writer", url)
        agent.request_options["n"] = 2
        return asyncio.run(agent.run(PROMPTS["choices"]))

    def heard_by_observers(self, url):
        seen = []
        agent = self.make("writer", url)
        agent.observers.append(seen.append)
        return [asyncio.run(agent.run(PROMPTS["one_agent"])), seen]
