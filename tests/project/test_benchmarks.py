"""The examples on public benchmarks, with the packages themselves: replayed right answers earn 1, silence earns 0."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("openai")

from lightning_conformance.plugins.script import Reply, ScriptedToolCall
from lightning_conformance.plugins.server import ScriptedServer

EXAMPLES = Path(__file__).parents[2] / "examples"
Says = Callable[[Mapping[str, Any]], Reply]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Says], None]]:
    """Set what the endpoint of the environment variables says."""
    said: list[Says] = []
    with ScriptedServer(lambda body, _seen: said[-1](body)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.setenv("OPENAI_API_BASE", server.url)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        yield said.append


def example(name: str, monkeypatch: pytest.MonkeyPatch, module: str = "agent") -> ModuleType:
    """Import a program of an example's folder, and leave nothing attached."""
    monkeypatch.syspath_prepend(str(EXAMPLES / name))
    import lightning_openai

    class Nothing:
        def attach(self) -> None: ...

    monkeypatch.setattr(lightning_openai, "attach", Nothing().attach)
    for loaded in ("agent", module):
        sys.modules.pop(loaded, None)
    found = __import__(module)
    for loaded in ("agent", module):
        monkeypatch.setitem(sys.modules, loaded, found)
    return found


def silent(_body: Mapping[str, Any]) -> Reply:
    return Reply(text="done")


def replay(turns: Sequence[Sequence[str]]) -> Says:
    """Make the calls of BFCL's answers, one at a time, each turn's after its request."""

    def say(body: Mapping[str, Any]) -> Reply:
        roles = [message["role"] for message in body["messages"]]
        turn, last = roles.count("user") - 1, len(roles) - 1 - roles[::-1].index("user")
        made = roles[last:].count("assistant")
        if made >= len(turns[turn]):
            return Reply(text="done")
        call = ast.parse(turns[turn][made], mode="eval").body
        assert isinstance(call, ast.Call)
        assert isinstance(call.func, ast.Name)
        tool = next(t["function"] for t in body["tools"] if t["function"]["name"] == call.func.id)
        given = dict(zip(tool["parameters"]["properties"], map(ast.literal_eval, call.args), strict=False))
        given |= {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return Reply(tool_calls=[ScriptedToolCall(call.func.id, json.dumps(given))])

    return say


def test_bfcl_pays_for_replayed_answers_and_not_for_silence(ask, monkeypatch, tmp_path):
    pytest.importorskip("bfcl_eval")
    program = example("bfcl", monkeypatch)
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, str(EXAMPLES / "bfcl/agent.py")], check=True)
    rows = [json.loads(line) for part in ("train", "val") for line in Path(f"{part}.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) == 13
    before = set(vars(program.multi_turn_utils))
    for row in rows:
        ask(replay(program.entries(row["category"])[row["id"]][1]))
        assert program.run(row) == 1.0, row
        ask(silent)
        assert program.run(row) == 0.0, row
    assert set(vars(program.multi_turn_utils)) == before  # a long run keeps no states of tasks that are over


def test_bfcl_ends_a_task_whose_turn_goes_on_and_on(ask, monkeypatch):
    pytest.importorskip("bfcl_eval")
    program = example("bfcl", monkeypatch)
    task = {"id": "multi_turn_base_1", "category": "multi_turn_base"}
    answers = program.entries(task["category"])[task["id"]][1]
    for looks, reward in ((program.STEPS - len(answers[0]), 1.0), (program.STEPS - len(answers[0]) + 1, 0.0)):
        turns = [[*["ls()"] * looks, *answers[0]], *answers[1:]]
        ask(replay(turns))
        assert program.run(task) == reward, looks


def test_bfcl_takes_no_category_that_it_plays_wrongly(tmp_path):
    pytest.importorskip("bfcl_eval")
    command = [sys.executable, str(EXAMPLES / "bfcl/agent.py"), "--category", "multi_turn_miss_func"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 2


def test_bfcl_evaluates_no_call_but_those_of_its_tools(monkeypatch):
    pytest.importorskip("bfcl_eval")
    program = example("bfcl", monkeypatch)
    assert program.expression("cd", '{"folder": "a\') or exit("}', {"cd"}) == 'cd(folder="a\') or exit(")'
    for name, arguments in (("exit", "{}"), ("cd", '{"a=1, b": 2}'), ("cd", "[1]"), ("cd", "{")):
        with pytest.raises(ValueError, match=r"no tool|names and values|Expecting"):
            program.expression(name, arguments, {"cd"})


def test_bfcl_single_turn_pays_for_an_allowed_call_and_not_for_silence(ask, monkeypatch):
    pytest.importorskip("bfcl_eval")
    program = example("bfcl", monkeypatch, "single_turn")
    rows = [{"id": f"simple_python_{number}", "category": "simple_python"} for number in range(20)]
    for row in rows:
        [allowed] = program.entries(row["category"])[row["id"]][1]
        [(name, values)] = allowed.items()
        given = {word: each[0] for word, each in values.items() if each and each[0] != ""}
        call = ScriptedToolCall(program.flat(name), json.dumps(given))
        ask(lambda _body, call=call: Reply(tool_calls=[call]))
        assert program.run(row) == 1.0, row
        ask(silent)
        assert program.run(row) == 0.0, row


@pytest.mark.parametrize("arguments", ["null", "3", "[1]", '"base"', "{"])
def test_bfcl_single_turn_pays_nothing_for_arguments_that_are_no_object(ask, monkeypatch, arguments):
    pytest.importorskip("bfcl_eval")
    program = example("bfcl", monkeypatch, "single_turn")
    call = ScriptedToolCall("calculate_triangle_area", arguments)
    ask(lambda _body: Reply(tool_calls=[call]))
    assert program.run({"id": "simple_python_0", "category": "simple_python"}) == 0.0


def test_tau2_pays_for_replayed_actions_and_not_for_silence(ask, monkeypatch, tmp_path):
    pytest.importorskip("tau2.registry")  # the example's folder has the package's name
    program = example("tau2", monkeypatch)
    monkeypatch.chdir(tmp_path)
    rows = [{"domain": "mock", "id": key} for key, task in program.tasks("mock").items() if program.alone(task)]
    assert len(rows) == 5

    def acting(actions: Sequence[Any]) -> Says:
        def say(body: Mapping[str, Any]) -> Reply:
            made = sum(message["role"] == "assistant" for message in body["messages"])
            if made >= len(actions):
                return Reply(tool_calls=[ScriptedToolCall("done")])
            return Reply(tool_calls=[ScriptedToolCall(actions[made].name, json.dumps(actions[made].arguments))])

        return say

    for row in rows:
        ask(acting(program.tasks("mock")[row["id"]].evaluation_criteria.actions or []))
        assert program.run(row) == 1.0, row
        ask(acting([]))
        assert program.run(row) == 0.0, row
