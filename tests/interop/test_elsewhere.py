"""Models that frameworks reach without the openai client, with the providers' real clients: each call one chat span."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from lightning_spans import attach, open_store
from lightning_spans.adapter.adapt import adapt
from lightning_spans.adapter.trace import Trace
from lightning_spans.schema import spans as names
from lightning_spans.schema.spans import Span
from support.plugins.providers import Providers

os.environ |= {f"CREWAI_{name}": "true" for name in ("DISABLE_TELEMETRY", "DISABLE_TRACKING", "TESTING")}
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # else LiteLLM fetches prices when it is imported

ROLE = "You are the writer."
INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def text_of(content: Any) -> str:
    """Return a message's content as text; Anthropic's comes in parts when it is streamed."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def langchain(model: Any) -> Callable[..., str]:
    from langchain.agents import create_agent

    agent = create_agent(model, [add], system_prompt=ROLE, name="writer")

    def ask(question: str, *, stream: bool = False) -> str:
        asked: Any = {"messages": [{"role": "user", "content": question}]}
        if stream:
            return "".join(text_of(message.content) for message, _ in agent.stream(asked, stream_mode="messages"))
        return str(agent.invoke(asked)["messages"][-1].content)

    return ask


def chat_anthropic(url: str) -> Callable[..., str]:
    from langchain_anthropic import ChatAnthropic

    return langchain(ChatAnthropic(model="claude-x", base_url=url, api_key="k", max_retries=0))


def chat_ollama(url: str) -> Callable[..., str]:
    from langchain_ollama import ChatOllama

    return langchain(ChatOllama(model="llama3", base_url=url))


def chat_gemini(url: str) -> Callable[..., str]:
    from langchain_google_genai import ChatGoogleGenerativeAI

    return langchain(ChatGoogleGenerativeAI(model="gemini-x", base_url=url, api_key="k", max_retries=1))


def openai_agents(model: str) -> Callable[[str], Callable[..., str]]:
    def program(url: str) -> Callable[..., str]:
        import agents
        from agents.extensions.models.litellm_model import LitellmModel

        agents.set_trace_processors([])
        made = LitellmModel(model, base_url=url, api_key="k")
        agent = agents.Agent("writer", instructions=ROLE, model=made, tools=[agents.function_tool(add)])

        async def run(question: str, *, stream: bool) -> str:
            if not stream:
                return str((await agents.Runner.run(agent, question)).final_output)
            streamed = agents.Runner.run_streamed(agent, question)
            async for _ in streamed.stream_events():
                pass
            return str(streamed.final_output)

        return lambda question, stream=False: asyncio.run(run(question, stream=stream))

    return program


def autogen(make: Callable[[str], Any]) -> Callable[[str], Callable[..., str]]:
    def program(url: str) -> Callable[..., str]:
        from autogen_agentchat.agents import AssistantAgent
        from autogen_core.tools import FunctionTool

        async def run(question: str, *, stream: bool) -> str:
            client = make(url)
            tools = [FunctionTool(add, "Add two numbers.")]
            agent = AssistantAgent("writer", client, system_message=ROLE, tools=tools, model_client_stream=stream)
            return str((await agent.run(task=question)).messages[-1].content)

        return lambda question, stream=False: asyncio.run(run(question, stream=stream))

    return program


def autogen_anthropic(url: str) -> Any:
    from autogen_ext.models.anthropic import AnthropicChatCompletionClient

    return AnthropicChatCompletionClient(model="claude-x", api_key="k", base_url=url, model_info=INFO, max_retries=0)


def autogen_ollama(url: str) -> Any:
    from autogen_ext.models.ollama import OllamaChatCompletionClient

    return OllamaChatCompletionClient(model="llama3", host=url, model_info=INFO)


def crewai(model: str, **options: Any) -> Callable[[str], Callable[..., str]]:
    def program(url: str) -> Callable[..., str]:
        from crewai import LLM, Agent
        from crewai.tools import tool

        def ask(question: str, *, stream: bool = False) -> str:
            llm = LLM(model=model, base_url=url, api_key="k", stream=stream, max_tokens=100, **options)
            given = {"llm": llm, "tools": [tool(add)], "max_retry_limit": 0}
            return str(Agent(role="writer", goal="to help", backstory=ROLE, **given).kickoff(question).raw)

        return ask

    return program


# What is tried: the framework, the packages that it takes, the program, and whether the framework tells the id.
CASES = {
    "ChatAnthropic": ("langchain", ["langchain", "langchain_anthropic"], chat_anthropic, True),
    "ChatOllama": ("langchain", ["langchain", "langchain_ollama"], chat_ollama, False),
    "ChatGoogleGenerativeAI": ("langchain", ["langchain", "langchain_google_genai"], chat_gemini, False),
    "LitellmModel, Anthropic": ("openai-agents", ["agents", "litellm"], openai_agents("anthropic/claude-x"), False),
    "LitellmModel, Ollama": ("openai-agents", ["agents", "litellm"], openai_agents("ollama_chat/llama3"), False),
    "AutoGen, Anthropic": ("autogen", ["autogen_agentchat", "anthropic"], autogen(autogen_anthropic), False),
    "AutoGen, Ollama": ("autogen", ["autogen_agentchat", "ollama"], autogen(autogen_ollama), False),
    "CrewAI, Anthropic": ("crewai", ["crewai", "anthropic"], crewai("anthropic/claude-x"), True),
    "CrewAI, LiteLLM": ("crewai", ["crewai", "litellm"], crewai("ollama_chat/llama3", is_litellm=True), False),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    framework, packages, program, tells_id = CASES[request.param]
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path / "crewai"))
    monkeypatch.setenv("LIGHTNING_SPOOL", str(tmp_path / "spool"))
    return framework, program, tells_id


def recorded(case: Any, folder: Any, questions: list[str], **options: Any) -> tuple[list[str], Providers, list[Span]]:
    """Ask the writer the questions, attached; give the answers, what the server was asked, and the spans."""
    framework, program, _ = case
    with Providers() as providers, attach(framework, store=str(folder / "traces.db")) as attachment:
        answers = [_answer(program(providers.url), question, options) for question in questions]
        attachment.flush(30)
    spans = open_store(str(folder / "traces.db")).spans()
    return answers, providers, spans


def _answer(ask: Callable[..., str], question: str, options: dict[str, Any]) -> str:
    try:
        return ask(question, **options)
    except Exception as error:  # what a failed call raises is what the agent sees
        return f"{type(error).__name__}: {error}"


def chats(spans: list[Span]) -> list[Span]:
    return sorted((span for span in spans if span.operation == names.CHAT), key=lambda span: span.start_ns)


def calls(providers: Providers) -> list[Any]:
    return [asked for asked in providers.asked if not asked.path.endswith(("/count_tokens", "/api/show"))]


@pytest.mark.parametrize("stream", [False, True])
def test_every_call_is_one_span_with_its_agent(case, tmp_path, stream):
    answers, providers, spans = recorded(case, tmp_path, ["hello", "hello again"], stream=stream)
    assert answers == ["Nineteen.", "Nineteen."]
    assert len(chats(spans)) == len(calls(providers)) == 2
    for span, question in zip(chats(spans), ["hello", "hello again"], strict=True):
        assert (span.agent, span.status) == ("writer", "ok")
        request, response = (json.loads(span.attributes[name]) for name in (names.REQUEST, names.RESPONSE))
        assert "claude-x" in request["model"] or request["model"].endswith(("llama3", "gemini-x"))
        texts = json.dumps(request["messages"])
        assert ROLE in texts
        assert question in texts
        assert text_of(response["choices"][0]["message"]["content"]) == "Nineteen."


def test_tools_and_the_calls_around_them_are_told(case, tmp_path):
    _, providers, spans = recorded(case, tmp_path, ["use add"])
    assert len(chats(spans)) == len(calls(providers)) >= 1
    first = json.loads(chats(spans)[0].attributes[names.RESPONSE])["choices"][0]["message"]
    function = first["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("add", {"a": 12, "b": 7})
    for span in (span for span in spans if span.operation == names.EXECUTE_TOOL):
        assert (span.agent, span.name, span.attributes[names.TOOL_RESULT]) == ("writer", "add", "19")
    known = {span.span_id for span in spans}
    assert all(span.parent_id is None or span.parent_id in known for span in spans)


def test_a_failed_call_is_an_error(case, tmp_path):
    answers, providers, spans = recorded(case, tmp_path, ["fail"])
    assert "no such luck" in answers[0]
    assert len(chats(spans)) == len(calls(providers)) == 1
    assert chats(spans)[0].status == "error"
    assert "no such luck" in chats(spans)[0].status_message


def test_such_calls_have_no_tokens_and_where_the_framework_tells_it_the_id(case, tmp_path):
    _, providers, spans = recorded(case, tmp_path, ["hello"])
    (span,) = chats(spans)
    if case[2]:
        assert span.attributes[names.RESPONSE_ID] == calls(providers)[0].response_id
    (transition,) = adapt(Trace.build(spans))
    assert (transition.agent, transition.tokens) == ("writer", None)


def test_the_answer_is_the_same_without_us(case, tmp_path):
    questions = ["hello", "use add"]
    answers, providers, _ = recorded(case, tmp_path, questions)
    with Providers() as alone:
        program = case[1]
        plain = [_answer(program(alone.url), question, {}) for question in questions]
    assert without_ids(answers) == without_ids(plain)
    assert without_ids(a.body for a in providers.asked) == without_ids(a.body for a in alone.asked)


def without_ids(things: Iterable[object]) -> list[str]:
    """LiteLLM makes up ids of tool calls for models that give none."""
    return [re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "ID", str(thing)) for thing in things]


@pytest.mark.parametrize("name", [package for _, packages, _, _ in CASES.values() for package in packages])
def test_what_the_session_promises_is_installed(name):
    if os.environ.get("INTEROP") == "1":
        importlib.import_module(name)
