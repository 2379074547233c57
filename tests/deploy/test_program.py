"""A changed program voids its evaluation: the change is named, and dates, users and retrieved text are no change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("langgraph")
pytest.importorskip("langchain_openai")

from lightning_conformance import MemoryStore, ScriptedServer
from lightning_conformance.plugins.script import Reply
from lightning_spans.schema.calls import Call
from lightning_spans.schema.spans import CHAT, INVOKE_AGENT, Span
from lightning_spans.store import open_store
from lightning_trainer.gateway.app import create_app
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.kits.deploy import program_watch
from lightning_trainer.kits.deploy.program_changes import describe_program
from lightning_trainer.kits.deploy.program_watch import PROGRAM, WINDOW
from lightning_trainer.kits.deploy.routing import MARK
from lightning_trainer.kits.deploy.serving import deploying
from lightning_trainer.kits.deploy.transitions import Note, Policy, begin_canary, name_candidate
from lightning_trainer.session.fingerprint import AgentCalls, AgentFingerprint, ProgramFingerprint
from support.cli import call, told
from support.fakes import FakeEngine

SHOP = '''
"""A LangGraph program: a planner, a writer with a tool, and a reviewer. `changed` is what is changed in it."""
import itertools
import os
import sys
from datetime import datetime, timedelta
from typing import TypedDict

import lightning_langchain
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph

attachment = lightning_langchain.attach(tracer="embedded")
changed, calls = "", itertools.count(int(os.environ.get("DAY", "0")))


def ask(agent, system, state, tools=()):
    model = ChatOpenAI(model="old", max_retries=0, default_headers={"x-lightning-conversation": state["talk"]})
    messages = [SystemMessage(system), HumanMessage(state["question"])]
    return str((model.bind_tools(tools) if tools else model).invoke(messages).content)


def plan(state):
    return {"plan": ask("planner", "Plan in one step." if changed == "planner" else "Plan in three steps.", state)}


def write(state):
    day = datetime(2026, 1, 1) + timedelta(days=next(calls), minutes=17 * next(calls))
    rule = "Promise a refund." if changed == "prompt" else "Never promise a refund."
    system = f"You write for a shop.\\nToday is {day:%A, %d %B %Y, %H:%M}.\\nUser: {state['user']}\\n{rule}"
    about = "Look for any order." if changed == "tool" else "Look for an order of this user."
    tool = StructuredTool.from_function(lambda number: number, name="find_order", description=about)
    return {"answer": ask("writer", system, state, [tool])}


def review(state):
    return {"answer": ask("reviewer", "Check the answer.", state)}


class State(TypedDict, total=False):
    question: str
    user: str
    talk: str
    plan: str
    answer: str


def build(*nodes):
    graph = StateGraph(State)
    for before, (name, node) in zip((START, *(name for name, _ in nodes)), nodes):
        graph.add_node(name, node)
        graph.add_edge(before, name)
    graph.add_edge(nodes[-1][0], END)
    return graph.compile()


short = build(("planner", plan), ("writer", write))
app = build(("planner", plan), ("writer", write), ("reviewer", review))


def run(task):
    app.invoke({"question": task["question"], "user": "tester", "talk": ""})
    return 1.0


if __name__ == "__main__":
    for changed in sys.argv[2:]:
        for number in range(int(sys.argv[1])):
            state = {"question": f"question {number}", "user": f"user {number % 7}", "talk": f"talk {changed} {number}"}
            (short if changed == "graph" else app).invoke(state)
    attachment.detach()
'''


class Shop:
    """The program, evaluated; and a server with its candidate in a canary."""

    def __init__(self, folder: Path, url: str, keys: Keys) -> None:
        self.folder, self.url, self.keys = folder, url, keys

    def serve(self, *changed: str, **environment: str) -> None:
        """Hold as many conversations as are judged together with each changed program, in one process of it."""
        key = self.keys.issue("caller", holder="shop")
        variables = {"OPENAI_BASE_URL": f"{self.url}/v1", "OPENAI_API_KEY": key}
        variables |= {"LIGHTNING_STORE": self.url, "LIGHTNING_KEY": key, "LIGHTNING_SPOOL": str(self.folder / "spool")}
        words = [sys.executable, "shop.py", str(WINDOW), *changed]
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=os.environ | variables | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def deploy(self, *words: str) -> Any:
        key = self.folder / "lightning.key"
        return call("deploy", *words, "--agent", "writer", "--store", self.url, "--key-file", key)

    def changes(self) -> list[str]:
        found = self.deploy("status", "--json")
        assert found.exit_code == 0, found.output
        return list(json.loads(found.stdout)["agents"]["writer"]["program"]["changes"])

    def alarms(self) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        name = "lightning_program_changes_total "
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    (folder / "shop.py").write_text(SHOP)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"question": f"task {n}"}) + "\n" for n in range(4)))
    with ScriptedServer(lambda *_: Reply(text="fine")) as server, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("OPENAI_BASE_URL", server.url)
        patch.setenv("OPENAI_API_KEY", "k")
        done = call("eval", "shop:run", "--data", "tasks.jsonl", "--workers", "1", "--out", "evaluation", "--json")
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def shop(evaluated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(program_watch, "_REST_S", 0.0)
    keys = Keys.from_file(tmp_path / "lightning.key.secret")
    (tmp_path / "lightning.key").write_text(keys.issue("admin"))
    (tmp_path / "shop.py").write_text(SHOP)
    engines = [FakeEngine(lambda _, said=said: said, model=said, piece=64) for said in ("old", "new")]
    with closing(open_store(str(tmp_path / "server.db"))) as store:
        app = create_app(store, keys=keys, engine=engines)
        thread = ServerThread(app)
        try:
            with deploying(app):
                shop = Shop(tmp_path, thread.start(), keys)
                given = ("--model", "new", "--stable", "old", "--evaluation", str(evaluated / "evaluation"))
                for words in (["candidate", *given], ["canary", "--share", "50%"]):
                    result = shop.deploy(*words)
                    assert result.exit_code == 0, result.output
                yield shop
        finally:
            thread.stop()


CHANGES = {
    "prompt": "agent writer: its prompt changed: evaluated 'Never promise a refund.', served 'Promise a refund.'",
    "tool": "agent writer: the description of its tool find_order changed: evaluated ",
    "planner": "agent planner: its prompt changed: evaluated 'Plan in three steps.', served 'Plan in one step.'",
    "graph": "agent reviewer worked in every evaluated rollout, and not in 20 live traces in a row",
}


def test_a_langgraph_program_that_changes_in_its_canary_closes_the_gate_and_dates_and_users_do_not(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    shop.serve("", DAY="400")
    found = json.loads(shop.deploy("status", "--json").stdout)["agents"]["writer"]["program"]
    assert found == {"conversations": WINDOW, "needed": WINDOW, "changes": []}
    assert shop.alarms() == 0
    told(shop.deploy("promote"), "not promoted: 0 outcomes of new and 0 of old", status=2)
    assert "unchanged since the evaluation, in 20 conversations" in shop.deploy("status").stdout
    shop.serve(*CHANGES)
    changes = shop.changes()
    assert len(changes) == len(CHANGES)
    for what in CHANGES.values():
        assert any(change.startswith(what) for change in changes), what
    told(shop.deploy("promote"), "not promoted: the program has changed since the candidate was evaluated", "'Promise")
    assert shop.alarms() == 2, "of the deployed agent itself the server tells at once"
    assert "writer" not in httpx.get(f"{shop.url}/metrics").text, "this page needs no key"
    for name in ("prompt", "tool"):
        assert f"the program has changed since the candidate of writer was evaluated: {CHANGES[name]}" in caplog.text
    assert shop.deploy("promote", "--override", "--reason", "we know").exit_code == 0


def test_a_trace_of_one_agent_says_nothing_about_agents_next_to_it() -> None:
    always = frozenset({"sorter", "writer", "writer/helper"})
    request = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]}
    program = ProgramFingerprint(agents={"writer": agent_of(["Be kind."])}, always=always)
    named = name_candidate(None, "writer", Policy("new"), Note("", "ada", 1), stable="old")
    named = replace(named, details={PROGRAM: program.to_json()})
    store = MemoryStore()
    for number in range(WINDOW):
        ids = {"trace_id": f"{number:032x}", "start_ns": 10, "end_ns": 20, "agent": "writer"}
        root = Span(span_id="root", operation=INVOKE_AGENT, name="writer", **ids)
        store.add_spans([root, Span(span_id="chat", parent_id="root", operation=CHAT, name="old", **ids)])
        more = {"call_id": str(number), "response_id": str(number), "policy": "old", "policy_version": 0}
        store.add_calls([Call(**ids, **more, request=request, sampling={MARK: 2})])
    found = describe_program(store, [named, begin_canary(named, "writer", 0.5, Note("", "ada", 2))])
    assert found is not None
    assert [change.split(" worked")[0] for change in found["changes"]] == ["agent writer/helper"]


def agent_of(prompts: list[str], *, tools: tuple[str, ...] = ()) -> AgentFingerprint:
    calls = AgentCalls()
    for number, prompt in enumerate(prompts):
        messages = [{"role": "system", "content": prompt}, {"role": "user", "content": f"question {number}"}]
        offered = [{"type": "function", "function": {"name": name, "description": "d"}} for name in tools]
        calls.add(f"talk {number}", {"messages": messages, "tools": offered})
    return calls.fingerprint()


def changes(evaluated: AgentFingerprint, served: AgentFingerprint) -> list[str]:
    read = ProgramFingerprint.from_json(
        json.loads(json.dumps(ProgramFingerprint(agents={"a": evaluated}, always=frozenset()).to_json()))
    )
    return read.changes("a", served)


@pytest.mark.parametrize(
    ("evaluated", "served"),
    [
        (["Be kind.\nIt is 2026-11-27T10:00:00Z."], ["Be kind.\nIt is 2027-01-03T09:59:12+01:00."]),
        (["On Friday, November 27, 2026 at 10:15 pm"], ["On Monday, 3 March 2027 at 3:05"]),
        (["Be kind.\nUser: test\nEnd."], [f"Be kind.\nUser: {n}\nEnd." for n in range(20)]),
        ([f"Be kind.\nUser: {n}\nEnd." for n in range(5)], ["Be kind.\nUser: ada\nEnd."]),
        ([f"Known:\n{n}\nEnd." for n in range(5)], [f"Known:\n{n}\n{n * n}\nmore\nEnd." for n in range(20)]),
        ([f"Known:\n{n}\nEnd." for n in range(5)], ["Known:\nEnd."]),
    ],
)
def test_values_that_vary_are_no_change(evaluated: list[str], served: list[str]) -> None:
    assert changes(agent_of(evaluated), agent_of(served)) == []


@pytest.mark.parametrize(
    ("evaluated", "served", "what"),
    [
        (["Be kind."], ["Be rude."], "evaluated 'Be kind.', served 'Be rude.'"),
        (
            [f"Be kind.\nUser: {n}\nEnd." for n in range(5)],
            ["Be kind.\nUser: ada"],
            "evaluated 'End.', served without it",
        ),
        (["Be kind.\nEnd."], [f"Be kind.\n{n}\nStop." for n in range(20)], "evaluated 'End.', served 'Stop.'"),
        (["one\ntwo"], ["two\none"], "its prompt changed: "),
        (["At most 3 words."], ["At most 4 words."], "evaluated 'At most 3 words.', served 'At most 4 words.'"),
        (["Be kind."], [""], "its system prompt was removed"),
    ],
)
def test_a_line_that_all_prompts_share_is_missed(evaluated: list[str], served: list[str], what: str) -> None:
    (change,) = changes(agent_of(evaluated), agent_of(served))
    assert what in change


def test_a_tool_that_comes_or_goes_is_a_change() -> None:
    one, two = agent_of(["s"], tools=("find",)), agent_of(["s"], tools=("find", "pay"))
    assert changes(one, two) == ["agent a: its tool pay was not in the evaluation"]
    assert changes(two, one) == ["agent a: its tool pay was in every evaluated call and is not served"]
