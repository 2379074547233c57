from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from support.listening import check_calls

# Before CrewAI is imported: it makes what it sends home with when it is. And it asks nobody whether it may.
os.environ |= {f"CREWAI_{name}": "true" for name in ("DISABLE_TELEMETRY", "DISABLE_TRACKING", "TESTING")}
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # else LiteLLM fetches prices when it is imported
crewai = pytest.importorskip("crewai")

import openai
from crewai import LLM, Agent, Crew, Process, Task
from crewai.events import crewai_event_bus
from crewai.events.event_bus import CrewAIEventsBus
from crewai.events.types.llm_events import LLMCallCompletedEvent, LLMCallType
from crewai.flow.flow import Flow, listen, start
from crewai.knowledge.knowledge import Knowledge
from crewai.knowledge.storage.base_knowledge_storage import BaseKnowledgeStorage
from crewai.llms.base_llm import BaseLLM, llm_call_context
from crewai.tools import tool

from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.replayed import NOTES, run_twice
from lightning_conformance.plugins.script import Reply, agent_of
from lightning_conformance.plugins.suite import (
    MODEL,
    PROMPTS,
    REPLAY_PROMPTS,
    TIMEOUT_S,
    PluginConformance,
    write_note,
)
from lightning_crewai.agents import entries
from lightning_openai import other_clients
from lightning_spans import Attempt, use_attempt
from lightning_spans.schema import spans as names

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


def uncached(url):
    """Return an agent whose tool runs at every call: from a cache, equal calls would run once if the first is quick.

    The agent is told, not the crew: an agent has a cache of its own.
    """
    return make("caller", url, tools=[note], cache=False)


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


@tool("note")
def note(text: str) -> str:
    """Note a text."""
    return write_note(text)


class TestConformance(PluginConformance):
    framework = "crewai"
    unsupported: ClassVar[dict[str, str]] = {
        "unnamed": "an agent must have a role",
        "abandoned": "CrewAI itself reads a model's stream to its end, whoever reads its own",
        **({} if NEW else dict.fromkeys(["responses", "responses_streaming"], "the way through /responses is young")),
        **({} if NEW else dict.fromkeys(["unknown_tool", "unreadable_arguments"], "CrewAI tells nobody before 1.15")),
    }

    def patched(self):
        return [(CrewAIEventsBus, "emit"), (BaseLLM, "_emit_call_started_event"), *entries()]

    def one_agent(self, url):
        return ask("writer", url, PROMPTS["one_agent"])

    def several_agents(self, url):
        shared = model(url)
        roles = ("writer", "rewriter", "writer_2")
        tasks = [task(PROMPTS["several_agents"], make(role, shared)) for role in roles]
        return [output.raw for output in crew(*tasks).kickoff().tasks_output]

    def namesakes(self, url):
        crews = [crew(task(PROMPTS["namesakes"], make("writer", url)), name=name) for name in ("red", "blue")]
        return [one.kickoff().raw for one in crews]

    def responses(self, url):
        return ask("writer", model(url, api="responses"), PROMPTS["responses"])

    def responses_streaming(self, url):
        return ask("writer", model(url, api="responses", stream=True), PROMPTS["responses_streaming"])

    def choices(self, url):
        options = {"additional_params": {"n": 2}} if NEW else {"n": 2}
        return ask("writer", model(url, **options), PROMPTS["choices"])

    def streaming(self, url):
        return ask("writer", model(url, stream=True), PROMPTS["streaming"])

    def tool_call(self, url):
        return crew(task(PROMPTS["tool_call"], make("caller", url, tools=[add]))).kickoff().raw

    def parallel_tools(self, url):
        return ask("caller", url, PROMPTS["parallel_tools"], tools=[add])

    def tool_error(self, url):
        return crew(task(PROMPTS["tool_error"], make("caller", url, tools=[fail]))).kickoff().raw

    def unknown_tool(self, url):
        return crew(task(PROMPTS["unknown_tool"], make("caller", url, tools=[add]))).kickoff().raw

    def unreadable_arguments(self, url):
        return crew(task(PROMPTS["unreadable_arguments"], make("caller", url, tools=[add]))).kickoff().raw

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

    async def awaited(self, url):
        return (await crew(task(PROMPTS["awaited"], make("writer", url))).akickoff()).raw

    def threads(self, url):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda number: ask("writer", url, f"hello {number}"), range(2)))

    def retried(self, url):
        return ask("writer", model(url, max_retries=2), PROMPTS["retried"])

    def failed(self, url):
        with pytest.raises(Exception, match="fails 1 of 99") as error:
            crew(task(PROMPTS["failed"], make("writer", model(url, max_retries=0)))).kickoff()
        return type(error.value).__name__, str(error.value)

    def slow(self, url):
        with pytest.raises(Exception) as error:  # noqa: PT011 - which one depends on the version
            ask("writer", model(url, max_retries=0, timeout=TIMEOUT_S), PROMPTS["slow"])
        return type(error.value).__name__

    def cut(self, url):
        with pytest.raises(Exception) as error:  # noqa: PT011 - which one depends on the version
            ask("writer", model(url, stream=True), PROMPTS["cut"])
        return type(error.value).__name__

    def effects(self, url):
        return crew(task(REPLAY_PROMPTS["effects"], uncached(url))).kickoff().raw

    def effect_fails(self, url):
        return crew(task(REPLAY_PROMPTS["effect_fails"], make("caller", url, tools=[note]))).kickoff().raw

    async def effects_awaited(self, url):
        return (await crew(task(REPLAY_PROMPTS["effects_awaited"], uncached(url))).kickoff_async()).raw

    def heard_by_handlers_and_callbacks(self, url):
        return [heard_by_handlers_and_callbacks(given) for given in (url, Talker(model="talker"))]


def heard_by_handlers_and_callbacks(model):
    seen = []
    given = task(PROMPTS["one_agent"], make("writer", model, step_callback=lambda step: seen.append(step.output)))
    with crewai_event_bus.scoped_handlers():

        @crewai_event_bus.on(LLMCallCompletedEvent)
        def _(source, event):
            seen.append((event.agent_role, event.response))

        @crewai_event_bus.on(LLMCallCompletedEvent)
        async def _(source, event):
            seen.append(("async", event.agent_role, event.response))

        output = crew(given, task_callback=lambda done: seen.append(done.raw)).kickoff()
        crewai_event_bus.flush()
    return output.raw, sorted(map(str, seen))


@pytest.fixture
def server():
    with ScriptedServer() as scripted:
        yield scripted


def check_clean(seen, server):
    """Nothing of CrewAI is at work any more: the next call is nobody's."""
    before = len(seen.chats)
    ask_openai(server.url, "nobody")
    # A call that was given up may end meanwhile, where CrewAI made it in a thread.
    (chat,) = [span for span in seen.chats[before:] if "nobody" in span.attributes[names.REQUEST]]
    assert (chat.agent, chat.parent_id) == (None, None)


def ask_openai(url, text):
    messages = [{"role": "user", "content": text}]
    return openai.OpenAI(base_url=url).chat.completions.create(model=MODEL, messages=messages)


def until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came")


KICKOFFS = {
    "kickoff": lambda given: given.kickoff(),
    "kickoff_async": lambda given: run(given.kickoff_async()),
    "akickoff": lambda given: run(given.akickoff()),
}
each_kickoff = pytest.mark.parametrize("kickoff", KICKOFFS.values(), ids=KICKOFFS)
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


@each_kickoff
@STREAMED
def test_agents_in_a_row_are_under_the_crew(kickoff, streamed, server, seen):
    shared = model(server.url, stream=streamed)
    tasks = [task("hello", make("caller", shared, tools=[add])), task("hello", make("call", shared))]
    tasks[0].description = PROMPTS["tool_call"].join("\n\n")
    kickoff(crew(*tasks, name="team"))
    check_calls(seen, server)
    assert [span.name for span in seen.of(names.INVOKE_AGENT)] == ["caller", "call"]
    assert {tuple(seen.above(span)) for span in seen.of(names.INVOKE_AGENT)} == {((names.INVOKE_WORKFLOW, "team"),)}
    paths = [span.attributes[names.AGENT_PATH] for span in seen.of(names.INVOKE_AGENT)]
    assert paths == ["team/caller", "team/call"]
    check_clean(seen, server)


@each_kickoff
def test_a_manager_delegates_to_its_coworkers(kickoff, server, seen):
    boss = make("boss", server.url, allow_delegation=True)
    asked = json.dumps({"coworker": "writer", "question": "hello there", "context": "none"})
    given = task(f"call ask_question_to_coworker {asked}")
    writer = make("writer", server.url)
    kickoff(crew(given, agents=[writer], manager_agent=boss, process=Process.hierarchical))
    check_calls(seen, server)
    (delegated,) = [span for span in seen.chats if span.agent == "writer"]
    above = [step for step in seen.above(delegated) if step[0] != names.INVOKE_WORKFLOW]
    assert above == [
        (names.INVOKE_AGENT, "writer"),
        (names.EXECUTE_TOOL, "ask_question_to_coworker"),
        (names.INVOKE_AGENT, "boss"),
    ]
    (tool_span,) = seen.tools
    assert (tool_span.agent, tool_span.status) == ("boss", "ok")
    assert tool_span.attributes[names.HANDOFF] == "writer"
    assert "writer answers" in tool_span.attributes[names.TOOL_RESULT]
    assert {span.attributes[names.AGENT_PATH] for span in seen.of(names.INVOKE_AGENT)} == {"boss", "boss/writer"}
    check_clean(seen, server)


def test_a_question_to_a_coworker_who_is_not_there_is_an_error_and_hands_over_to_nobody(server, seen):
    boss = make("boss", server.url, allow_delegation=True)
    asked = json.dumps({"coworker": "nobody", "question": "hello there", "context": "none"})
    given = task(f"call ask_question_to_coworker {asked}")
    crew(given, agents=[make("writer", server.url)], manager_agent=boss, process=Process.hierarchical).kickoff()
    (tool_span,) = seen.tools
    assert (tool_span.agent, tool_span.status) == ("boss", "error")
    assert names.TOOL_RETURNED in tool_span.attributes  # a replay returns it
    assert names.HANDOFF not in tool_span.attributes
    check_clean(seen, server)


def test_the_manager_that_crewai_makes_is_named(server, seen):
    options = {"process": Process.hierarchical, "manager_llm": model(server.url)}
    crew(task("hello"), agents=[make("writer", server.url)], **options).kickoff()
    assert [span.agent for span in seen.chats] == ["Crew Manager"]
    assert len(seen.chats) == len(server.requests)
    check_clean(seen, server)


def test_a_crew_for_each_of_many_inputs_is_a_tree_each(server, seen):
    team = crew(task("say {word}", make("writer", server.url)))
    run(team.kickoff_for_each_async(inputs=[{"word": "one"}, {"word": "two"}]))
    check_calls(seen, server)
    assert [span.agent for span in seen.chats] == ["writer", "writer"]
    assert len([span for span in seen.spans if span.parent_id is None]) == 2
    check_clean(seen, server)


@each_kickoff
def test_asynchronous_tasks_keep_their_agents(kickoff, server, seen):
    tasks = [task("wait 0.05", make(role, server.url), async_execution=True) for role in ("left", "right")]
    last = task("hello", make("writer", server.url), context=tasks)
    kickoff(crew(*tasks, last))
    check_calls(seen, server)
    assert sorted(span.agent for span in seen.chats) == ["left", "right", "writer"]
    assert len({span.trace_id for span in seen.spans}) == 1
    check_clean(seen, server)


@pytest.mark.parametrize("way", ["kickoff", "kickoff_async", "akickoff"])
def test_an_agent_alone(way, server, seen):
    agent = make("caller", server.url, tools=[add])
    answer = getattr(agent, way)("\n" + PROMPTS["tool_call"])
    (run(answer) if asyncio.iscoroutine(answer) else answer).raw  # noqa: B018
    check_calls(seen, server)
    assert {seen.above(span)[0] for span in [*seen.chats, *seen.tools]} == {(names.INVOKE_AGENT, "caller")}
    check_clean(seen, server)


def test_crews_in_flows(server, seen):
    class Outline(Flow):
        @start()
        def draft(self):
            return crew(task("hello", make("writer", server.url))).kickoff().raw

        @listen(draft)
        async def rewrite(self, text):
            return (await make("rewriter", server.url).kickoff_async(text)).raw

        @listen(rewrite)
        def check(self, text):
            return model(server.url).call([{"role": "system", "content": "You are check."}, user(text)])

    flow = Outline()
    assert flow.kickoff().startswith("check answers")
    check_calls(seen, server)
    assert [span.agent for span in seen.chats] == ["writer", "rewriter", "check"]
    (root,) = [span for span in seen.spans if span.parent_id is None]
    assert (root.operation, root.name) == (names.INVOKE_WORKFLOW, "Outline")
    check_clean(seen, server)


def user(text):
    return {"role": "user", "content": text}


def test_a_flow_that_fails_is_an_error(server, seen):
    class Broken(Flow):
        @start()
        def draft(self):
            crew(task("hello", make("writer", server.url))).kickoff()
            raise RuntimeError("no outline")

    with pytest.raises(RuntimeError, match="no outline"):
        Broken().kickoff()
    check_calls(seen, server)
    (root,) = [span for span in seen.spans if span.parent_id is None]
    assert (root.name, root.status, root.status_message) == ("Broken", "error", "no outline")
    check_clean(seen, server)


@each_kickoff
def test_the_answer_forced_at_the_last_turn_is_the_agents(kickoff, server, seen):
    agent = make("caller", server.url, tools=[add], max_iter=1)
    kickoff(crew(task(PROMPTS["tool_call"], agent)))
    check_calls(seen, server)
    assert len(seen.chats) >= 2
    assert {seen.above(span)[0] for span in seen.chats} == {(names.INVOKE_AGENT, "caller")}


def test_tools_have_arguments_result_and_status(server, seen):
    prompt = 'call add {"a": 2, "b": 3}\ncall fail {"reason": "out of order"}'
    crew(task(prompt, make("caller", server.url, tools=[add, fail]))).kickoff()
    check_calls(seen, server)
    good, bad = sorted(seen.tools, key=lambda span: span.name)
    assert json.loads(good.attributes[names.TOOL_ARGUMENTS]) == {"a": 2, "b": 3}
    assert (good.attributes[names.TOOL_RESULT], good.status) == ("5", "ok")
    assert (bad.status, bad.status_message) == ("error", "out of order")
    assert bad.attributes[names.ERROR_TYPE] == "ValueError"
    assert {span.attributes[names.TOOL_CALL_ID] for span in (good, bad)} == {
        call["id"] for call in server.requests[0].answer["choices"][0]["message"]["tool_calls"]
    }


def test_the_same_call_twice_is_two_tools(server, seen):
    prompt = "\n".join([PROMPTS["tool_call"]] * 4)
    crew(task(prompt, make("caller", server.url, tools=[add]))).kickoff()
    asked = server.requests[0].answer["choices"][0]["message"]["tool_calls"]
    assert sorted(span.attributes[names.TOOL_CALL_ID] for span in seen.tools) == sorted(call["id"] for call in asked)


@pytest.mark.skipif(not NEW, reason="before 1.15 no event tells of a call whose arguments can't be read")
def test_a_call_whose_arguments_cannot_be_read_is_a_failed_tool(server, seen):
    crew(task("call add {bad", make("caller", server.url, tools=[add]))).kickoff()
    (span,) = seen.tools
    assert (span.name, span.agent, span.status) == ("add", "caller", "error")
    assert (span.attributes[names.TOOL_ARGUMENTS], "parse tool arguments" in span.status_message) == ("{bad", True)
    assert span.attributes[names.TOOL_CALL_ID].startswith("call_")


@pytest.mark.skipif(not NEW, reason="since 1.15 a tool can say that it failed")
def test_a_tool_that_says_it_failed_is_an_error(server, seen):
    from crewai.tools.tool_failure import ToolFailure

    @tool("post")
    def post(text: str) -> object:
        """Post."""
        return ToolFailure(message="no such channel")

    crew(task('call post {"text": "x"}', make("caller", server.url, tools=[post]))).kickoff()
    (span,) = seen.tools
    assert (span.status, span.status_message) == ("error", "no such channel")
    assert "no such channel" in span.attributes[names.TOOL_RESULT]


@tool("leave")
def leave(status: str) -> str:
    """Leave."""
    raise SystemExit(status)


def refuse(context):
    from crewai.hooks.dispatch import HookAborted

    raise HookAborted("too secret")


ABORTED = {
    "a tool that exits": ('call leave {"status": "bad arguments"}', None, "bad arguments"),
    "one of two": ('call leave {"status": "bad arguments"}\n' + PROMPTS["tool_call"], None, "bad arguments"),
    "a hook that refuses": (PROMPTS["tool_call"], refuse, "too secret"),
}


@pytest.mark.skipif(not NEW, reason="since 1.15 tools run in threads of their own, and nothing tells of their end")
@pytest.mark.parametrize("way", ABORTED)
def test_a_tool_that_is_aborted_is_an_error_that_ends_with_its_agent(way, server, seen):
    from crewai import hooks

    prompt, hook, why = ABORTED[way]
    if hook is not None:
        hooks.register_after_tool_call_hook(hook)
    try:
        with pytest.raises(BaseException, match=why):
            crew(task(prompt, make("caller", server.url, tools=[add, leave]))).kickoff()
    finally:
        if hook is not None:
            hooks.unregister_after_tool_call_hook(hook)
    aborted = [span for span in seen.tools if span.status == "error"]
    assert [(span.agent, span.status_message) for span in aborted] == [("caller", why)]
    assert seen.above(aborted[0])[0] == (names.INVOKE_AGENT, "caller")
    check_clean(seen, server)


class Talker(BaseLLM):
    """A model that is not reached through the openai client, and tells of its calls as CrewAI's own providers do."""

    answers: list | None = None
    fails: bool = False

    def supports_function_calling(self):
        return bool(self.answers)

    def call(self, messages, tools=None, from_task=None, from_agent=None, **options):
        with llm_call_context():
            self._emit_call_started_event(messages, tools=tools, from_task=from_task, from_agent=from_agent)
            if self.fails:
                for _ in range(2):  # as the providers do
                    self._emit_call_failed_event(error="gone", from_task=from_task, from_agent=from_agent)
                raise ConnectionError("gone")
            answer = self.answers.pop(0) if self.answers else "Thought: done\nFinal Answer: from elsewhere"
            kind = LLMCallType.LLM_CALL if isinstance(answer, str) else LLMCallType.TOOL_CALL
            self._emit_call_completed_event(answer, kind, from_task, from_agent, messages)
            return answer

    async def acall(self, *args, **options):
        return self.call(*args, **options)


def talker(**options):
    given = Talker(model="elsewhere-1", temperature=0.5)
    for name, value in options.items():
        setattr(given, name, value)
    return given


@pytest.mark.skipif(not NEW, reason="the way through /responses is young in 1.10")
def test_the_responses_endpoint(server, seen):
    crew(task(PROMPTS["tool_call"], make("caller", model(server.url, api="responses"), tools=[add]))).kickoff()
    crew(task("hello", make("writer", model(server.url, api="responses", stream=True)))).kickoff()
    check_calls(seen, server)
    assert {span.attributes[names.ENDPOINT] for span in seen.chats} == {"/responses"}
    (span,) = seen.tools
    asked = json.loads(seen.chats[0].attributes[names.RESPONSE])["output"][0]
    assert (span.attributes[names.TOOL_CALL_ID], span.attributes[names.TOOL_RESULT]) == (asked["call_id"], "5")


@each_kickoff
def test_a_model_reached_elsewhere_is_one_chat_span(kickoff, seen):
    asked = [{"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}]
    writer = make("writer", talker(answers=[asked, "Thought: done\nFinal Answer: 5"]), tools=[add])
    kickoff(crew(task("hello", writer)))
    first, second = seen.chats
    assert {(chat.agent, chat.name, chat.status) for chat in seen.chats} == {("writer", "elsewhere-1", "ok")}
    assert {seen.above(chat)[0] for chat in seen.chats} == {(names.INVOKE_AGENT, "writer")}
    request = json.loads(first.attributes[names.REQUEST])
    schema = request["tools"][0]["function"]["parameters"]  # whole: CrewAI's event cuts it
    assert schema["properties"]["a"]["type"] == "integer"
    assert sorted(schema["required"]) == ["a", "b"]
    assert first.attributes[names.REQUEST_TEMPERATURE] == 0.5
    assert json.loads(first.attributes[names.RESPONSE])["choices"][0]["message"]["tool_calls"] == asked
    assert json.loads(second.attributes[names.RESPONSE])["choices"][0]["message"]["content"].endswith("5")
    (span,) = seen.tools
    assert (span.attributes[names.TOOL_CALL_ID], span.attributes[names.TOOL_RESULT]) == ("call-1", "5")


def test_a_model_reached_elsewhere_that_fails_is_one_error(seen):
    with pytest.raises(ConnectionError):
        crew(task("hello", make("writer", talker(fails=True)))).kickoff()
    (chat,) = seen.chats
    assert (chat.agent, chat.status, chat.status_message) == ("writer", "error", "gone")
    assert {span.status for span in seen.spans} == {"error"}


def test_a_model_reached_elsewhere_is_said_to_be_untrainable(seen, caplog):
    other_clients._told.clear()
    attempt = Attempt("r", "a", endpoint="http://127.0.0.1:9", agents=("writer",))
    with use_attempt(attempt), caplog.at_level("WARNING", logger="lightning_spans"):
        crew(task("hello", make("writer", talker()))).kickoff()
    assert "'writer' is to be trained" in caplog.text


class Claude(BaseHTTPRequestHandler):
    """Answers as Anthropic does: asks for a tool, then says what came of it."""

    def log_message(self, *_):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        done = any(
            part.get("type") == "tool_result"
            for turn in body["messages"]
            for part in turn["content"][:1]
            if isinstance(part, dict)
        )
        use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 2, "b": 3}}
        content = [{"type": "text", "text": "It is 5."} if done else use]
        message = {"id": "msg_1", "type": "message", "role": "assistant", "model": body["model"], "content": content}
        message |= {"stop_reason": "end_turn" if done else "tool_use", "stop_sequence": None}
        message |= {"usage": {"input_tokens": 7, "output_tokens": 3}}
        raw = json.dumps(message).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def test_a_provider_of_crewais_own(seen, monkeypatch):
    pytest.importorskip("anthropic")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    with ThreadingHTTPServer(("127.0.0.1", 0), Claude) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        url = f"http://127.0.0.1:{http.server_address[1]}"
        claude = LLM(model="anthropic/claude-haiku-4-5", base_url=url)
        output = crew(task("hello", make("writer", claude, tools=[add]))).kickoff().raw
        http.shutdown()
    assert output == "It is 5."
    assert [(chat.agent, chat.status) for chat in seen.chats] == [("writer", "ok")] * 2
    assert all(chat.attributes[names.PROVIDER] == "anthropic" for chat in seen.chats)
    (span,) = seen.tools
    assert (span.attributes[names.TOOL_CALL_ID], span.attributes[names.TOOL_RESULT]) == ("toolu_1", "5")
    if NEW:
        assert [chat.attributes[names.RESPONSE_ID] for chat in seen.chats] == ["msg_1"] * 2
        assert [chat.attributes[names.OUTPUT_TOKENS] for chat in seen.chats] == [3, 3]


@STREAMED
def test_a_model_reached_through_litellm(streamed, seen):
    pytest.importorskip("litellm")
    given = LLM(model="ollama/moon", is_litellm=True, mock_response="far away", stream=streamed)
    assert crew(task("hello", make("writer", given))).kickoff().raw == "far away"
    (chat,) = seen.chats
    assert (chat.agent, chat.name, chat.status) == ("writer", "ollama/moon", "ok")
    assert chat.attributes[names.STREAMED] is streamed


def test_tools_in_the_text_of_an_answer(seen):
    answers = ['Thought: add\nAction: add\nAction Input: {"a": 2, "b": 3}', "Thought: done\nFinal Answer: 5"]
    given = talker(answers=answers)
    given.__class__ = type("Texter", (Talker,), {"supports_function_calling": lambda _: False})
    crew(task("hello", make("writer", given, tools=[add, fail]))).kickoff()
    (span,) = seen.tools
    assert (span.name, span.agent, span.status) == ("add", "writer", "ok")
    assert json.loads(span.attributes[names.TOOL_ARGUMENTS]) == {"a": 2, "b": 3}
    assert names.TOOL_CALL_ID not in span.attributes


@each_kickoff
def test_an_agent_that_tries_again_is_an_agent_again(kickoff, seen):
    replies = [Reply("not now", status=500), Reply("good")]
    with ScriptedServer(lambda *_: replies.pop(0) if replies else Reply("good")) as server:
        kickoff(crew(task("hello", make("writer", model(server.url, max_retries=0), max_retry_limit=2))))
        check_calls(seen, server)
        assert [span.status for span in seen.chats] == ["error", "ok"]
        assert [span.status for span in seen.of(names.INVOKE_AGENT)] == ["error", "ok"]
        above = {tuple(seen.above(span)) for span in seen.of(names.INVOKE_AGENT)}
        assert above == {((names.INVOKE_WORKFLOW, "crew"),)}
        check_clean(seen, server)


@pytest.mark.parametrize("left", [False, True], ids=["read", "left"])
def test_a_crew_that_streams(left, server, seen):
    streamed = crew(task("say one two three four", make("writer", model(server.url, stream=True))), stream=True)
    output = streamed.kickoff()
    for _ in output:
        if left:
            break
    until(lambda: seen.of(names.INVOKE_WORKFLOW))  # a crew that nobody listens to works on
    check_clean(seen, server)
    seen.spans[:] = [span for span in seen.spans if "nobody" not in span.attributes.get(names.REQUEST, "")]
    (chat,) = seen.chats
    assert (chat.agent, chat.status) == ("writer", "ok")
    assert seen.above(chat) == [(names.INVOKE_AGENT, "writer"), (names.INVOKE_WORKFLOW, "crew")]


def test_a_crew_that_is_given_up_leaves_nothing_behind(seen):
    async def work():
        me, loop = asyncio.current_task(), asyncio.get_running_loop()

        def give_up(body, _):
            if agent_of(body) != "writer":
                return Reply("good")
            loop.call_soon_threadsafe(me.cancel)
            return Reply("late", delay_s=0.5)

        with ScriptedServer(give_up) as server:
            with pytest.raises(asyncio.CancelledError):
                await crew(task("hello", make("writer", server.url))).akickoff()
            me.uncancel()
            await crew(task("hello", make("rewriter", server.url))).akickoff()
            check_clean(seen, server)

    run(work())
    roots = [(span.name, span.status) for span in seen.spans if span.parent_id is None and span not in seen.chats]
    assert roots == [("crew", "error"), ("crew", "ok")]
    until(lambda: len(seen.chats) == 3)  # a call that CrewAI made in a thread ends when it is answered
    assert {span.agent for span in seen.chats} == {"writer", "rewriter", None}
    known = {span.span_id for span in seen.spans}
    assert all(span.parent_id is None or span.parent_id in known for span in seen.spans)


def test_an_agent_with_a_time_limit_keeps_its_name(server, seen):
    crew(task(PROMPTS["tool_call"], make("caller", server.url, tools=[add], max_execution_time=30))).kickoff()
    check_calls(seen, server)
    check_clean(seen, server)


def test_a_model_asked_about_a_tasks_answer_is_its_agents(server, seen):
    shared = model(server.url)

    def polite(output):
        return True, shared.call([user("is this polite?")])

    crew(task("hello", make("writer", shared), guardrail=polite)).kickoff()
    assert [span.agent for span in seen.chats] == ["writer", "writer"]
    assert seen.above(seen.chats[1]) == [(names.INVOKE_WORKFLOW, "crew")]
    check_clean(seen, server)


def test_an_agent_that_its_own_guardrail_asks_is_under_itself(server, seen):
    judged = []

    def judge(output):
        if judged:
            return True, output.raw
        judged.append(output.raw)
        writer.kickoff("\nsay a verdict")
        return False, "\nsay a second draft"

    writer = make("writer", server.url, guardrail=judge)
    writer.kickoff("\nsay a draft")
    check_calls(seen, server)
    inner, outer = seen.of(names.INVOKE_AGENT)
    assert (inner.parent_id, outer.parent_id) == (outer.span_id, None)
    assert [span.parent_id for span in seen.chats] == [outer.span_id, inner.span_id, outer.span_id]
    check_clean(seen, server)


class Shelf(BaseKnowledgeStorage):
    """Knowledge that needs no model to be found."""

    def search(self, query, *args, **options):
        return [{"content": "The moon is far.", "id": "1", "metadata": {}, "score": 1.0}]

    async def asearch(self, query, *args, **options):
        return self.search(query)

    def save(self, documents):
        pass

    async def asave(self, documents):
        pass

    def reset(self):
        pass

    async def areset(self):
        pass


@each_kickoff
def test_knowledge_is_asked_for_in_the_name_of_the_agent(kickoff, server, seen):
    known = Knowledge(collection_name="moon", sources=[], storage=Shelf())
    writer = make("writer", server.url, knowledge=known)
    boss = make("boss", server.url, allow_delegation=True)
    asked = json.dumps({"coworker": "writer", "question": "hello there", "context": "none"})
    kickoff(crew(task(f"call ask_question_to_coworker {asked}", boss), agents=[boss, writer]))
    assert len(seen.chats) == len(server.requests) == 4
    assert [span.agent for span in seen.chats] == ["boss", "writer", "writer", "boss"]
    assert "The moon is far." in seen.chats[2].attributes[names.REQUEST]
    check_clean(seen, server)


def vectors(texts):
    return [[float(len(text) % 7), 1.0, 0.5, 0.25] for text in texts]


def test_memory(server, seen):
    from crewai.memory.unified_memory import Memory

    shared = model(server.url)
    kept = Memory(llm=shared, embedder=vectors)
    tasks = [task("hello there", make(role, shared)) for role in ("writer", "rewriter")]
    crew(*tasks, memory=kept).kickoff()
    spans = {span.span_id: span for span in seen.chats}
    assert len(spans) == len(server.requests) > 2
    for request in server.requests:
        agent = spans[request.headers["traceparent"].split("-")[2]].agent
        assert agent in {agent_of(request.body), "writer", "rewriter"}
        assert agent_of(request.body) in {None, agent} or "memory" in str(request.body)
    known = {span.span_id for span in seen.spans}
    assert all(span.parent_id is None or span.parent_id in known for span in seen.spans)
    check_clean(seen, server)


def test_a_client_called_inside_a_tool_is_the_tools_agents(server, seen):
    @tool("look_up")
    def look_up(word: str) -> str:
        """Look a word up."""
        with ThreadPoolExecutor(1) as pool:
            return next(pool.map(lambda _: ask_openai(server.url, word).choices[0].message.content, [0]))

    crew(task('call look_up {"word": "moon"}', make("caller", server.url, tools=[look_up]))).kickoff()
    (inner,) = [span for span in seen.chats if (names.EXECUTE_TOOL, "look_up") in seen.above(span)]
    assert inner.agent == "caller"


def test_a_role_from_a_file_is_a_name_without_spaces_around_it(server, seen):
    crew(task("hello", make("{topic}-writer\n", server.url))).kickoff(inputs={"topic": "moon"})
    (chat,) = seen.chats
    assert (chat.agent, seen.above(chat)[0]) == ("moon-writer", (names.INVOKE_AGENT, "moon-writer"))


def test_detaching_ends_what_is_open(operations_until_stopped):
    operations = operations_until_stopped(
        lambda url, stop: crew(task("call stop {}", make("caller", url, tools=[tool("stop")(stop)]))).kickoff()
    )
    assert operations == ["chat", "execute_tool", "invoke_agent", "invoke_workflow"]


def test_an_event_that_breaks_our_handler_harms_nothing(server, seen, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("ours")

    monkeypatch.setattr("lightning_crewai.agents.CrewTracker._begin", broken)
    assert ask("writer", server.url, "hello").startswith("writer answers")
    assert "lightning_crewai failed" in caplog.text


def test_crews_in_threads_keep_their_attempts_apart(server, seen):
    def work(number):
        with use_attempt(Attempt(f"r{number}", f"a{number}")):
            agent = make("caller", server.url_of(f"m{number}"), tools=[add])
            crew(task(PROMPTS["tool_call"], agent)).kickoff()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_id = {span.span_id: span for span in seen.chats}
    for request in server.requests:
        assert by_id[request.headers["traceparent"].split("-")[2]].attempt_id == f"a{request.path[2]}"
    assert {span.attempt_id for span in seen.spans} == {"a0", "a1", "a2"}


# Tools in a replay


def replayed(program, folder):
    """Run a program and a replay of it; give what both gave, how often a tool did something, and its spans."""
    before = len(NOTES)
    outputs, spans = run_twice(program, folder, "crewai")
    return outputs, len(NOTES) - before, [span for span in spans if span.operation == names.EXECUTE_TOOL]


@pytest.mark.parametrize("text", ["one", "fail"])
def test_a_tool_in_the_text_of_an_answer_is_not_run_again_in_a_replay(text, tmp_path):
    def program(url):
        action = f'Thought: note\nAction: note\nAction Input: {{"text": "{text}"}}'
        given = talker(answers=[action, "Thought: done\nFinal Answer: 5"])
        given.__class__ = type("Texter", (Talker,), {"supports_function_calling": lambda _: False})
        told = []
        writer = make("writer", given, tools=[note], step_callback=lambda step: told.append(str(step)))
        return crew(task("hello", writer)).kickoff().raw, told

    (first, second), made, tools = replayed(program, tmp_path)
    assert first == second
    assert (made == 1) if text == "one" else (made > 1)  # CrewAI tries again, also in a replay
    assert {span.attributes[names.REPLAYED] for span in tools} == {True}
    assert {span.status for span in tools} == {"ok" if text == "one" else "error"}


def test_uses_are_counted_in_a_replay_too(tmp_path):
    @tool("once", max_usage_count=3)
    def once(text: str) -> str:
        """Note."""
        return write_note(text)

    def program(url):
        once.current_usage_count = 0
        given = task('call once {"text": "a"}', make("writer", url, tools=[once]))
        return crew(given).kickoff().raw, once.current_usage_count

    (first, second), made, _ = replayed(program, tmp_path)
    assert first == second
    assert made == 1


class BackwardsPool(ThreadPoolExecutor):
    """Lets the first of several tools begin when the second is over."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._second = threading.Event()
        self._number = itertools.count()

    def submit(self, call, *args, **kwargs):
        return super().submit(self._in_turn, next(self._number), call, *args, **kwargs)

    def _in_turn(self, number, call, *args, **kwargs):
        if number == 0:
            assert self._second.wait(60)
        try:
            return call(*args, **kwargs)
        finally:
            if number == 1:
                self._second.set()


def test_equal_calls_at_once_keep_their_ids_in_whatever_order_they_begin(tmp_path, monkeypatch):
    module = importlib.import_module("crewai.agents." + ("agent_executor" if NEW else "crew_agent_executor"))
    effects = TestConformance().effects
    begun = []

    def program(url):
        begun.append(url)
        with monkeypatch.context() as patch:
            if len(begun) == 1:  # the record; in the replay they begin in order
                patch.setattr(module, "ThreadPoolExecutor", BackwardsPool)
            return effects(url)

    (recorded, replayed), _ = run_twice(program, tmp_path, "crewai")
    assert recorded == replayed
