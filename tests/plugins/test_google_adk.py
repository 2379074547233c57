from __future__ import annotations

import asyncio
import json
import os
from types import SimpleNamespace

import pytest

pytest.importorskip("google.adk")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else LiteLLM asks the net for prices
pytest.importorskip("litellm")

import google.adk
from google.adk.agents import BaseAgent, LlmAgent, LoopAgent, ParallelAgent, SequentialAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models import BaseLlm, LlmResponse
from google.adk.models.lite_llm import LiteLlm
from google.adk.plugins.plugin_manager import PluginManager
from google.adk.runners import InMemoryRunner, Runner
from google.adk.tools import AgentTool, FunctionTool
from google.genai import types

import lightning_google_adk
from lightning_conformance.plugins.program import span_of
from lightning_conformance.plugins.programs import AgentPrograms, add, fail, note
from lightning_conformance.plugins.replayed import NOTES, run_twice
from lightning_conformance.plugins.script import Reply, ScriptedToolCall, agent_of
from lightning_conformance.plugins.server import ScriptedServer
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    REPLAY_PROMPTS,
    PluginConformance,
    instructions,
)
from lightning_spans import Attempt, use_attempt
from lightning_spans.schema import spans as names

NEW = not google.adk.__version__.startswith("1.")


def model(url, **options):
    return LiteLlm(f"openai/{MODEL}", api_base=url, **options)


def make(name, url_or_model, *tools, **options):
    given = model(url_or_model) if isinstance(url_or_model, str) else url_or_model
    return LlmAgent(name=name, model=given, instruction=instructions(name), tools=list(tools), **options)


async def events_of(agent, prompt, **options):
    runner = InMemoryRunner(**{"agent" if isinstance(agent, BaseAgent) else "node": agent}, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="user")
    message = types.Content(role="user", parts=[types.Part(text=prompt)])
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message, **options):
        yield event


def text_of(event):
    return "".join(part.text or "" for part in (event.content and event.content.parts) or ())


async def ask(agent, prompt):
    return [text_of(event) async for event in events_of(agent, prompt)][-1]


SSE = RunConfig(streaming_mode=StreamingMode.SSE)


async def stream(agent, prompt):
    return [text_of(event) async for event in events_of(agent, prompt, run_config=SSE)]


def run(coroutine):
    return asyncio.run(coroutine)


class TestConformance(AgentPrograms, PluginConformance):
    framework = "google-adk"
    unsupported = (
        dict.fromkeys(["responses", "responses_streaming"], "LiteLlm speaks chat completions alone")
        | {"unnamed": "an agent must have a name"}
        | (
            {
                "abandoned": "ADK 2 reads a model's stream in a task of its own, whoever listens",
            }
            if NEW
            else {
                "cut": "LiteLLM of that time takes a stream that breaks off for one that has ended",
                "unknown_tool": "ADK 1.14 ends the run before any of its hooks",
            }
        )
    )

    def patched(self):
        return [
            (BaseAgent, "run_async"),
            (Runner, "run_async"),
            (FunctionTool, "run_async"),
            (AgentTool, "run_async"),
            (PluginManager, "run_on_tool_error_callback"),
            (Told, "generate_content_async"),
        ]

    def make(self, name, url, *tools, **client):
        return make(name, model(url, **client), *tools)

    async def answer(self, agent, prompt):
        return await ask(agent, prompt)

    async def pieces(self, agent, prompt):
        return await stream(agent, prompt)

    def namesakes(self, url):
        async def both():
            teams = [SequentialAgent(name=team, sub_agents=[make("writer", url)]) for team in ("red", "blue")]
            return await asyncio.gather(*(ask(team, PROMPTS["namesakes"]) for team in teams))

        return run(both())

    def abandoned(self, url):
        async def work():
            async for event in events_of(make("writer", url), PROMPTS["abandoned"], run_config=SSE):
                return text_of(event)
            return None

        return run(work())

    def choices(self, url):
        return run(ask(make("writer", model(url, n=2)), PROMPTS["choices"]))

    def tool_error(self, url):
        with pytest.raises(ValueError, match="out of order") as error:
            run(ask(make("caller", url, fail), PROMPTS["tool_error"]))
        return str(error.value)

    def unreadable_arguments(self, url):
        try:
            return run(ask(make("caller", url, add), PROMPTS["unreadable_arguments"]))
        except json.JSONDecodeError as error:  # ADK 1.14
            return str(error)

    def effect_fails(self, url):
        with pytest.raises(ValueError, match="out of order") as error:
            run(ask(make("caller", url, note), REPLAY_PROMPTS["effect_fails"]))
        return str(error.value)

    def heard_by_callbacks(self, url):
        seen = []
        hear = {name: lambda *_, name=name, **__: seen.append(name) for name in CALLBACKS}
        return [run(ask(make("caller", given, add, **hear), PROMPTS["tool_call"])) for given in (url, Told())] + seen

    async def heard_by_asynchronous_callbacks(self, url):
        seen = []

        def hears(name):
            async def hear(*_, **__):
                seen.append(name)

            return hear

        hear = {name: hears(name) for name in CALLBACKS}
        return [await ask(make("caller", given, add, **hear), PROMPTS["tool_call"]) for given in (url, Told())] + seen


CALLBACKS = [f"{when}_{what}_callback" for when in ("before", "after") for what in ("agent", "model", "tool")]


class Told(BaseLlm):
    """A model that is reached without a client."""

    model: str = "told"

    async def generate_content_async(self, llm_request, stream=False):
        asked = llm_request.contents[-1].parts[-1]
        if stream:
            yield LlmResponse(content=said("from "), partial=True)
            yield LlmResponse(content=said("from elsewhere"))
        elif asked.text == "fail":
            raise ConnectionError("gone")
        elif asked.function_response:
            yield LlmResponse(content=said("it is 5"))
        else:
            call = types.FunctionCall(id="call-1", name="add", args={"a": 2, "b": 3})
            yield LlmResponse(content=types.Content(role="model", parts=[types.Part(function_call=call)]))


def said(text):
    return types.Content(role="model", parts=[types.Part(text=text)])


def paths(found):
    """Return the agents' paths, those of agents that made a call."""
    by_id = {span.span_id: span for span in found.spans}
    return [by_id[chat.parent_id].attributes[names.AGENT_PATH] for chat in found.chats]


def test_a_tree_of_workflow_agents_is_a_tree_of_spans(found_of):
    def program(url):
        both = ParallelAgent(name="both", sub_agents=[make("left", url), make("right", url)])
        polish = LoopAgent(name="polish", sub_agents=[make("critic", url)], max_iterations=2)
        return run(ask(SequentialAgent(name="pipeline", sub_agents=[make("writer", url), both, polish]), "hello"))

    found = found_of(program)
    assert sorted(paths(found)) == [
        "pipeline/both/left",
        "pipeline/both/right",
        "pipeline/polish/critic",
        "pipeline/polish/critic",
        "pipeline/writer",
    ]
    assert len({span.trace_id for span in found.spans}) == 1
    assert all(span.status == "ok" for span in found.spans)


@pytest.mark.skipif(not NEW, reason="since ADK 2")
def test_agents_and_tools_of_a_graph_are_named_by_its_workflows(found_of):
    from google.adk.workflow import START, Workflow

    def shout(text: str) -> str:
        return text.upper()

    def program(url):
        inner = Workflow(name="inner", edges=[(START, make("writer", url))])
        outer = Workflow(name="outer", edges=[(START, inner, make("critic", url), FunctionTool(shout))])
        return run(ask(outer, "hello"))

    found = found_of(program)
    assert paths(found) == ["outer/inner/writer", "outer/critic"]
    assert [(tool.name, tool.agent, tool.status) for tool in found.tools] == [("shout", "outer", "ok")]
    assert len({span.trace_id for span in found.spans}) == 1
    assert all(span.status == "ok" for span in found.spans)


@pytest.mark.skipif(not NEW, reason="since ADK 2")
def test_a_graph_fails_with_its_tool(found_of):
    from google.adk.workflow import START, Workflow

    def explode(text: str) -> str:
        raise ValueError("boom")

    def program(url):
        with pytest.raises(ValueError, match="boom"):
            run(ask(Workflow(name="outer", edges=[(START, make("writer", url), FunctionTool(explode))]), "hello"))

    found = found_of(program)
    status = {span.name: span.status for span in found.spans if span.operation != "chat"}
    assert status == {"app": "error", "outer": "error", "writer": "ok", "explode": "error"}


def test_an_agent_as_a_tool_is_under_the_tool(found_of):
    def script(body, seen):
        if agent_of(body) == "boss" and body["messages"][-1]["role"] == "user":
            return Reply(tool_calls=[ScriptedToolCall("writer", '{"request": "hello"}')])
        return Reply("done")

    def program(url):
        with ScriptedServer(script) as server:
            return run(ask(make("boss", server.url, AgentTool(agent=make("writer", server.url))), "hello"))

    found = found_of(program)
    assert [chat.agent for chat in found.chats] == ["boss", "writer", "boss"]
    (tool,) = found.tools
    (inner,) = [span for span in found.spans if span.operation == names.INVOKE_AGENT and span.name == "writer"]
    assert (tool.name, tool.agent, inner.parent_id) == ("writer", "boss", tool.span_id)


def test_a_transfer_is_a_tool_call_and_the_other_agent_works_on(found_of):
    def script(body, seen):
        if agent_of(body) == "boss":
            return Reply(tool_calls=[ScriptedToolCall("transfer_to_agent", '{"agent_name": "writer"}')])
        return Reply("done")

    def program(url):
        with ScriptedServer(script) as server:
            return run(ask(make("boss", server.url, sub_agents=[make("writer", server.url)]), "hello"))

    found = found_of(program)
    assert found.output == "done"
    assert [chat.agent for chat in found.chats] == ["boss", "writer"]
    assert [(tool.name, tool.agent, tool.status) for tool in found.tools] == [("transfer_to_agent", "boss", "ok")]
    assert len({span.trace_id for span in found.spans}) == 1


@pytest.mark.skipif(not NEW, reason="since ADK 2")
def test_a_task_for_another_agent_is_a_tool_call_that_says_whose_it_is(found_of):
    def script(body, seen):
        if agent_of(body) == "boss" and body["messages"][-1]["role"] == "user":
            return Reply(tool_calls=[ScriptedToolCall("writer", '{"request": "hello"}')])
        if agent_of(body) == "writer":
            return Reply(tool_calls=[ScriptedToolCall("finish_task", '{"result": "a line"}')])
        return Reply("done")

    def program(url):
        with ScriptedServer(script) as server:
            writer = make("writer", server.url, mode="task")
            return run(ask(make("boss", server.url, sub_agents=[writer]), "hello"))

    found = found_of(program)
    assert found.output == "done"
    assert [chat.agent for chat in found.chats] == ["boss", "writer", "boss"]
    (tool,) = found.tools
    assert (tool.name, tool.agent, tool.status, tool.attributes[names.HANDOFF]) == ("writer", "boss", "ok", "writer")
    assert "a line" in tool.attributes[names.TOOL_RESULT]


@pytest.mark.skipif(not NEW, reason="LiteLLM of that time")
def test_a_streamed_tool_call_that_can_not_be_read_is_one_error(found_of):
    found = found_of(lambda url: run(stream(make("caller", url, add), PROMPTS["unreadable_arguments"])))
    assert [(tool.name, tool.agent, tool.status) for tool in found.tools] == [("add", "caller", "error")]


def test_an_agent_of_the_users_own_is_an_agent(found_of):
    class Both(BaseAgent):
        async def _run_async_impl(self, ctx):
            for each in self.sub_agents:
                async for event in each.run_async(ctx):
                    yield event

    found = found_of(lambda url: run(ask(Both(name="both", sub_agents=[make("left", url), make("right", url)]), "hi")))
    assert paths(found) == ["both/left", "both/right"]


@pytest.mark.skipif(not NEW, reason="ADK 1 ends the whole run")
def test_a_tool_that_does_not_exist_is_an_error(found_of):
    found = found_of(lambda url: run(ask(make("caller", url, add), 'call multiply {"a": 2}')))
    (tool,) = found.tools
    assert (tool.name, tool.agent, tool.status) == ("multiply", "caller", "error")
    assert "multiply" in tool.status_message
    assert json.loads(tool.attributes[names.TOOL_ARGUMENTS]) == {"a": 2}


def test_arguments_that_do_not_fit_are_an_error(found_of):
    found = found_of(lambda url: run(ask(make("caller", url, add), 'call add {"a": 2}')))
    (tool,) = found.tools
    assert (tool.name, tool.status) == ("add", "error")
    assert "mandatory" in tool.status_message


async def confirmed(agent, prompt):
    """Run an agent whose tool needs a person's confirmation, and confirm; return the texts and what was asked."""
    runner = InMemoryRunner(agent=agent, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="user")
    said, asked = [], []

    async def turn(part):
        message = types.Content(role="user", parts=[part])
        async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message):
            said.append(text_of(event))
            asked.extend(call for call in event.get_function_calls() if call.name == "adk_request_confirmation")

    await turn(types.Part(text=prompt))
    for call in asked:
        given = types.FunctionResponse(id=call.id, name=call.name, response={"confirmed": True})
        await turn(types.Part(function_response=given))
    return said, len(asked)


def test_a_tool_asks_for_confirmation_again_in_a_replay(tmp_path):
    def program(url):
        tool = FunctionTool(note, require_confirmation=True)
        return run(confirmed(make("caller", url, tool), 'call note {"text": "one"}'))

    noted = len(NOTES)
    (first, second), spans = run_twice(program, tmp_path, "google-adk")
    assert first == second
    assert first[1] == 1
    assert len(NOTES) == noted + 1
    tools = [span for span in spans if span.operation == names.EXECUTE_TOOL]
    replayed = [tool.attributes[names.REPLAYED] for tool in tools]
    assert replayed in ([False, True], [True])  # newer versions ask before they call the tool


@pytest.mark.parametrize("context", [None, SimpleNamespace(actions=SimpleNamespace())], ids=["none", "its own"])
def test_a_program_may_run_a_tool_without_a_context_of_adk(context, found_of):
    found = found_of(lambda url: run(FunctionTool(add).run_async(args={"a": 2, "b": 3}, tool_context=context)))
    assert found.output == 5
    assert [(tool.name, tool.status) for tool in found.tools] == [("add", "ok")]


def test_what_a_tool_says_of_an_error_is_its_result(found_of):
    def look(word: str) -> dict:
        """Look a word up."""
        return {"error": f"there is no {word}"}

    (tool,) = found_of(lambda url: run(ask(make("caller", url, look), 'call look {"word": "moon"}'))).tools
    assert (tool.status, json.loads(tool.attributes[names.TOOL_RESULT])) == ("ok", {"error": "there is no moon"})


def test_a_synchronous_run_is_recorded_alike(found_of):
    def program(url):
        runner = InMemoryRunner(make("caller", url, add), app_name="app")
        session = asyncio.run(runner.session_service.create_session(app_name="app", user_id="user"))
        message = types.Content(role="user", parts=[types.Part(text=PROMPTS["tool_call"])])
        with lightning_google_adk.agent("outer"):  # ADK runs it in a thread of its own
            events = list(runner.run(user_id="user", session_id=session.id, new_message=message))
        return text_of(events[-1])

    found = found_of(program)
    assert paths(found) == ["outer/caller"] * 2
    assert [tool.agent for tool in found.tools] == ["caller"]
    assert len({span.trace_id for span in found.spans}) == 1


def test_a_model_reached_elsewhere_is_one_chat_span(found_of):
    def program(url):
        return run(ask(make("writer", Told(), add), "hello")), run(stream(make("writer", Told()), "hello"))

    found = found_of(program)
    assert found.output == ("it is 5", ["from ", "from elsewhere"])
    assert [(chat.agent, chat.status) for chat in found.chats] == [("writer", "ok")] * 3
    first, second, third = found.chats
    request = json.loads(first.attributes[names.REQUEST])
    assert [turn["role"] for turn in request["messages"]] == ["system", "user"]
    assert request["messages"][1]["content"] == "hello"
    assert request["tools"][0]["function"]["name"] == "add"
    asked = json.loads(first.attributes[names.RESPONSE])["choices"][0]["message"]["tool_calls"]
    assert asked[0]["id"] == found.tools[0].attributes[names.TOOL_CALL_ID] == "call-1"
    roles = [turn["role"] for turn in json.loads(second.attributes[names.REQUEST])["messages"]]
    assert roles[-2:] == ["assistant", "tool"]
    assert json.loads(third.attributes[names.RESPONSE])["choices"][0]["message"]["content"] == "from elsewhere"
    assert third.attributes[names.STREAMED] is True


def test_a_model_reached_elsewhere_that_fails_is_an_error(found_of):
    def program(url):
        with pytest.raises(ConnectionError):
            run(ask(make("writer", Told()), "fail"))

    (chat,) = found_of(program).chats
    assert (chat.status, chat.status_message, chat.agent) == ("error", "gone", "writer")


def test_a_provider_of_litellms_own_is_one_chat_span_with_its_agent(found_of):
    def program(url):
        given = LiteLlm(f"hosted_vllm/{MODEL}", api_base=url)
        return run(ask(make("caller", given, add), PROMPTS["tool_call"]))

    found = found_of(program)
    assert len(found.requests) == len(found.chats) == 2
    assert [chat.agent for chat in found.chats] == ["caller"] * 2


def test_only_the_attempts_own_agent_is_rerouted_from_inside_a_tool(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    with ScriptedServer() as origin, ScriptedServer() as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",))

        async def consult() -> str:
            """Consult."""
            return await ask(make("writer", origin.url), "hello")

        attachment = lightning_google_adk.attach(store=str(tmp_path / "traces.db"))
        with attachment, use_attempt(attempt):
            run(ask(make("boss", origin.url, consult), "call consult {}"))
            attachment.flush(60)
        assert {agent_of(request.body) for request in policy.requests} == {"writer"}
        assert {agent_of(request.body) for request in origin.requests} == {"boss"}
        assert len({span_of(request) for request in [*policy.requests, *origin.requests]}) == 3


def test_detaching_ends_what_is_open(operations_until_stopped):
    operations = operations_until_stopped(lambda url, stop: run(ask(make("caller", url, stop), "call stop {}")))
    assert operations == ["chat", "execute_tool", "invoke_agent", "invoke_workflow"]
