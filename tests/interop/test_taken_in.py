"""Spans of other instrumentors, sent to `lightning-rl server`, become transitions with the names of their agents."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Callable
from typing import Any

import pytest

from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.suite import MODEL, instructions
from lightning_spans import open_store
from lightning_spans.adapter.adapt import adapt
from lightning_spans.schema import spans as names
from lightning_spans.store.traces import traces_of

QUESTION = "Say something."


def plain(url: str) -> None:
    import openai

    for name in ("writer", "checker"):
        messages: Any = [{"role": "system", "content": instructions(name)}, {"role": "user", "content": QUESTION}]
        openai.OpenAI(base_url=url).chat.completions.create(model=MODEL, messages=messages, temperature=0.5)


def langchain(url: str) -> None:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    for name in ("writer", "checker"):
        agent = create_agent(ChatOpenAI(model=MODEL, base_url=url), [], system_prompt=instructions(name), name=name)
        agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})


def openai_agents(url: str) -> None:
    import agents
    import openai

    async def run() -> None:
        model = agents.OpenAIChatCompletionsModel(MODEL, openai.AsyncOpenAI(base_url=url))
        for name in ("writer", "checker"):
            await agents.Runner.run(agents.Agent(name, instructions=instructions(name), model=model), QUESTION)

    asyncio.run(run())


def autogen(url: str) -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    info = {"vision": False, "function_calling": True, "json_output": False, "family": "unknown"}

    async def run() -> None:
        client = OpenAIChatCompletionClient(model=MODEL, base_url=url, model_info={**info, "structured_output": False})
        agents = [AssistantAgent(name, client, system_message=instructions(name)) for name in ("writer", "checker")]
        await RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(3)).run(task=QUESTION)

    asyncio.run(run())


def crewai(url: str) -> None:
    from crewai import LLM, Agent, Crew, Task

    llm = LLM(model=MODEL, base_url=url, provider="openai")
    agents = [Agent(role=name, goal="to help", backstory=instructions(name), llm=llm) for name in ("writer", "checker")]
    tasks = [Task(description=QUESTION, expected_output="an answer", agent=agent) for agent in agents]
    Crew(agents=agents, tasks=tasks).kickoff()


OPENINFERENCE = "openinference.instrumentation."
OPENTELEMETRY = "opentelemetry.instrumentation."
NAMED = {"writer", "checker"}
CASES: dict[str, tuple[Callable[[str], None], list[str], set[str] | None]] = {  # program, instrumentors, agents told
    "OpenInference, openai": (plain, [OPENINFERENCE + "openai.OpenAIInstrumentor"], None),
    "OpenInference, LangChain": (langchain, [OPENINFERENCE + "langchain.LangChainInstrumentor"], NAMED),
    "OpenInference, Agents SDK": (
        openai_agents, [OPENINFERENCE + "openai_agents.OpenAIAgentsInstrumentor"], NAMED,
    ),
    "OpenInference, AutoGen": (autogen, [OPENINFERENCE + "autogen_agentchat.AutogenAgentChatInstrumentor"], NAMED),
    "OpenInference, CrewAI": (
        crewai, [OPENINFERENCE + "crewai.CrewAIInstrumentor", OPENINFERENCE + "openai.OpenAIInstrumentor"], NAMED,
    ),
    "OTel GenAI, openai-v2": (plain, [OPENTELEMETRY + "openai_v2.OpenAIInstrumentor"], None),
    "OpenLLMetry, openai": (plain, [OPENTELEMETRY + "openai.OpenAIInstrumentor"], None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_model_calls_become_transitions_with_the_agents_that_the_trace_names(case, lightning_server, monkeypatch):
    program, instrumentors, agents = CASES[case]
    url, key, store = lightning_server
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
    with ScriptedServer() as server:
        send_what_they_record(instrumentors, lambda: program(server.url), url, key)
        requests = server.requests
    kept = open_store(store)
    traces = traces_of(kept)
    kept.close()
    transitions = [transition for trace in traces for transition in adapt(trace)]
    assert len(transitions) == len(requests) >= 2
    assert {transition.agent for transition in transitions} == (agents or {None})
    if program is plain:
        assert {t.response_id for t in transitions} == {request.answer["id"] for request in requests}
    if "v2" in case:  # it sends what was said as log records, which are no traces
        return
    answers = {choice["message"]["content"] for request in requests for choice in request.answer["choices"]}
    assert {transition.message["content"] for transition in transitions} == answers
    for transition in transitions:
        texts = [str(message["content"]) for message in transition.request["messages"]]
        assert any(QUESTION in text for text in texts)
        assert transition.tokens is None
        if agents is not None:
            assert any(instructions(transition.agent) in text for text in texts)
    assert {chat.span.operation for trace in traces for chat in trace.chats} == {names.CHAT}


def send_what_they_record(instrumentors: list[str], run: Callable[[], None], url: str, key: str) -> None:
    otlp = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider()
    exporter = otlp.OTLPSpanExporter(f"{url}/v1/traces", headers={"authorization": f"Bearer {key}"})
    provider.add_span_processor(BatchSpanProcessor(exporter))
    made = []
    for name in instrumentors:
        module, _, kind = name.rpartition(".")
        if os.environ.get("INTEROP") != "1":
            pytest.importorskip(module, exc_type=ImportError)
        made.append(getattr(importlib.import_module(module), kind)())
    for instrumentor in made:
        instrumentor.instrument(tracer_provider=provider, skip_dep_check=True)
    try:
        run()
        assert provider.force_flush(30_000)
    finally:
        for instrumentor in reversed(made):
            instrumentor.uninstrument()
        provider.shutdown()
