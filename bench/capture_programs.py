"""One agent that makes one model call, in each framework: the programs of `bench_capture`, and who else records them.

The model answers inside the process, at the HTTP transport, so that nothing is measured but the program itself.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from records import SYSTEM

URL = "http://model.invalid/v1"
QUESTION = "What is 12 + 7?"
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
TOOL = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "Evaluate.", "parameters": TOOL}}]
REPLY = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1_790_000_000,
    "model": "gpt-4o-mini",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Answer: 19. " * 20}}
    ],
    "usage": {"prompt_tokens": 120, "completion_tokens": 60, "total_tokens": 180},
}
EVENTS = [
    {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_790_000_000,
        "model": "gpt-4o-mini",
        "choices": [{"index": 0, "delta": {"content": f"word{number} "}, "finish_reason": None}],
    }
    for number in range(19)
]
EVENTS.append({**EVENTS[0], "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
STREAM = [f"data: {json.dumps(event)}\n\n".encode() for event in EVENTS] + [b"data: [DONE]\n\n"]


def calculator(expression: str) -> str:
    """Evaluate an expression."""
    return expression


def answer_here() -> None:
    """Answer requests to `URL` in this process: openai before 3 uses httpx, later httpx2."""
    import openai

    library = importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.split(".")[0])

    class Events(library.SyncByteStream, library.AsyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            return iter(STREAM)

        async def __aiter__(self) -> AsyncIterator[bytes]:
            for event in STREAM:
                yield event

    def answer(request: Any) -> Any:
        if b'"stream":true' in request.content:
            return library.Response(200, headers={"content-type": "text/event-stream"}, stream=Events())
        return library.Response(200, json=REPLY)

    over_network = library.HTTPTransport.handle_request

    def handle_request(self: Any, request: Any) -> Any:
        return answer(request) if request.url.host == "model.invalid" else over_network(self, request)

    async def handle_async_request(self: Any, request: Any) -> Any:
        return answer(request)

    library.HTTPTransport.handle_request = handle_request
    library.AsyncHTTPTransport.handle_async_request = handle_async_request


def openai_client(*, stream: bool) -> Callable[[], object]:
    import openai

    completions = openai.OpenAI(base_url=URL, api_key="none").chat.completions
    body: dict[str, Any] = {"model": "gpt-4o-mini", "messages": MESSAGES, "tools": TOOLS, "temperature": 1.0}
    if stream:
        return lambda: list(completions.create(**body, stream=True))
    return lambda: completions.create(**body)


def langchain(*, stream: bool) -> Callable[[], object]:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="gpt-4o-mini", base_url=URL, api_key="none")
    agent = create_agent(model, [calculator], system_prompt=SYSTEM, name="caller")
    asked: Any = {"messages": [{"role": "user", "content": QUESTION}]}
    if stream:
        return lambda: list(agent.stream(asked, stream_mode="messages"))
    return lambda: agent.invoke(asked)


def openai_agents(*, stream: bool) -> Callable[[], object]:
    import agents
    import openai

    agents.set_trace_processors([])  # else it sends its traces to OpenAI
    client = openai.AsyncOpenAI(base_url=URL, api_key="none")
    model = agents.OpenAIChatCompletionsModel("gpt-4o-mini", client)
    agent = agents.Agent(name="caller", instructions=SYSTEM, model=model, tools=[agents.function_tool(calculator)])

    async def streamed() -> list[object]:
        return [event async for event in agents.Runner.run_streamed(agent, QUESTION).stream_events()]

    return _in_loop(streamed if stream else lambda: agents.Runner.run(agent, QUESTION))


def autogen(*, stream: bool) -> Callable[[], object]:
    import logging

    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    logging.getLogger("autogen_core").setLevel(logging.WARNING)
    client = OpenAIChatCompletionClient(model="gpt-4o-mini", base_url=URL, api_key="none")

    def agent() -> AssistantAgent:  # a new one each time: it remembers what was said
        return AssistantAgent("caller", client, system_message=SYSTEM, tools=[calculator], model_client_stream=stream)

    async def streamed() -> list[object]:
        return [event async for event in agent().run_stream(task=QUESTION)]

    return _in_loop(streamed if stream else lambda: agent().run(task=QUESTION))


def crewai(*, stream: bool) -> Callable[[], object]:
    os.environ |= {f"CREWAI_{name}": "true" for name in ("DISABLE_TELEMETRY", "DISABLE_TRACKING", "TESTING")}
    from crewai import LLM, Agent

    llm = LLM(model="gpt-4o-mini", provider="openai", base_url=URL, api_key="none", stream=stream)
    agent = Agent(role="caller", goal="to add", backstory=SYSTEM, llm=llm)
    # The call alone: an agent's kickoff takes 12 ms of its own, in which 100 µs are lost.
    return lambda: llm.call(MESSAGES, tools=TOOLS, from_agent=agent)


def _in_loop(work: Callable[[], Any]) -> Callable[[], object]:
    loop = asyncio.new_event_loop()
    return lambda: loop.run_until_complete(work())


PROGRAMS = {
    "openai": openai_client,
    "langchain": langchain,
    "openai-agents": openai_agents,
    "autogen": autogen,
    "crewai": crewai,
}
# OpenInference's instrumentor for CrewAI leaves the model calls to that of the client.
OPENINFERENCE = {
    "openai": ["openai.OpenAIInstrumentor"],
    "langchain": ["langchain.LangChainInstrumentor"],
    "openai-agents": ["openai_agents.OpenAIAgentsInstrumentor"],
    "autogen": ["autogen_agentchat.AutogenAgentChatInstrumentor"],
    "crewai": ["crewai.CrewAIInstrumentor", "openai.OpenAIInstrumentor"],
}
