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

from lightning_spans import open_store
from lightning_spans import spans as names
from lightning_spans.adapter import adapt
from lightning_spans.store import Rollout
from lightning_spans.testing import ScriptedServer
from lightning_spans.testing.plugins import MODEL
from lightning_spans.trace import traces_of

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
    assert ask(question).startswith("writer answers")
flush(60_000)  # on a slow machine the end of the process would spool what the next one delivers
print(0.5)
"""


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


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call_of_a_run_is_one_transition_joined_to_the_tokens_that_the_gateway_recorded(name, tmp_path):
    program, packages, agent = PROGRAMS[name]
    for package in packages:
        if os.environ.get("INTEROP") != "1":
            pytest.importorskip(package, exc_type=ImportError)
    (tmp_path / "program.py").write_text(AROUND.format(model=MODEL, program=program, questions=QUESTIONS))
    path = str(tmp_path / "run.db")
    tasks = [Rollout(rollout_id=f"r{n}", group_id=f"g{n}", task={"n": n}, max_attempts=1) for n in range(TASKS)]
    with ScriptedServer() as upstream:
        server = ("server", "--store", path, "--upstream", f"{MODEL}={upstream.url}", "--agents", "*")
        with started(*server, cwd=tmp_path) as ready:
            runner = ("runner", "--server", ready["url"], "--key-file", ready["runner_key_file"], "--workers", "1")
            with started(*runner, "--command", f"{sys.executable} program.py", cwd=tmp_path):
                store = open_store(path)
                store.enqueue(tasks)
                until(lambda: {r.status for r in store.rollouts()} <= {"succeeded", "failed"})
                assert {rollout.status for rollout in store.rollouts()} == {"succeeded"}
                traces = traces_of(store)
                store.close()
        requests = upstream.requests
    transitions = [transition for trace in traces for transition in adapt(trace)]
    assert len(requests) == len(transitions) == len(QUESTIONS) * TASKS
    calls = [chat.call for trace in traces for chat in trace.chats]
    assert all(call is not None and call.choices[0].token_ids for call in calls)
    assert not [lost for trace in traces for lost in trace.unjoined]
    assert {transition.agent for transition in transitions} == {agent}
    assert {transition.rollout_id for transition in transitions} == {task.rollout_id for task in tasks}
    assert all(chat.span.attributes.get(names.FRAMEWORK) != "gateway" for trace in traces for chat in trace.chats)
