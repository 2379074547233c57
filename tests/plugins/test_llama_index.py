from __future__ import annotations

import asyncio
import gc
import json
import weakref

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.agent.workflow.base_agent import BaseWorkflowAgent
from llama_index.core.bridge.pydantic import Field
from llama_index.core.callbacks import CallbackManager
from llama_index.core.callbacks.base_handler import BaseCallbackHandler
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.llms import ChatMessage, CustomLLM, LLMMetadata, MockLLM
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike

import lightning_llama_index
from lightning_conformance.plugins.program import span_of
from lightning_conformance.plugins.programs import AgentPrograms, add, note
from lightning_conformance.plugins.script import Reply, ScriptedToolCall, agent_of
from lightning_conformance.plugins.server import ScriptedServer
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    REPLAY_PROMPTS,
    PluginConformance,
    instructions,
)
from lightning_spans import Attempt, agent, use_attempt
from lightning_spans.schema import spans as names


def model(url, **options):
    return OpenAILike(
        model=MODEL, api_base=url, is_chat_model=True, is_function_calling_model=True, reuse_client=False, **options
    )


def make(name, url_or_model, *tools, **options):
    given = model(url_or_model) if isinstance(url_or_model, str) else url_or_model
    options = {"streaming": False, **options}
    return FunctionAgent(name=name, system_prompt=instructions(name), tools=list(tools), llm=given, **options)


async def ask(agent, prompt, **options):
    return str(await agent.run(prompt, **options))


async def stream(agent, prompt):
    handler = agent.run(prompt)
    pieces = [event.delta async for event in handler.stream_events() if isinstance(event, AgentStream)]
    return [*pieces, str(await handler)]


def run(coroutine):
    return asyncio.run(coroutine)


class TestConformance(AgentPrograms, PluginConformance):
    framework = "llama-index"
    unsupported = {  # noqa: RUF012
        "abandoned": "an agent reads its model's stream to the end, whoever listens",
        "unreadable_arguments": "LlamaIndex reads what it can of them, and drops the text",
    }

    def patched(self):
        return [
            (Workflow, "run"),
            (AgentWorkflow, "run_agent_step"),
            (AgentWorkflow, "call_tool"),
            (BaseWorkflowAgent, "call_tool"),
            (MockLLM, "complete"),
        ]

    def make(self, name, url, *tools, **client):
        return make(name, model(url, **client), *tools)

    async def answer(self, agent, prompt):
        return await ask(agent, prompt)

    def unnamed(self, url):
        with agent("writer"):
            return run(
                ask(
                    FunctionAgent(system_prompt=instructions("writer"), llm=model(url), streaming=False),
                    PROMPTS["unnamed"],
                )
            )

    def namesakes(self, url):
        async def work(team):
            async def consult() -> str:
                """Consult."""
                return await ask(make("writer", url), PROMPTS["namesakes"])

            return await ask(make(team, url, consult), "call consult {}")

        async def both():
            return await asyncio.gather(work("red"), work("blue"))

        return run(both())

    def streaming(self, url):
        return run(stream(make("writer", url, streaming=True), PROMPTS["streaming"]))

    def responses(self, url):  # with a tool: llama-index-llms-openai 0.5.0 can't do without
        return run(ask(make("writer", responses(url), add), PROMPTS["responses"]))

    def responses_streaming(self, url):
        return run(stream(make("writer", responses(url), add, streaming=True), PROMPTS["responses_streaming"]))

    def choices(self, url):
        return run(ask(make("writer", model(url, additional_kwargs={"n": 2})), PROMPTS["choices"]))

    def cut(self, url):
        with pytest.raises(Exception) as error:  # noqa: PT011 - which one depends on the version
            run(stream(make("writer", url, streaming=True), PROMPTS["cut"]))
        return type(error.value).__name__

    def effects(self, url):
        said = run(ask(make("caller", url, note), REPLAY_PROMPTS["effects"]))
        return sorted(said.split())  # LlamaIndex tells the model what tools gave in the order in which they end

    def heard_by_the_reader_of_events(self, url):
        async def work():
            handler = make("writer", url).run(PROMPTS["one_agent"])
            seen = [type(event).__name__ async for event in handler.stream_events()]
            return [str(await handler), seen]

        return run(work())

    def heard_by_event_handlers(self, url):
        async def work(llm):
            said = [ChatMessage(role="system", content=instructions("writer")), ChatMessage(role="user", content="hi")]
            await llm.achat(said)
            [_ async for _ in await llm.astream_chat(said)]
            llm.chat(said)
            list(llm.stream_chat(said))

        handler, manager = HearsEvents(), HearsPayloads([], [])
        get_dispatcher().add_event_handler(handler)
        try:
            with agent("writer"):
                for llm in (model(url), MockLLM()):
                    llm.callback_manager = CallbackManager([manager])
                    run(work(llm))
        finally:
            get_dispatcher().event_handlers.remove(handler)
        return handler.seen, manager.seen


class HearsEvents(BaseEventHandler):
    """A user's own handler of LlamaIndex's events."""

    seen: list = Field(default_factory=list)

    def handle(self, event, **options):
        self.seen.append(event.class_name())


class HearsPayloads(BaseCallbackHandler):
    """A user's own callbacks."""

    def __init__(self, *ignored):
        super().__init__(*ignored)
        self.seen = []

    def on_event_start(self, event_type, payload=None, event_id="", parent_id="", **options):
        self.seen.append(["start", event_type.value, sorted(payload or {})])
        return event_id

    def on_event_end(self, event_type, payload=None, event_id="", **options):
        self.seen.append(["end", event_type.value, sorted(payload or {})])

    def start_trace(self, trace_id=None):
        pass

    def end_trace(self, trace_id=None, trace_map=None):
        pass


def responses(url):
    return OpenAIResponses(model="gpt-4o-mini", api_base=url, reuse_client=False)


def paths(found):
    """Return the paths of the agents that made the calls, in order."""
    by_id = {span.span_id: span for span in found.spans}
    return [by_id[chat.parent_id].attributes[names.AGENT_PATH] for chat in found.chats]


def hands_off(body, seen):
    """As `boss`, hand over to the writer, who answers."""
    if agent_of(body) == "boss":
        return Reply(tool_calls=[ScriptedToolCall("handoff", '{"to_agent": "writer", "reason": "words"}')])
    return Reply("done")


@pytest.mark.parametrize("streaming", [False, True])
def test_agents_that_hand_over_are_one_after_the_other_in_one_run(streaming, found_of):
    def program(url):
        with ScriptedServer(hands_off) as server:
            boss = make("boss", server.url, description="decides", can_handoff_to=["writer"], streaming=streaming)
            writer = make("writer", server.url, description="writes", streaming=streaming)
            team = AgentWorkflow(agents=[boss, writer], root_agent="boss")

            async def work():
                return str(await team.run("hello"))

            return run(work())

    found = found_of(program)
    assert found.output == "done"
    assert [chat.agent for chat in found.chats] == ["boss", "writer"]
    assert [(tool.name, tool.agent, tool.status) for tool in found.tools] == [("handoff", "boss", "ok")]
    root, *rest = sorted(found.spans, key=lambda span: span.start_ns)
    assert (root.operation, root.name, root.parent_id) == (names.INVOKE_WORKFLOW, "AgentWorkflow", None)
    turns = [span for span in rest if span.operation == names.INVOKE_AGENT]
    assert [(turn.name, turn.parent_id, turn.status) for turn in turns] == [
        ("boss", root.span_id, "ok"),
        ("writer", root.span_id, "ok"),
    ]
    assert turns[0].end_ns <= turns[1].start_ns


@pytest.mark.parametrize("to", ["nobody", "critic"])
def test_a_handoff_to_an_agent_that_is_not_there_or_not_allowed_is_an_error_and_hands_over_to_nobody(to, found_of):
    def script(body, seen):
        if body["messages"][-1]["role"] == "user":
            return Reply(tool_calls=[ScriptedToolCall("handoff", json.dumps({"to_agent": to, "reason": "words"}))])
        return Reply("done")

    def program(url):
        with ScriptedServer(script) as server:
            boss = make("boss", server.url, description="decides", can_handoff_to=["writer"])
            others = [make(name, server.url, description="writes") for name in ("writer", "critic")]
            team = AgentWorkflow(agents=[boss, *others], root_agent="boss")

            async def work():
                return str(await team.run("hello"))

            return run(work())

    found = found_of(program)
    assert [chat.agent for chat in found.chats] == ["boss", "boss"]
    (tool,) = found.tools
    assert (tool.name, tool.status) == ("handoff", "error")
    assert f"Agent {to} " in tool.status_message
    assert names.HANDOFF not in tool.attributes


def test_only_one_of_a_team_is_rerouted(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk")
    with ScriptedServer(hands_off) as origin, ScriptedServer() as policy:
        attempt = Attempt("r", "a", endpoint=policy.base, key="k", agents=("writer",))
        boss = make("boss", origin.url, description="decides", can_handoff_to=["writer"])
        team = AgentWorkflow(agents=[boss, make("writer", origin.url, description="writes")], root_agent="boss")

        async def work():
            return str(await team.run("hello"))

        attachment = lightning_llama_index.attach(store=str(tmp_path / "traces.db"))
        with attachment, use_attempt(attempt):
            run(work())
            attachment.flush(60)
        assert {agent_of(request.body) for request in policy.requests} == {"writer"}
        assert {agent_of(request.body) for request in origin.requests} == {"boss"}
        assert len({span_of(request) for request in [*policy.requests, *origin.requests]}) == 2


def test_a_react_agent_calls_its_tools(found_of):
    def script(body, seen):
        if any("Observation: 5" in str(message["content"]) for message in body["messages"]):
            return Reply("Thought: I can answer.\nAnswer: 5")
        return Reply('Thought: I need a tool.\nAction: add\nAction Input: {"a": 2, "b": 3}')

    def program(url):
        with ScriptedServer(script) as server:
            caller = ReActAgent(name="caller", system_prompt=instructions("caller"), tools=[add], llm=model(server.url))
            return run(ask(caller, "2 + 3"))

    found = found_of(program)
    assert found.output == "5"
    assert [chat.agent for chat in found.chats] == ["caller"] * 2
    (tool,) = found.tools
    assert (tool.name, tool.agent, tool.status, tool.attributes[names.TOOL_RESULT]) == ("add", "caller", "ok", "5")


def test_a_tool_that_does_not_exist_is_an_error(found_of):
    found = found_of(lambda url: run(ask(make("caller", url, add), 'call multiply {"a": 2}')))
    (tool,) = found.tools
    assert (tool.name, tool.agent, tool.status) == ("multiply", "caller", "error")
    assert "not found" in tool.status_message


def test_arguments_that_do_not_fit_are_an_error(found_of):
    found = found_of(lambda url: run(ask(make("caller", url, add), 'call add {"a": 2}')))
    (tool,) = found.tools
    assert (tool.name, tool.status) == ("add", "error")
    assert json.loads(tool.attributes[names.TOOL_ARGUMENTS]) == {"a": 2}


class Planned(Event):
    """A plan is made."""


class Counted(Event):
    """It is counted."""


class Flow(Workflow):
    """A workflow of the user's own, which says who is at work."""

    def __init__(self, url):
        super().__init__()
        self.llm = model(url)

    @step
    async def write(self, ev: StartEvent) -> StopEvent:
        with agent("writer"):
            first = await self.llm.achat([ChatMessage(role="user", content="hello")])
        inner = await ask(make("critic", self.llm), "hello")
        return StopEvent(result=[first.message.content, inner])


def test_a_workflow_of_the_users_own_is_one_trace(found_of):
    async def work(url):
        return await Flow(url).run()

    found = found_of(work)
    assert [chat.agent for chat in found.chats] == ["writer", "critic"]
    (root,) = [span for span in found.spans if span.parent_id is None]
    assert (root.operation, root.name) == (names.INVOKE_WORKFLOW, "Flow")


class Steps(Workflow):
    """A workflow whose steps are agents, if they call a model."""

    def __init__(self, url):
        super().__init__()
        self.llm = model(url)

    @step
    async def plan(self, ev: StartEvent) -> Planned:
        await self.llm.achat([ChatMessage(role="user", content="hello")])
        return Planned()

    @step
    def count(self, ev: Planned) -> Counted:
        return Counted()

    @step
    def write(self, ev: Counted) -> StopEvent:
        with agent("critic"):
            self.llm.chat([ChatMessage(role="user", content="hello")])
        return StopEvent(result=self.llm.chat([ChatMessage(role="user", content="hello")]).message.content)


def test_a_step_that_calls_a_model_is_an_agent(found_of):
    async def work(url):
        return await Steps(url).run()

    before = dict(vars(Steps))
    found = found_of(work)
    assert [chat.agent for chat in found.chats] == ["plan", "critic", "write"]
    steps = [span.name for span in found.spans if span.operation == names.INVOKE_AGENT]
    assert sorted(steps) == ["critic", "plan", "write"], "a step that calls no model is no agent"
    assert len({span.trace_id for span in found.spans}) == 1
    assert {name: vars(Steps)[name] for name in before} == before, "detaching puts the steps back"


def test_a_workflow_that_is_defined_in_a_task_is_freed_after_it(found_of):
    async def once(url):
        class Own(Workflow):
            @step
            async def write(self, ev: StartEvent) -> StopEvent:
                return StopEvent(
                    result=(await model(url).achat([ChatMessage(role="user", content="hi")])).message.content
                )

        await Own().run()
        return weakref.ref(Own)

    freed = []

    async def work(url):
        own = await once(url)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # of the run
            await asyncio.wait(others)
        gc.collect()
        freed.append(own() is None)

    found_of(work)
    assert freed == [True]


def test_a_run_that_fails_or_is_cancelled_is_an_error(found_of, under_way):
    async def work(url):
        with pytest.raises(Exception):  # noqa: B017, PT011 - which one depends on the version
            await ask(make("left", model(url, max_retries=0)), "fail 500 9")
        task = asyncio.create_task(ask(make("right", url), "wait 5"))
        await under_way()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    found = found_of(work)
    agents = {span.name: span.status for span in found.spans if span.operation == names.INVOKE_AGENT}
    assert agents == {"left": "error", "right": "error"}


def test_a_model_reached_elsewhere_is_one_chat_span(found_of):
    def program(url):
        async def work():
            llm = MockLLM()
            messages = [ChatMessage(role="user", content="hello")]
            with agent("writer"):
                answers = [(await llm.achat(messages)).message.content, llm.complete("hello").text]
                answers += [[piece.delta async for piece in await llm.astream_chat(messages)]]
                return [*answers, [piece.delta for piece in llm.stream_complete("hello")]]

        return run(work())

    found = found_of(program)
    assert [(chat.agent, chat.status) for chat in found.chats] == [("writer", "ok")] * 4
    assert [bool(chat.attributes[names.STREAMED]) for chat in found.chats] == [False, False, True, True]
    for chat in found.chats:
        assert json.loads(chat.attributes[names.REQUEST])["messages"] == [{"role": "user", "content": "hello"}]
        message = json.loads(chat.attributes[names.RESPONSE])["choices"][0]["message"]
        assert "hello" in message["content"]


class Broken(CustomLLM):
    @property
    def metadata(self):
        return LLMMetadata(model_name="broken")

    def complete(self, prompt, formatted=False, **kwargs):
        raise ConnectionError("gone")

    def stream_complete(self, prompt, formatted=False, **kwargs):
        raise ConnectionError("gone")


def test_a_model_reached_elsewhere_that_fails_is_an_error(found_of):
    def program(url):
        with agent("writer"), pytest.raises(ConnectionError):
            Broken().complete("hello")

    (chat,) = found_of(program).chats
    assert (chat.status, chat.status_message, chat.agent) == ("error", "gone", "writer")


def test_detaching_ends_what_is_open(operations_until_stopped):
    operations = operations_until_stopped(lambda url, stop: run(ask(make("caller", url, stop), "call stop {}")))
    assert operations == ["chat", "execute_tool", "invoke_agent"]
