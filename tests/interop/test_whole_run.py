"""Whole runs of programs whose model calls reach the gateway without our wire: each is joined to its tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.suite import MODEL
from lightning_spans import open_store
from lightning_spans.adapter.adapt import adapt
from lightning_spans.adapter.nodes import MissingHalf
from lightning_spans.schema import spans as names
from lightning_spans.schema.attempts import Rollout
from lightning_spans.store.traces import traces_of

TASKS = 3
QUESTIONS = ["Begin.", "Go on."]
OPENINFERENCE = """
import openai
from openinference.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

exporter = OTLPSpanExporter(f"{ENDPOINT}/v1/traces", headers={"authorization": f"Bearer {KEY}"})
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(exporter))
OpenAIInstrumentor().instrument(tracer_provider=provider, skip_dep_check=True)
flush = provider.force_flush
client = openai.OpenAI()

def ask(question):
    messages = [{"role": "system", "content": ROLE}, {"role": "user", "content": question}]
    return client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content
"""
AUTOGEN = """
import lightning_autogen
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.anthropic import AnthropicChatCompletionClient

flush = lightning_autogen.attach().flush
INFO = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False, "family": "x"}
client = AnthropicChatCompletionClient(model=MODEL, api_key=KEY, base_url=ENDPOINT, model_info=INFO, max_retries=0)

def ask(question):
    agent = AssistantAgent("writer", client, system_message=ROLE, model_client_stream="on" in question)
    return LOOP.run_until_complete(agent.run(task=question)).messages[-1].content
"""
PYDANTIC_AI = """
import anthropic
import lightning_pydantic_ai
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider

flush = lightning_pydantic_ai.attach().flush
client = anthropic.AsyncAnthropic(api_key=KEY, base_url=ENDPOINT, max_retries=0)
model = AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))
agent = Agent(model, name="writer", instructions=ROLE)

async def answer(question):
    if "on" not in question:
        return (await agent.run(question)).output
    async with agent.run_stream(question) as result:
        return await result.get_output()

def ask(question):
    return LOOP.run_until_complete(answer(question))
"""
COMPLETIONS = """
import lightning_openai
import openai

flush = lightning_openai.attach().flush
client = openai.OpenAI()

def ask(question):
    with lightning_openai.agent("writer"):
        told = client.completions.create(model=MODEL, prompt=f"{ROLE} {question}", stream="on" in question)
        return "".join(part.choices[0].text for part in told) if "on" in question else told.choices[0].text
"""
LANGCHAIN = """
import lightning_langchain
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic

flush = lightning_langchain.attach().flush
model = ChatAnthropic(model=MODEL, base_url=ENDPOINT, api_key=KEY, max_retries=2)
graph = create_agent(model, [], system_prompt=ROLE, name="writer")

def text_of(content):
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)

def ask(question):
    asked = {"messages": [{"role": "user", "content": question}]}
    if "on" in question:
        return "".join(text_of(message.content) for message, _ in graph.stream(asked, stream_mode="messages"))
    return graph.invoke(asked)["messages"][-1].content
"""
AGENTS_SDK = """
import agents
import lightning_openai_agents
from agents.extensions.models.litellm_model import LitellmModel

flush = lightning_openai_agents.attach().flush
agents.set_trace_processors([])
settings = agents.ModelSettings(extra_args={"num_retries": 2})

async def answer(question):
    model = LitellmModel(f"anthropic/{MODEL}", base_url=ENDPOINT, api_key=KEY)
    agent = agents.Agent("writer", instructions=ROLE, model=model, model_settings=settings)
    if "on" not in question:
        return (await agents.Runner.run(agent, question)).final_output
    streamed = agents.Runner.run_streamed(agent, question)
    async for _ in streamed.stream_events():
        pass
    return streamed.final_output

def ask(question):
    return asyncio.run(answer(question))
"""
CREWAI = """
import lightning_crewai
from crewai import LLM, Agent

flush = lightning_crewai.attach().flush

def ask(question):
    options = {"is_litellm": True, "max_tokens": 100, "num_retries": 2}
    llm = LLM(model=f"hosted_vllm/{MODEL}", base_url=f"{ENDPOINT}/v1", api_key=KEY, stream="on" in question, **options)
    return Agent(role="writer", goal="to help", backstory=ROLE, llm=llm, max_retry_limit=0).kickoff(question).raw
"""
OTHER_CLIENTS = {
    "LangChain, Anthropic": (LANGCHAIN, ["langchain", "langchain_anthropic"]),
    "Agents SDK, LiteLLM": (AGENTS_SDK, ["agents", "litellm"]),
    "CrewAI, LiteLLM": (CREWAI, ["crewai", "litellm"]),
}
PROGRAMS = {  # program, what it takes, who its spans say is at work
    "openai, completions": (COMPLETIONS, [], "writer"),
    "OpenInference, openai": (OPENINFERENCE, ["openinference.instrumentation.openai"], None),
    "AutoGen, Anthropic": (AUTOGEN, ["autogen_agentchat", "anthropic"], "writer"),
    "Pydantic AI, Anthropic": (PYDANTIC_AI, ["pydantic_ai", "anthropic"], "writer"),
}
AROUND = """
import asyncio, os
ENDPOINT, KEY, MODEL, ROLE = os.environ["LIGHTNING_ENDPOINT"], os.environ["LIGHTNING_KEY"], "{model}", "You are writer."
LOOP = asyncio.new_event_loop()
{program}
for question in {questions}:
    said = ask(question)
    assert said.startswith("writer answers"), said
{more}
flush(60_000)  # on a slow machine the end of the process would spool what the next one delivers
print('{{"reward": 0.5}}')
"""
HARDER = """
from concurrent.futures import ThreadPoolExecutor
ask("So.\\nfail 503 1\\nBegin.")
with ThreadPoolExecutor(3) as pool:
    list(pool.map(ask, ["Same.", "Same.", "So.\\nwait 0.1\\nGo on."]))
"""


REPORTED_BY = {"Anthropic": "langchain", "LiteLLM": "openai"}  # LiteLLM's calls are seen where LiteLLM makes them


@contextmanager
def started(*words: str, cwd: Path) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "lightning_trainer.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=cwd) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


def until(done: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "the run does not finish"
        time.sleep(0.5)


def run_of(folder: Path, program: str, packages: list[str], *, tasks: int, more: str = "") -> tuple[list[Any], Any]:
    """Run a program under a server and a runner; give the traces of its attempts and what the upstream was asked."""
    for package in packages:
        if os.environ.get("INTEROP") != "1":
            pytest.importorskip(package, exc_type=ImportError)
    text = AROUND.format(model=MODEL, program=program, questions=QUESTIONS, more=more)
    (folder / "program.py").write_text(text)
    path = str(folder / "run.db")
    queued = [Rollout(rollout_id=f"r{n}", group_id=f"g{n}", task={"n": n}, max_attempts=1) for n in range(tasks)]
    with ScriptedServer() as upstream:
        server = ("server", "--store", path, "--upstream", f"{MODEL}={upstream.url}", "--agents", "*")
        with started(*server, cwd=folder) as ready:
            runner = ("runner", "--server", ready["url"], "--key-file", ready["runner_key_file"], "--workers", "1")
            with started(*runner, "--command", f"{sys.executable} program.py", cwd=folder):
                store = open_store(path)
                store.enqueue(queued)
                until(lambda: {r.status for r in store.rollouts()} <= {"succeeded", "failed"})
                errors = [record.error for record in store.attempts() if record.error]
                assert {rollout.status for rollout in store.rollouts()} == {"succeeded"}, errors
                traces = traces_of(store)
                store.close()
        return traces, upstream.requests


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call_of_a_run_is_one_transition_joined_to_the_tokens_that_the_gateway_recorded(name, tmp_path):
    program, packages, agent = PROGRAMS[name]
    traces, requests = run_of(tmp_path, program, packages, tasks=TASKS)
    transitions = [transition for trace in traces for transition in adapt(trace)]
    assert len(requests) == len(transitions) == len(QUESTIONS) * TASKS
    calls = [chat.call for trace in traces for chat in trace.chats]
    assert all(call is not None and call.choices[0].token_ids for call in calls)
    assert not [lost for trace in traces for lost in trace.unjoined]
    assert {transition.agent for transition in transitions} == {agent}
    assert {transition.rollout_id for transition in transitions} == {f"r{n}" for n in range(TASKS)}
    assert all(chat.span.attributes.get(names.FRAMEWORK) != "gateway" for trace in traces for chat in trace.chats)


@pytest.mark.parametrize("name", OTHER_CLIENTS)
def test_calls_streams_retries_and_equal_calls_at_once_of_other_clients_name_their_span(name, tmp_path):
    """Some frameworks tell no response id, so that without the name in the request nothing would join them."""
    program, packages = OTHER_CLIENTS[name]
    (trace,), requests = run_of(tmp_path, program, packages, tasks=1, more=HARDER)
    calls = [chat.call for chat in trace.chats]
    assert {chat.span.agent for chat in trace.chats} == {"writer"}
    assert {chat.span.attributes.get(names.FRAMEWORK) for chat in trace.chats} == {REPORTED_BY[name.split(", ")[1]]}
    assert all(call is not None and call.trace_id is not None for call in calls)
    answered = [call for call in calls if call.choices]
    assert len(answered) == len(QUESTIONS) + 4
    assert all(call.choices[0].token_ids for call in answered)
    assert len(requests) == len(answered) + 1  # the try that failed is a span of its own, or a spare call of one
    assert {lost.reason for lost in trace.unjoined} <= {MissingHalf.SPARE}
    assert len(calls) + len(trace.unjoined) == len(requests)
