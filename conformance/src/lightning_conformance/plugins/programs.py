"""The programs that are the same in most frameworks, written once over the methods that make and call an agent.

```python
class TestMine(AgentPrograms, PluginConformance):
    framework = "mine"

    def make(self, name, url, *tools, **client):
        return mine.Agent(name, instructions(name), mine.Model(MODEL, base_url=url, **client), tools)

    async def answer(self, agent, prompt):
        return await agent.run(prompt)

    async def pieces(self, agent, prompt):
        return [piece async for piece in agent.stream(prompt)]
```
Where your framework differs, write the program of that scenario yourself: it takes the place of the one here. If a tool
of your framework can't be a coroutine function, set `coroutine_tools = False`, override `ask` and `stream` with the
synchronous calls, and list `effects_awaited` in `unsupported`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lightning_conformance.plugins.program import PROMPTS, TIMEOUT_S
from lightning_conformance.plugins.replayed import REPLAY_PROMPTS, write_note


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def fail(reason: str) -> str:
    """Fail.

    Args:
        reason: why.
    """
    raise ValueError(reason)


def note(text: str) -> str:
    """Note a text.

    Args:
        text: what.
    """
    return write_note(text)


class AgentPrograms:
    """Programs of the scenarios, over the methods `make`, `answer` and `pieces` of your class.

    An agent with tools is given plain functions, which `tool` turns into what the framework takes.

    Attributes:
        coroutine_tools: whether a tool may be a coroutine function. If not, `nested` gives the agent a plain function,
            which calls the other agent through `ask`.
    """

    coroutine_tools = True

    def make(self, name: str, url: str, *tools: Any, **client: Any) -> Any:
        """Return an agent with the kit's instructions.

        Args:
            name: of the agent.
            url: of its model.
            tools: that it has.
            client: options of the openai client, ``max_retries`` and ``timeout`` among them.
        """
        raise NotImplementedError

    async def answer(self, agent: Any, prompt: str) -> Any:
        """Return what an agent answers."""
        raise NotImplementedError

    async def pieces(self, agent: Any, prompt: str) -> list[Any]:
        """Return what an agent streams."""
        raise NotImplementedError

    def ask(self, agent: Any, prompt: str) -> Any:
        """Return what an agent answers. Override it if the framework has a synchronous call."""
        return asyncio.run(self.answer(agent, prompt))

    def stream(self, agent: Any, prompt: str) -> list[Any]:
        """Return what an agent streams. Override it likewise."""
        return asyncio.run(self.pieces(agent, prompt))

    def tool(self, function: Callable[..., Any]) -> Any:
        """Return a function as a tool of the framework."""
        return function

    def error_of(self, work: Callable[[], object]) -> str:
        """Return how a program sees the error of its model. Override it if the framework does not raise."""
        with pytest.raises(Exception) as error:  # noqa: PT011 - which one depends on the framework
            work()
        return type(error.value).__name__

    # With a writer

    def one_agent(self, url: str) -> Any:
        """One agent answers."""
        return self.ask(self.make("writer", url), PROMPTS["one_agent"])

    def several_agents(self, url: str) -> Any:
        """Three agents answer, one after the other."""
        return [
            self.ask(self.make(name, url), PROMPTS["several_agents"]) for name in ("writer", "rewriter", "writer_2")
        ]

    def streaming(self, url: str) -> Any:
        """An agent's answer is read piece by piece."""
        return self.stream(self.make("writer", url), PROMPTS["streaming"])

    def parallel(self, url: str) -> Any:
        """Two agents answer at once."""
        return asyncio.run(self._answers(["left", "right"], url, "parallel"))

    async def asynchronous(self, url: str) -> Any:
        """Two agents answer at once, in the caller's event loop."""
        return await self._answers(["writer", "rewriter"], url, "asynchronous")

    async def awaited(self, url: str) -> Any:
        """An agent answers, in the caller's event loop."""
        return await self.answer(self.make("writer", url), PROMPTS["awaited"])

    def threads(self, url: str) -> Any:
        """An agent answers in each of two threads."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda number: self.ask(self.make("writer", url), f"hello {number}"), range(2)))

    async def _answers(self, agents: list[str], url: str, scenario: str) -> list[Any]:
        return await asyncio.gather(*(self.answer(self.make(name, url), PROMPTS[scenario]) for name in agents))

    # With tools

    def tool_call(self, url: str) -> Any:
        """An agent calls a tool."""
        return self.ask(self._caller(url, add), PROMPTS["tool_call"])

    def parallel_tools(self, url: str) -> Any:
        """An agent calls a tool twice in one answer."""
        return self.ask(self._caller(url, add), PROMPTS["parallel_tools"])

    def tool_error(self, url: str) -> Any:
        """An agent calls a tool that raises."""
        return self.ask(self._caller(url, fail), PROMPTS["tool_error"])

    def unknown_tool(self, url: str) -> Any:
        """An agent calls a tool that it does not have."""
        return self.ask(self._caller(url, add), PROMPTS["unknown_tool"])

    def unreadable_arguments(self, url: str) -> Any:
        """An agent calls a tool with arguments that are not JSON."""
        return self.ask(self._caller(url, add), PROMPTS["unreadable_arguments"])

    def nested(self, url: str) -> Any:
        """An agent calls another one as a tool."""

        async def ask(question: str) -> str:
            """Ask the writer.

            Args:
                question: to ask.
            """
            return str(await self.answer(self.make("writer", url), question))

        def ask_now(question: str) -> str:
            return str(self.ask(self.make("writer", url), question))

        ask_now.__name__, ask_now.__doc__ = ask.__name__, ask.__doc__
        consult = ask if self.coroutine_tools else ask_now
        return self.ask(self.make("boss", url, self.tool(consult)), PROMPTS["nested"])

    def effects(self, url: str) -> Any:
        """A tool does something that must not happen twice."""
        return self.ask(self._caller(url, note), REPLAY_PROMPTS["effects"])

    def effect_fails(self, url: str) -> Any:
        """Such a tool raises."""
        return self.ask(self._caller(url, note), REPLAY_PROMPTS["effect_fails"])

    async def effects_awaited(self, url: str) -> Any:
        """Such a tool is a coroutine function."""

        async def note(text: str) -> str:
            """Note a text.

            Args:
                text: what.
            """
            return write_note(text)

        return await self.answer(self._caller(url, note), REPLAY_PROMPTS["effects_awaited"])

    def _caller(self, url: str, function: Callable[..., Any]) -> Any:
        return self.make("caller", url, self.tool(function))

    # With errors

    def retried(self, url: str) -> Any:
        """The client tries a failed call again."""
        return self.ask(self.make("writer", url), PROMPTS["retried"])

    def failed(self, url: str) -> Any:
        """The model fails."""
        return self.error_of(lambda: self.ask(self.make("writer", url, max_retries=0), PROMPTS["failed"]))

    def slow(self, url: str) -> Any:
        """The model is slower than the client's time-out."""
        agent = self.make("writer", url, max_retries=0, timeout=TIMEOUT_S)
        return self.error_of(lambda: self.ask(agent, PROMPTS["slow"]))

    def cut(self, url: str) -> Any:
        """The connection ends in the middle of a stream."""
        return self.error_of(lambda: self.stream(self.make("writer", url, max_retries=0), PROMPTS["cut"]))
