"""A program whose tool appends to a file is replayed, and the file does not change: the whole way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_conformance.plugins.server import ScriptedServer
from lightning_spans.schema import spans as names
from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.replays import Replay
from lightning_spans.store import Store, open_store
from lightning_trainer.gateway.replay.sessions import summary
from lightning_trainer.kits.forks import ForkResult, plan, recorded, result
from lightning_trainer.report.progress import Silent
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job
from lightning_trainer.session.answers import AnswerSource
from lightning_trainer.session.sampling import SamplingOptions
from lightning_trainer.session.session import Session, serve
from support.fakes import FakeEngine

pytest.importorskip("openai")

EFFECT = """
import os, threading
noting = threading.Lock()

def effect(text):
    with noting, open(os.environ["NOTES"], "a+") as file:
        file.seek(0)
        number = len(file.read().splitlines()) + 1
        file.write(text + "\\n")
    if text == "fail":
        raise ValueError(f"note {number} is out of order")
    return f"note {number} is {text}"
"""

LANGGRAPH = '''
import os
from effect import effect
import lightning_langchain
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

lightning_langchain.attach(tracer="embedded")

@tool
def note(text: str) -> str:
    """Note a text."""
    return effect(text)

@tool
async def ask(question: str) -> str:
    """Ask the clerk."""
    return (await made("clerk", [note]).ainvoke({"messages": [HumanMessage(question)]}))["messages"][-1].content

def made(name, tools):
    model = ChatOpenAI(model="own", base_url=os.environ["OWN_URL"], api_key="mine", max_retries=0)

    async def work(state):
        given = [SystemMessage(f"You are {name}."), *state["messages"]]
        return {"messages": [await model.bind_tools(tools).ainvoke(given)]}

    builder = StateGraph(MessagesState).add_node(name, work).add_node("tools", ToolNode(tools, handle_tool_errors=True))
    builder.add_edge(START, name).add_edge("tools", name)
    builder.add_conditional_edges(name, tools_condition)
    return builder.compile()

async def run(task):
    state = await made("caller", [note, ask]).ainvoke({"messages": [HumanMessage(task["prompt"])]})
    return len(state["messages"][-1].content) / 1000
'''

AGENTS = '''
import os
from effect import effect
import openai
import lightning_openai_agents
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)
lightning_openai_agents.attach(tracer="embedded")

@function_tool
def note(text: str) -> str:
    """Note a text."""
    return effect(text)

async def run(task):
    client = openai.AsyncOpenAI(base_url=os.environ["OWN_URL"], api_key="mine", max_retries=0)
    model = OpenAIChatCompletionsModel(model="own", openai_client=client)
    clerk = Agent("clerk", instructions="You are clerk.", model=model, tools=[note])
    tools = [note, clerk.as_tool("ask", "Ask the clerk.")]
    result = await Runner.run(Agent("caller", instructions="You are caller.", model=model, tools=tools), task["prompt"])
    return len(str(result.final_output)) / 1000
'''

PLAIN = """
import os, time, uuid
from effect import effect
import openai
import lightning_openai
from lightning_spans import agent, tool

lightning_openai.attach(tracer="embedded")
note = tool(effect, name="note")
pay = tool(side_effects=True, name="pay")(effect)
now, anew = tool(time.time, name="now"), tool(uuid.uuid4, name="anew")
client = openai.OpenAI(base_url=os.environ["OWN_URL"], api_key="mine", max_retries=0)

def say(name, text):
    with agent(name):
        given = [{"role": "system", "content": f"You are {name}."}, {"role": "user", "content": text}]
        return client.chat.completions.create(model="own", messages=given).choices[0].message.content

def run(task):
    draft = say("writer", f"{task['prompt']} at {now()} for {anew()}")
    last = say("judge", draft + note(draft))
    return len(last) / 1000

def buys(task):
    draft = say("writer", task["prompt"])
    say("judge", draft)
    pay(draft)
    return 0.5
"""

PROGRAMS = {"langgraph": ("langgraph", LANGGRAPH), "agents": ("agents", AGENTS), "plain": ("openai", PLAIN)}
TWICE = 'call note {"text": "one"}\ncall note {"text": "one"}\ncall note {"text": "fail"}'
NESTED = 'call ask {"%s": "call note {\\"text\\": \\"inner\\"}"}'


class World:
    """A server without a policy of its own, and a program that runs on it."""

    def __init__(self, session: Session, own: ScriptedServer, store: Store, notes: Path) -> None:
        self.session, self.own, self.store, self.notes = session, own, store, notes

    def record(self, prompt: str) -> None:
        made = Rollout(rollout_id="r", group_id="r", task={"prompt": prompt}, timeout_s=60.0, max_attempts=1)
        (outcome,) = self.session.run([made], Silent(), "recording")
        assert outcome.rewards, outcome

    def fork(self, name: str, **replay: Any) -> ForkResult:
        source = recorded(self.store, rollout_id="r")
        given = Replay(attempt_id=source.attempt_id, **replay)
        return result(
            self.store, source, self.session.run(plan(source, name=name, replay=given, tokens=False), Silent(), "f")
        )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Open a world in which a program of a framework runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    (tmp_path / "effect.py").write_text(EFFECT)

    @contextlib.contextmanager
    def opened(framework: str, function: str = "run") -> Iterator[World]:
        needs, program = PROGRAMS[framework]
        pytest.importorskip(needs)
        (tmp_path / f"program_{framework}.py").write_text(program)
        store = open_store(str(tmp_path / "store.db"))
        with ScriptedServer() as own:
            monkeypatch.setenv("OWN_URL", own.url)
            runner = Runner(Job(target=f"program_{framework}:{function}"), workers=1, concurrency=2, logs=tmp_path)
            runner.start()
            try:
                engine = FakeEngine(lambda prompt: "nobody is asked")
                answers = AnswerSource(model=engine.model, engines=[engine])
                with serve(store, runner, answers, SamplingOptions(answered=("nobody",), seed=1)) as session:
                    yield World(session, own, store, tmp_path / "notes")
            finally:
                runner.stop()
                store.close()

    return opened


@pytest.mark.parametrize("framework", ["langgraph", "agents", "plain"])
def test_a_file_that_a_tool_appends_to_does_not_change_in_a_replay(framework: str, world: Any) -> None:
    with world(framework) as here:
        here.record(TWICE if framework != "plain" else "hello")
        noted, asked = here.notes.read_text(), len(here.own.requests)
        found = here.fork("dry")
        assert found.ended == ()
        (again,) = found.continuations
        assert again.reward == found.recorded
        assert here.notes.read_text() == noted != ""
        assert len(here.own.requests) == asked  # nobody was asked anything
        counted = summary(here.store, again.attempt_id)
        assert counted["replayed"] == asked
        assert (counted["tools_given"], counted["tools_run"]) == (3, 0)


@pytest.mark.parametrize("framework", ["langgraph", "agents"])
def test_a_tool_that_asks_an_agent_is_given_whole_and_run_where_the_fork_is_inside(framework: str, world: Any) -> None:
    with world(framework) as here:
        here.record(NESTED % ("question" if framework == "langgraph" else "input"))
        assert here.notes.read_text() == "inner\n"
        source = recorded(here.store, rollout_id="r")
        assert [call.agent for call in source.record.calls] == ["caller", "clerk", "clerk", "caller"]
        assert here.fork("dry").ended == ()
        found = here.fork("inside", call=2)  # the clerk's last one: its own tool is not run again
        assert found.ended == ()
        (span,) = [
            span
            for span in here.store.spans(attempt_ids=[found.continuations[0].attempt_id])
            if span.operation == names.EXECUTE_TOOL and span.name == "ask"
        ]
        assert span.attributes[names.REPLAYED] is False
        assert here.notes.read_text() == "inner\n"
        refused = here.fork("refused", call=2, refuse_tools=("ask",))
        assert "inside of the tool `ask`" in refused.ended[0].reason


def test_a_tool_with_side_effects_after_the_fork_is_refused_before_it_begins(world: Any) -> None:
    from lightning_spans.errors import ConfigError

    with world("plain", "buys") as here:
        here.record("hello")
        bought = here.notes.read_text()
        with pytest.raises(ConfigError, match="pay has side effects and ran after call 1"):
            here.fork("again", call=1)
        assert here.notes.read_text() == bought
