from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

# Before CrewAI is imported: it makes what it sends home with when it is.
os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_DISABLE_TRACKING": "true", "CREWAI_TRACING_ENABLED": "false"}
crewai = pytest.importorskip("crewai")

import openai
from crewai import LLM, Agent, Crew, Process, Task
from crewai.events import crewai_event_bus
from crewai.events.event_bus import CrewAIEventsBus
from crewai.events.types.agent_events import AgentExecutionCompletedEvent
from crewai.events.types.llm_events import LLMCallCompletedEvent, LLMCallStartedEvent, LLMCallType
from crewai.flow.flow import Flow, listen, start
from crewai.llms.base_llm import BaseLLM, llm_call_context
from crewai.tools import tool

import lightning_crewai
from lightning_crewai.following import entries
from lightning_openai import elsewhere
from lightning_spans import Attempt, hookimpl, open_store, plugins, use_attempt
from lightning_spans import spans as names
from lightning_spans.testing import ScriptedServer
from lightning_spans.testing.plugins import MODEL, PROMPTS, PluginConformance
from lightning_spans.testing.script import agent_of

NEW = tuple(int(part) for part in crewai.__version__.split(".")[:2]) >= (1, 15)


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("OPENAI_API_KEY", "user-key")
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path_factory.mktemp("crewai")))
    connect = socket.socket.connect

    def only_here(own, address):
        assert not isinstance(address, tuple) or address[0] in {"127.0.0.1", "::1", "localhost"}, address
        return connect(own, address)

    monkeypatch.setattr(socket.socket, "connect", only_here)


def model(url, **options):
    return LLM(model=MODEL, base_url=url, provider="openai", **options)


def make(role, url_or_model, **options):
    given = model(url_or_model) if isinstance(url_or_model, str) else url_or_model
    options = {"goal": "to help", "backstory": "You do as told.", "max_retry_limit": 0} | options
    return Agent(role=role, llm=given, **options)


def task(prompt, agent=None, **options):
    return Task(description=f"\n{prompt}\n", expected_output="an answer", agent=agent, **options)


def crew(*tasks, **options):
    agents = list({id(given.agent): given.agent for given in tasks if given.agent is not None}.values())
    return Crew(**{"agents": agents, "tasks": list(tasks)} | options)


def ask(role, url, prompt, **options):
    return make(role, url, **options).kickoff(f"\n{prompt}").raw


def run(coroutine):
    return asyncio.run(coroutine)


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool("fail")
def fail(reason: str) -> str:
    """Fail."""
    raise ValueError(reason)


class TestConformance(PluginConformance):
    framework = "crewai"
    unsupported = {"abandoned": "CrewAI itself reads a model's stream to its end, whoever reads its own"}

    def patched(self):
        return [(CrewAIEventsBus, "emit"), (BaseLLM, "_emit_call_started_event"), *entries()]

    def one_agent(self, url):
        return ask("writer", url, PROMPTS["one_agent"])

    def two_agents(self, url):
        shared = model(url)
        tasks = [task(PROMPTS["two_agents"], make(role, shared)) for role in ("writer", "rewriter")]
        return [output.raw for output in crew(*tasks).kickoff().tasks_output]

    def streaming(self, url):
        return ask("writer", model(url, stream=True), PROMPTS["streaming"])

    def tool_call(self, url):
        return crew(task(PROMPTS["tool_call"], make("caller", url, tools=[add]))).kickoff().raw

    def parallel_tools(self, url):
        return ask("caller", url, PROMPTS["parallel_tools"], tools=[add])

    def tool_error(self, url):
        return crew(task(PROMPTS["tool_error"], make("caller", url, tools=[fail]))).kickoff().raw

    def parallel(self, url):
        async def work():
            crews = [crew(task(PROMPTS["parallel"], make(role, url))) for role in ("left", "right")]
            return [output.raw for output in await asyncio.gather(*(one.kickoff_async() for one in crews))]

        return run(work())

    def nested(self, url):
        @tool("ask")
        def ask_writer(question: str) -> str:
            """Ask the writer."""
            return ask("writer", url, question)

        return ask("boss", url, PROMPTS["nested"], tools=[ask_writer])

    async def asynchronous(self, url):
        crews = [crew(task(PROMPTS["asynchronous"], make(role, url))) for role in ("writer", "rewriter")]
        return [output.raw for output in await asyncio.gather(*(one.akickoff() for one in crews))]

    def threads(self, url):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda number: ask("writer", url, f"hello {number}"), range(2)))

    def retried(self, url):
        return ask("writer", model(url, max_retries=2), PROMPTS["retried"])

    def failed(self, url):
        with pytest.raises(Exception, match="fails 1 of 99") as error:
            crew(task(PROMPTS["failed"], make("writer", model(url, max_retries=0)))).kickoff()
        return type(error.value).__name__, str(error.value)

    def cut(self, url):
        with pytest.raises(Exception) as error:  # noqa: PT011 - which one depends on the version
            ask("writer", model(url, stream=True), PROMPTS["cut"])
        return type(error.value).__name__

    def callbacks(self, url):
        seen = []
        given = task(PROMPTS["callbacks"], make("writer", url, step_callback=lambda step: seen.append(step.output)))
        with crewai_event_bus.scoped_handlers():

            @crewai_event_bus.on(LLMCallCompletedEvent)
            def _(source, event):
                seen.append((event.agent_role, event.response))

            output = crew(given, task_callback=lambda done: seen.append(done.raw)).kickoff()
            crewai_event_bus.flush()
        return output.raw, sorted(map(str, seen))
