from __future__ import annotations

import asyncio
import json
import os

import pytest

os.environ["AGNO_TELEMETRY"] = "false"  # else every run is told to its makers

agno = pytest.importorskip("agno")
openai = pytest.importorskip("openai")

from agno.agent import Agent
from agno.exceptions import StopAgentRun
from agno.models.base import Model
from agno.models.openai import OpenAIChat, OpenAIResponses
from agno.models.response import ModelResponse
from agno.team import Team
from agno.tools import tool
from agno.tools.function import FunctionCall

import lightning_agno
from lightning_agno.agents import Workflow, ways
from lightning_conformance.plugins.program import span_of
from lightning_conformance.plugins.programs import AgentPrograms, add, fail
from lightning_conformance.plugins.replayed import run_twice
from lightning_conformance.plugins.script import agent_of
from lightning_conformance.plugins.server import ScriptedServer
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    TIMEOUT_S,
    PluginConformance,
    instructions,
    write_note,
)
from lightning_spans import Attempt, agent, use_attempt
from lightning_spans.schema import spans as names


def model(url, kind=OpenAIChat, **options):
    roles = {role: role for role in ("system", "user", "assistant", "tool")}  # as they are, not "developer"
    given = {} if kind is OpenAIResponses else {"role_map": roles}
    return kind(id=MODEL, base_url=url, **given, **options)


def make(name, url_or_model, *tools, **options):
    given = model(url_or_model) if isinstance(url_or_model, str) else url_or_model
    return Agent(name=name, model=given, instructions=instructions(name), tools=list(tools), **options)


def ask(agent, prompt):
    return agent.run(prompt).content


async def aask(agent, prompt):
    return (await agent.arun(prompt)).content


def text_of(event):
    return event.content if event.event in {"RunContent", "TeamRunContent"} else None


def stream(agent, prompt):
    return [text for event in agent.run(prompt, stream=True) if (text := text_of(event))]


async def astream(agent, prompt):
    return [text async for event in agent.arun(prompt, stream=True) if (text := text_of(event))]


def run(coroutine):
    return asyncio.run(coroutine)


def outcome(work):
    """What a run comes to: versions raise an error of the model, or tell it."""
    try:
        output = work()
    except Exception as error:
        return type(error).__name__
    return str(getattr(output, "status", output))


class TestConformance(AgentPrograms, PluginConformance):
    framework = "agno"

    def patched(self):
        tools = [(FunctionCall, name) for name in ("execute", "aexecute")]
        asking = [(Told, name) for name in ("invoke", "ainvoke", "invoke_stream", "ainvoke_stream")]
        return [*ways(), *tools, *asking, (Model, "create_function_call_result"), (Model, "get_function_calls_to_run")]

    def make(self, name, url, *tools, **client):
        return make(name, model(url, **client), *tools)

    def ask(self, agent, prompt):
        return ask(agent, prompt)

    async def answer(self, agent, prompt):
        return await aask(agent, prompt)

    def stream(self, agent, prompt):
        return stream(agent, prompt)

    def unnamed(self, url):
        with agent("writer"):
            return Agent(model=model(url), instructions=instructions("writer")).run(PROMPTS["unnamed"]).content

    def namesakes(self, url):
        def work(name):
            team = Team(name=name, members=[make("writer", url)], model=model(url), system_message=instructions(name))
            return ask(team, 'call delegate_task_to_member {"member_id": "writer", "task": "hello"}')

        return [work("red"), work("blue")]

    def abandoned(self, url):
        for event in make("writer", url).run(PROMPTS["abandoned"], stream=True):
            if text := text_of(event):
                return text
        return None

    def responses(self, url):
        return ask(make("writer", model(url, OpenAIResponses)), PROMPTS["responses"])

    def responses_streaming(self, url):
        return stream(make("writer", model(url, OpenAIResponses)), PROMPTS["responses_streaming"])

    def choices(self, url):
        return ask(make("writer", model(url, request_params={"n": 2})), PROMPTS["choices"])

    def parallel_tools(self, url):
        return run(aask(make("caller", url, add), PROMPTS["parallel_tools"]))

    def nested(self, url):
        @tool(name="ask")
        def ask_writer(question: str) -> str:
            """Ask the writer."""
            return ask(make("writer", url), question)

        return ask(make("boss", url, ask_writer), PROMPTS["nested"])

    def failed(self, url):
        agent = make("writer", model(url, max_retries=0))
        return outcome(lambda: agent.run(PROMPTS["failed"]))

    def slow(self, url):
        agent = make("writer", model(url, max_retries=0, timeout=TIMEOUT_S))
        return outcome(lambda: agent.run(PROMPTS["slow"]))

    def cut(self, url):
        return outcome(lambda: len(stream(make("writer", model(url, max_retries=0)), PROMPTS["cut"])))

    def heard_by_hooks(self, url):
        return [heard_by_hooks(given) for given in (url, Told())]

    async def heard_by_asynchronous_hooks(self, url):
        return [await heard_by_asynchronous_hooks(given) for given in (url, Told())]


def heard_by_hooks(given):
    seen = []
    post = [lambda run_output: seen.append(run_output.content)]

    def around(function_name, function_call, arguments):
        seen.append([function_name, arguments])
        return function_call(**arguments)

    return [ask(make("writer", given, add, post_hooks=post, tool_hooks=[around]), PROMPTS["tool_call"]), seen]


async def heard_by_asynchronous_hooks(given):
    seen = []

    async def after(run_output):
        seen.append(run_output.content)

    async def around(function_name, function_call, arguments):
        seen.append([function_name, arguments])
        return await function_call(**arguments)

    return [await aask(make("writer", given, add, post_hooks=[after], tool_hooks=[around]), PROMPTS["tool_call"]), seen]


class Told(Model):
    """A model that is reached without a client."""

    def __init__(self):
        super().__init__(id="told", name="Told", provider="Teller")

    def _answer(self, messages, tools):
        if messages[-1].content == "fail":
            raise ConnectionError("gone")
        if tools and messages[-1].role != "tool":
            call = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
            return [ModelResponse(role="assistant", tool_calls=[call])]
        return [ModelResponse(role="assistant", content="it "), ModelResponse(content="is 5")]

    def invoke(self, messages, assistant_message, response_format=None, tools=None, **options):
        answers = self._answer(messages, tools)
        return ModelResponse(
            role="assistant",
            content="".join(part.content or "" for part in answers) or None,
            tool_calls=[call for part in answers for call in part.tool_calls],
        )

    async def ainvoke(self, messages, assistant_message, response_format=None, tools=None, **options):
        return self.invoke(messages, assistant_message, response_format, tools)

    def invoke_stream(self, messages, assistant_message, response_format=None, tools=None, **options):
        yield from self._answer(messages, tools)

    async def ainvoke_stream(self, messages, assistant_message, response_format=None, tools=None, **options):
        for part in self._answer(messages, tools):
            yield part

    def _parse_provider_response(self, response, **options):
        return response

    def _parse_provider_response_delta(self, response):
        return response


WAYS = {
    "run": ask,
    "arun": lambda agent, prompt: run(aask(agent, prompt)),
    "run, streamed": lambda agent, prompt: "".join(stream(agent, prompt)),
    "arun, streamed": lambda agent, prompt: "".join(run(astream(agent, prompt))),
}
each_way = pytest.mark.parametrize("way", WAYS)


@each_way
def test_every_way_to_run_an_agent_is_recorded_alike(way, found_of):
    found = found_of(lambda url: WAYS[way](make("caller", url, add), PROMPTS["tool_call"]) and None)
    assert [(s.operation, s.agent, s.status) for s in found.spans] == [
        ("invoke_agent", "caller", "ok"),
        ("chat", "caller", "ok"),
        ("execute_tool", "caller", "ok"),
        ("chat", "caller", "ok"),
    ]
    assert {span.parent_id for span in found.spans} == {None, found.spans[0].span_id}
    (called,) = found.tools
    assert called.attributes[names.TOOL_RESULT] == "5"


DELEGATION = 'call delegate_task_to_member {"member_id": "the-writer", "task": "hello"}'


def the_team(url, **options):
    members = [
        Agent(name="The Writer", role="writes", model=model(url), instructions=instructions("writer")),
        Agent(name="critic", role="judges", model=model(url), instructions=instructions("critic")),
    ]
    return Team(name="boss", members=members, model=model(url), system_message=instructions("boss"), **options)


@each_way
def test_a_team_delegates_by_a_tool_under_which_its_member_works(way, found_of):
    found = found_of(lambda url: WAYS[way](the_team(url), DELEGATION) and None)
    team, member = [span for span in found.spans if span.operation == names.INVOKE_AGENT]
    (delegation,) = found.tools
    assert (team.agent, delegation.agent, member.agent) == ("boss", "boss", "The Writer")
    assert (delegation.parent_id, member.parent_id) == (team.span_id, delegation.span_id)
    assert delegation.attributes[names.HANDOFF] == "The Writer"
    assert "writer answers" in delegation.attributes[names.TOOL_RESULT]
    assert member.attributes[names.AGENT_PATH] == "boss/The Writer"
    assert [chat.agent for chat in found.chats] == ["boss", "The Writer", "boss"]
    assert [chat.parent_id for chat in found.chats] == [team.span_id, member.span_id, team.span_id]
    assert {span.status for span in found.spans} == {"ok"}


@each_way
def test_a_delegation_to_a_member_that_is_not_there_is_an_error_and_hands_over_to_nobody(way, found_of):
    nobody = 'call delegate_task_to_member {"member_id": "nobody", "task": "hello"}'
    found = found_of(lambda url: WAYS[way](the_team(url), nobody) and None)
    (delegation,) = found.tools
    assert (delegation.agent, delegation.status) == ("boss", "error")
    assert "nobody not found" in delegation.status_message
    assert names.TOOL_RETURNED in delegation.attributes  # a replay returns it
    assert names.HANDOFF not in delegation.attributes


@each_way
def test_a_team_that_delegates_to_all_is_one_tree(way, found_of):
    all_of_them = {next(name for name in vars(Team) if name.startswith("delegate_") and "all" in name): True}

    def program(url):
        WAYS[way](the_team(url, **all_of_them), 'call delegate_task_to_members {"task": "hello"}')

    found = found_of(program)
    team, *members = [span for span in found.spans if span.operation == names.INVOKE_AGENT]
    (delegation,) = found.tools
    assert sorted(member.agent for member in members) == ["The Writer", "critic"]
    assert {member.parent_id for member in members} == {delegation.span_id}
    assert delegation.parent_id == team.span_id
    assert names.HANDOFF not in delegation.attributes  # to nobody alone
    assert len(found.chats) == 4


@pytest.mark.parametrize("way", ["run", "arun"])
def test_a_delegation_is_given_again_in_a_replay(way, tmp_path):
    outputs, spans = run_twice(lambda url: WAYS[way](the_team(url), DELEGATION), tmp_path, "agno")
    assert outputs[0] == outputs[1]
    assert {span.agent for span in spans if span.operation == names.CHAT} == {"boss"}
    (delegation,) = [span for span in spans if span.operation == names.EXECUTE_TOOL]
    assert delegation.attributes[names.REPLAYED] is True


@pytest.mark.skipif(Workflow is None, reason="without fastapi version 2 has no workflows")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_workflow_is_one_trace(asynchronous, streamed, found_of):
    def program(url):
        flow = Workflow(name="flow", steps=[make("writer", url), make("critic", url)])
        if not asynchronous:
            given = flow.run("hello", stream=streamed)
            return len(list(given)) and None if streamed else given.content

        async def work():
            if streamed:
                return [event async for event in flow.arun("hello", stream=True)] and None
            return (await flow.arun("hello")).content

        return run(work())

    found = found_of(program)
    (root,) = [span for span in found.spans if span.parent_id is None]
    assert (root.operation, root.name, root.status) == (names.INVOKE_WORKFLOW, "flow", "ok")
    assert [chat.agent for chat in found.chats] == ["writer", "critic"]


def test_a_tools_error_has_its_kind_and_is_told_to_hooks(found_of):
    heard = []

    def around(function_name, function_call, arguments):
        heard.append(function_name)
        return function_call(**arguments)

    found = found_of(lambda url: ask(make("caller", url, fail, tool_hooks=[around]), PROMPTS["tool_error"]))
    assert heard == ["fail"]
    (called,) = found.tools
    assert (called.status, called.status_message) == ("error", "out of order")
    assert called.attributes[names.ERROR_TYPE].endswith("ValueError")


def test_a_tool_that_stops_the_run_is_one_span(found_of):
    def stop() -> str:
        """Stop."""
        raise StopAgentRun("enough")

    (called,) = found_of(lambda url: ask(make("caller", url, stop), "call stop {}") and None).tools
    assert (called.name, called.status, called.status_message) == ("stop", "error", "enough")


def test_a_tool_that_is_a_generator_is_whole(tmp_path):
    def count(upto: int):
        """Count."""
        for number in range(upto):
            yield write_note(str(number))

    outputs, spans = run_twice(lambda url: ask(make("caller", url, count), 'call count {"upto": 2}'), tmp_path, "agno")
    assert outputs[0] == outputs[1]
    (called,) = [span for span in spans if span.operation == names.EXECUTE_TOOL]
    assert called.attributes[names.TOOL_RESULT].count("note") == 2
    assert called.attributes[names.TOOL_RESULT] in outputs[0]


def test_arguments_that_do_not_fit_are_an_error(found_of):
    (called,) = found_of(lambda url: ask(make("caller", url, add), 'call add {"a": "one", "b": 2}')).tools
    assert (called.name, called.status) == ("add", "error")
    assert called.status_message


def test_a_call_over_the_limit_is_an_error(found_of):
    found = found_of(lambda url: ask(make("caller", url, add, tool_call_limit=1), PROMPTS["parallel_tools"]))
    assert [(called.name, called.status) for called in found.tools] == [("add", "ok"), ("add", "error")]
    assert "limit" in found.tools[1].status_message


def test_a_function_has_its_own_code_back_after_a_call(found_of):
    seen = []

    def around(fc):
        seen.append((fc.function, fc.function.entrypoint))

    @tool(pre_hook=around)
    def plus(a: int, b: int) -> int:
        """Add."""
        return a + b

    found_of(lambda url: ask(make("caller", url, plus), 'call plus {"a": 2, "b": 3}'))
    ((function, during),) = seen
    assert function.entrypoint is not during
    assert during.__wrapped__ is function.entrypoint


@each_way
def test_a_run_that_fails_is_an_error(way, found_of):
    def program(url):
        with pytest.MonkeyPatch.context():
            return outcome(lambda: WAYS[way](make("writer", model(url, max_retries=0)), PROMPTS["failed"]))

    found = found_of(program)
    assert [(span.operation, span.status) for span in found.spans] == [("invoke_agent", "error"), ("chat", "error")]
    assert all(span.status_message for span in found.spans)


@each_way
def test_a_model_reached_elsewhere_is_one_chat_span(way, found_of):
    found = found_of(lambda url: WAYS[way](make("writer", Told(), add), "hello"))
    assert found.output.endswith("it is 5")
    assert [(chat.agent, chat.status) for chat in found.chats] == [("writer", "ok")] * 2
    first, second = found.chats
    request = json.loads(first.attributes[names.REQUEST])
    assert [turn["role"] for turn in request["messages"]] == ["system", "user"]
    assert request["tools"][0]["function"]["name"] == "add"
    asked = json.loads(first.attributes[names.RESPONSE])["choices"][0]["message"]["tool_calls"]
    assert asked[0]["id"] == found.tools[0].attributes[names.TOOL_CALL_ID] == "call-1"
    roles = [turn["role"] for turn in json.loads(second.attributes[names.REQUEST])["messages"]]
    assert roles[-2:] == ["assistant", "tool"]
    assert json.loads(second.attributes[names.RESPONSE])["choices"][0]["message"]["content"] == "it is 5"
    assert first.attributes[names.STREAMED] is ("streamed" in way)


def test_a_model_reached_elsewhere_that_fails_is_an_error(found_of):
    (chat,) = found_of(lambda url: outcome(lambda: make("writer", Told()).run("fail"))).chats
    assert (chat.status, chat.status_message, chat.agent) == ("error", "gone", "writer")


def test_a_run_that_waits_for_its_user_goes_on_by_name(found_of):
    @tool(requires_confirmation=True)
    def plus(a: int, b: int) -> int:
        """Add."""
        return a + b

    def program(url):
        agent = make("caller", url, plus)
        waits = agent.run('call plus {"a": 2, "b": 3}')
        for asked in waits.tools:
            asked.confirmed = True
        return agent.continue_run(run_response=waits).content

    found = found_of(program)
    assert [chat.agent for chat in found.chats] == ["caller"] * 2
    assert [(called.name, called.agent, called.status) for called in found.tools] == [("plus", "caller", "ok")]


def test_only_the_attempts_own_agent_is_rerouted_from_inside_a_team(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    with ScriptedServer() as origin, ScriptedServer() as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("The Writer",))
        with lightning_agno.attach(store=str(tmp_path / "traces.db")) as attachment, use_attempt(attempt):
            ask(the_team(origin.url), DELEGATION)
            attachment.flush(60)
        assert {agent_of(request.body) for request in policy.requests} == {"writer"}
        assert {agent_of(request.body) for request in origin.requests} == {"boss"}
        assert len({span_of(request) for request in [*policy.requests, *origin.requests]}) == 3


def test_detaching_ends_what_is_open(operations_until_stopped):
    operations = operations_until_stopped(lambda url, stop: ask(make("caller", url, stop), "call stop {}"))
    assert operations == ["chat", "execute_tool", "invoke_agent"]
