"""Better prompts for an unchanged program of two agents, with a scripted model and a scripted reflector."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

pytest.importorskip("openai")

from lightning_conformance import ScriptedServer
from lightning_conformance.plugins.script import Reply
from lightning_spans.adapter.trace import Trace
from lightning_spans.errors import ConfigError, LightningError, UnknownAgentError
from lightning_spans.record.prompts import read_prompts as read_file
from lightning_spans.record.prompts import with_prompts
from lightning_spans.schema.attempts import Attempt, AttemptRecord, Rollout
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import CHAT, REQUEST, RESPONSE, Span
from lightning_spans.store import open_store
from lightning_spans.store.traces import traces_of
from lightning_trainer.cli import cli
from lightning_trainer.kits.improve.costs import costs_of
from lightning_trainer.kits.prompts import journal, reflection
from lightning_trainer.kits.prompts.adapter import ROLLOUTS, SpansAdapter
from lightning_trainer.kits.prompts.journal import SearchJournal
from lightning_trainer.kits.prompts.optimise import _STATE
from lightning_trainer.kits.prompts.options import PromptsConfig
from lightning_trainer.kits.prompts.reading import Prompt, read_prompts
from lightning_trainer.kits.prompts.reflection import Reflection
from lightning_trainer.kits.prompts.result import diff, write
from lightning_trainer.kits.prompts.search import Search, _StepReporter
from lightning_trainer.kits.prompts.session import CandidateRun, CandidateRunner
from lightning_trainer.report.progress import Silent
from lightning_trainer.rl.rollouts import Outcome
from lightning_trainer.run.data import digest, load_tasks
from lightning_trainer.runner.runner import Runner
from lightning_trainer.session.answers import Endpoint
from lightning_trainer.session.folder import hold_folder
from lightning_trainer.work import Work

PROGRAM = """
import os
import openai
import lightning_openai
from lightning_spans import agent

lightning_openai.attach(tracer="embedded", prompts=os.environ.get("PROMPTS") or None)
client = openai.OpenAI(base_url=os.environ["TEST_MODEL_URL"], api_key="k", max_retries=0)

def say(name, system, text):
    with agent(name):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        return client.chat.completions.create(model="m", messages=messages).choices[0].message.content

def run(task):
    draft = say("writer", "You write.", task["q"])
    verdict = say("checker", f"You check what was written.\\nThe task was: {task['q']}", draft)
    return {"writer": float(draft == task["q"].upper()), "checker": float(verdict == "OK")}
"""


def model(body: dict[str, Any], seen: int) -> Reply:
    system, text = (message["content"] for message in body["messages"])
    if "capital letters" in system:
        return Reply(text=text.upper())
    return Reply(text="OK" if "Always answer OK" in system else f"hm: {text}")


def reflector(body: dict[str, Any], seen: int) -> Reply:
    if "You check" in body["messages"][-1]["content"]:
        return Reply(text="```\nYou check what was written. Always answer OK.\n```")
    return Reply(text="```\nYou write.\nUse capital letters.\n```")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "team.py").write_text(PROGRAM)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"q": f"word{n}"}) + "\n" for n in range(8)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rl(*args: str) -> Result:
    return CliRunner().invoke(cli, ["prompts", "team:run", "--data", "tasks.jsonl", *args], catch_exceptions=False)


def test_prompts_are_found_written_resumed_and_applied(folder, monkeypatch):
    pytest.importorskip("gepa")
    with ScriptedServer(model) as server, ScriptedServer(reflector) as teacher:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        args = ["--agents", "writer,checker", "--reflect", teacher.url, "--out", "best.json", "--json"]
        first = rl(*args, "--budget", "16", "--minibatch", "2")
        assert first.exit_code == 0, first.output
        early = json.loads(first.stdout.splitlines()[-1])
        before = len(server.requests)
        again = rl(*args, "--budget", "60", "--minibatch", "2", "--resume")
        assert again.exit_code == 0, again.output
        found = json.loads(again.stdout.splitlines()[-1])
        assert (early["before"], found["before"], found["after"]) == (0.0, 0.0, 1.0)
        assert early["after"] < 1.0
        assert found["rollouts"] > early["rollouts"]
        assert len(server.requests) - before <= 2 * (60 - 16 + 8)

        shown = (folder / "best.json.diff").read_text()
        assert "+Use capital letters." in shown
        assert "-You check what was written." in shown
        taught = teacher.requests[0].body["messages"][-1]["content"]
        assert "Reward of this agent: 0" in taught
        # Each agent's proposal stands in its own calls only, and what changes from task to task stays.
        asked = [r.body["messages"][0]["content"] for r in server.requests]
        assert not [text for text in asked if "capital" in text and "check" in text]
        assert "You check what was written. Always answer OK.\nThe task was: word1" in asked

        monkeypatch.setenv("PROMPTS", "best.json")
        result = CliRunner().invoke(cli, ["eval", "team:run", "--data", "tasks.jsonl", "--json", "--out", "e"])
        assert json.loads(result.stdout.splitlines()[-1])["mean"] == 1.0


def test_a_deletion_finds_and_blocks_a_prompt(folder, monkeypatch):
    pytest.importorskip("gepa")
    live = [{"q": f"word{n}", "trace_id": f"{n:032x}", "tenant": "acme"} for n in range(8)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in live))
    with ScriptedServer(model) as server, ScriptedServer(reflector) as teacher:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        args = ["--agents", "writer", "--reflect", teacher.url, "--out", "runs/best.json", "--minibatch", "2"]
        for more in (["--budget", "16"], ["--budget", "20", "--resume"]):
            assert rl(*args, *more).exit_code == 0

    def call(*words: str) -> Result:
        return CliRunner().invoke(cli, list(words))

    lineage = json.loads(call("lineage", "runs/best.json", "--json").stdout)
    assert lineage["checkpoints"] == [str(folder / "runs/best.json.search")]
    assert (lineage["steps"], lineage["tenants"], len(lineage["tasks"])) == (1, ["acme"], 8)
    with closing(open_store("live.db")) as store:
        ids = {"trace_id": live[3]["trace_id"], "span_id": "s", "start_ns": 1, "end_ns": 2}
        store.add_spans([Span(operation=CHAT, name="m", agent="writer", **ids)])
    pruned = call("prune", "--trace", live[3]["trace_id"], "--store", "live.db", "--block-checkpoints", "--yes")
    assert "best.json.search: learned from 1 of it in step 0. BLOCKED" in pruned.output
    named = ["--agent", "writer", "--stable", "gpt", "--base", "gpt", "--checkpoint", "runs/best.json"]
    refused = call("deploy", "candidate", *named, "--store", "live.db")
    assert (refused.exit_code, "runs/best.json is blocked: it learned from traces" in refused.output) == (2, True)


def sessions_asked(monkeypatch):
    """End each search where it would begin, and keep what it would begin with: job, subject and sampling."""
    asked = []

    def started(job, _store, subject, sampling, **_):
        asked.append((job, subject, sampling))
        raise ConfigError("that is enough")

    monkeypatch.setattr("lightning_trainer.kits.prompts.optimise.open_answers", lambda subject, **_: subject)
    monkeypatch.setattr("lightning_trainer.kits.prompts.optimise.open_session", started)
    return asked


def test_a_command_works_where_it_is_told_to_while_prompts_are_looked_for(folder, monkeypatch):
    pytest.importorskip("gepa")
    asked = sessions_asked(monkeypatch)
    args = ["--agents", "writer", "--reflect", "big=http://127.0.0.1:9/v1", "--budget", "30", "--out", "best.json"]
    args += ["--workdir", "project", "--reward-command", "make test", "--name-by", "writer=model:m"]
    unheard = CliRunner().invoke(cli, ["prompts", "--command", "true", "--data", "tasks.jsonl", *args])
    assert "name_by: of calls that come to a model named here" in unheard.output
    args += ["--model", "m", "--endpoint", "http://127.0.0.1:9/v1"]
    told = CliRunner().invoke(cli, ["prompts", "--command", "true", "--data", "tasks.jsonl", *args])
    assert "that is enough" in told.output
    ((job, _, sampling),) = asked
    assert job.work == Work(workdir="project", reward_command="make test")
    assert sampling.name_by == ("writer=model:m",)


@pytest.mark.torch
def test_what_answers_while_prompts_are_looked_for_is_what_eval_would_ask(folder, monkeypatch, tiny_model):
    pytest.importorskip("gepa")
    asked = sessions_asked(monkeypatch)
    monkeypatch.setenv("LIGHTNING_UPSTREAM_KEY", "secret-of-the-endpoint")
    shutil.copytree(tiny_model, folder / "ran" / "checkpoint")
    (folder / "ran" / "config.json").write_text('{"agents": ["writer"], "name_by": ["writer=model:m"]}')
    args = ["--agents", "checker", "--reflect", "big=http://127.0.0.1:9/v1", "--budget", "30", "--out", "best.json"]
    assert "that is enough" in rl(*args, "--model", "ran").output
    assert "that is enough" in rl(*args, "--model", "m", "--endpoint", "http://127.0.0.1:9/v1").output
    (_, _, trained), (_, server, _) = asked
    assert (trained.answered, trained.name_by) == (("writer",), ("writer=model:m",))
    assert server == Endpoint("http://127.0.0.1:9/v1", "m", "secret-of-the-endpoint")


@pytest.mark.torch
def test_the_same_seed_draws_the_same_answers_and_comes_to_the_same(folder, monkeypatch, tiny_model):
    pytest.importorskip("gepa")
    pytest.importorskip("torch")
    monkeypatch.setenv("TEST_MODEL_URL", "http://127.0.0.1:9/v1")
    (folder / "team.py").write_text(PROGRAM.replace('model="m"', 'model="m", max_tokens=4'))
    with ScriptedServer(reflector) as teacher:
        args = ["--agents", "writer", "--reflect", f"big={teacher.url}", "--budget", "16", "--minibatch", "2"]
        args += ["--model", str(tiny_model), "--concurrency", "4"]
        for name in ("a", "b"):
            result = rl(*args, "--out", f"{name}.json")
            assert result.exit_code == 0, result.output
    first, second = (read_store(f"{name}.json.search/lightning.db") for name in ("a", "b"))
    assert first == second
    assert len(set(first.values())) > 1


def read_store(path: str) -> dict[str, str]:
    """Return what each rollout of a store was answered."""
    store = open_store(path)
    try:
        traces = [(trace.rollout_id or "", trace) for trace in traces_of(store)]
        return {
            rollout_id.partition(".")[2]: " | ".join(str(node.answer.choices[0].message) for node in trace.chats)
            for rollout_id, trace in traces
        }
    finally:
        store.close()


class Killed(BaseException):
    """Nobody hears of it, as of a SIGKILL."""


def die_at(monkeypatch, where: str, nth: int) -> None:
    """Let the search end at the nth call of this, once."""
    owner, name = where.rsplit(".", 1)
    home = resolve_name(owner)
    original, seen = getattr(home, name), []

    def instead(*args, **kwargs):
        seen.append(args)
        if len(seen) == nth:
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(home, name, instead)


def asked(server: ScriptedServer) -> Counter[str]:
    return Counter(json.dumps(request.body["messages"]) for request in server.requests)


@pytest.mark.parametrize(
    ("where", "nth"),
    [
        ("lightning_trainer.kits.prompts.optimise:_look", 1),  # before anything was asked
        ("lightning_trainer.kits.prompts.session:traces_of", 1),  # after the rollouts that prompts are read from
        ("lightning_trainer.kits.prompts.reflection:Reflection._ask", 2),  # in the middle of a proposal
        ("lightning_trainer.kits.prompts.journal:SearchJournal.add", 5),  # after a batch, before it was kept
    ],
)
def test_a_search_that_was_killed_goes_on_as_if_nothing_had_happened(folder, monkeypatch, where, nth):
    pytest.importorskip("gepa")
    with ScriptedServer(model) as server, ScriptedServer(reflector) as teacher:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        args = ["--agents", "writer,checker", "--reflect", teacher.url, "--json", "--budget", "40", "--minibatch", "2"]
        whole = json.loads(rl(*args, "--out", "whole.json").stdout.splitlines()[-1])
        uncut = asked(server), asked(teacher)
        with monkeypatch.context() as patch:
            patch.setattr("lightning_trainer.session.folder._leave", lambda *a, **k: None)
            die_at(patch, where.replace(":", "."), nth)
            with pytest.raises(Killed):
                rl(*args, "--out", "cut.json")
        assert not (folder / "cut.json").exists()
        result = rl(*args, "--out", "cut.json", "--resume")
        assert result.exit_code == 0, result.output
        assert (folder / "cut.json").read_text() == (folder / "whole.json").read_text()
        assert json.loads(result.stdout.splitlines()[-1]) == {**whole, "file": "cut.json"}
        assert asked(teacher) == uncut[1] + uncut[1]
        assert asked(server) == uncut[0] + uncut[0]


def test_rollouts_that_were_cut_are_run_once_more_and_counted(folder, monkeypatch):
    pytest.importorskip("gepa")
    with ScriptedServer(model) as server, ScriptedServer(reflector) as teacher:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        args = ["--agents", "writer,checker", "--reflect", teacher.url, "--json", "--budget", "40", "--minibatch", "2"]

        def die(runner: CandidateRunner, *args, **kwargs) -> None:
            plan, store = runner._plan(args[0]), runner.session.store
            store.enqueue(plan)
            (first,) = store.claim("gone", limit=1, lease_s=600)
            call = Call(
                call_id="c", response_id="c", start_ns=1, end_ns=2, policy="m", policy_version=0, agent="writer",
                rollout_id=first.rollout.rollout_id, attempt_id=first.attempt_id, prompt_token_ids=(7,) * 1000,
                choices=(Choice(0, None, None, "stop"),),
            )  # fmt: skip
            store.add_calls([call])
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr("lightning_trainer.session.folder._leave", lambda *a, **k: None)
            patch.setattr(Runner, "start", lambda self: None)
            patch.setattr(CandidateRunner, "run", die)
            with pytest.raises(Killed):
                rl(*args, "--out", "best.json")
        result = rl(*args, "--out", "best.json", "--resume")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout.splitlines()[-1])
        assert len(server.requests) == 2 * (found["rollouts"] - 1)
        paid = journal.read_lines(Path("best.json.search") / journal.FILE)
        proposals = sum(line["came_to"]["tokens"] for line in paid if line["kind"] != ROLLOUTS)
        assert found["tokens"] == costs_of(Path("best.json.search")).sampled + proposals


def test_a_search_at_which_another_process_works_is_refused(folder):
    pytest.importorskip("gepa")
    tasks = load_tasks(Path("tasks.jsonl"))
    identity = {"data": digest([*tasks[::2], *tasks[1::2]]), "agents": ["writer"], "seed": 0, "minibatch": 3}
    (folder / "best.json.search").mkdir()
    (folder / "best.json.search/prompts.json").write_text(json.dumps({"identity": identity, "name": "x"}))
    with hold_folder(folder / "best.json.search"):
        args = ["--agents", "writer", "--reflect", "m=http://127.0.0.1:9/v1", "--budget", "30", "--out", "best.json"]
        result = rl(*args, "--resume")
    assert (result.exit_code, "best.json.search is in use: process" in result.output) == (2, True), result.output


def test_a_reflecting_model_that_gives_nothing_ends_the_search(folder, monkeypatch):
    pytest.importorskip("gepa")
    answers: list[Reply] = [Reply(status=401, text="no such key")]

    def moody(body: dict[str, Any], seen: int) -> Reply:
        return answers[0] if answers else reflector(body, seen)

    with ScriptedServer(model) as server, ScriptedServer(moody) as teacher:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        args = ["--agents", "writer,checker", "--reflect", teacher.url, "--out", "best.json", "--json"]
        args += ["--budget", "60", "--minibatch", "2"]
        result = rl(*args)
        assert result.exit_code == 2, result.output
        assert "gave no proposal: it answered 401" in result.output
        assert "--resume" in result.output
        assert not (folder / "best.json").exists()
        assert len(teacher.requests) == 1
        rollouts = len(server.requests) / 2
        assert rollouts <= 4 + 4 + 2
        answers[0] = Reply(text="  ")
        result = rl(*args, "--resume")
        assert "it answered no text" in result.output
        assert len(server.requests) / 2 == rollouts
        answers.clear()
        result = rl(*args, "--resume")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout.splitlines()[-1])["after"] == 1.0


def test_a_reflecting_model_that_answers_no_json_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    class NothingPaid:
        def next(self, kind: str, asked: object) -> None:
            return None

    monkeypatch.setattr(reflection, "post_json", lambda *_, **__: httpx.Response(200, text="<html>a proxy</html>"))
    monkeypatch.setattr(reflection, "_PAUSE_S", 0)
    asking = Reflection(Endpoint("http://127.0.0.1:9/v1", "big"), NothingPaid(), lambda: None)
    with pytest.raises(LightningError, match="gave no proposal: it answered no JSON: '<html>a proxy"):
        asking("Propose.")


def test_what_candidates_earn_is_told_as_a_mean(tmp_path: Path) -> None:
    notes: list[str] = []

    class Heard(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    told = _StepReporter(Heard(), SearchJournal(tmp_path / "j.jsonl"), 3)
    told.on_candidate_rejected({"old_score": 1.5, "new_score": 1.2})
    told.on_candidate_accepted({"new_candidate_idx": 2, "new_score": 2.4})
    assert notes == [
        "a candidate is dropped: reward 0.500 to 0.400 on its tasks",
        "candidate 2 is kept: reward 0.800 on its tasks",
    ]


def test_a_proposal_with_half_a_character_is_none(tmp_path, monkeypatch):
    said = ["Shout.\ud83d", "Shout."]  # the first is half of an emoji, which an agent's request could not hold

    def answer(*_: Any, **__: Any) -> httpx.Response:
        return httpx.Response(200, content=json.dumps({"choices": [{"message": {"content": said.pop(0)}}]}))

    monkeypatch.setattr("lightning_trainer.kits.prompts.reflection.post_json", answer)
    reflection = Reflection(Endpoint("http://big/v1", "big", None), SearchJournal(tmp_path / "j.jsonl"), lambda: None)
    assert reflection("How?") == "Shout."
    assert not said


def test_an_agent_that_seldom_speaks_is_waited_for(folder, monkeypatch):
    pytest.importorskip("gepa")
    program = PROGRAM.replace('say("checker"', 'RARE and say("checker"')
    often = program.replace("RARE", "int(task['q'][-1]) in (5, 7)")  # the last two that are run of the eight
    (folder / "team.py").write_text(often)
    with ScriptedServer(model) as server, ScriptedServer(reflector) as teacher:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        args = ["--agents", "writer,checker", "--reflect", teacher.url, "--budget", "40"]
        result = rl(*args, "--out", "best.json")
        assert result.exit_code == 0, result.output
        assert "checker: the part of its prompt that is the same in every call is 'You check what" in result.output
        (folder / "team.py").write_text(program.replace("RARE", "task['q'] == 'word5'"))
        result = rl(*args, "--out", "once.json")
        assert result.exit_code == 2, result.output
        assert "'checker' was seen once, which is not enough to find its prompt, in 8 rollouts" in result.output
        (folder / "team.py").write_text(program.replace("RARE", "False"))
        result = rl(*args, "--out", "never.json")
        assert result.exit_code == 2, result.output
        assert "'checker' was never seen in 8 rollouts. Agents seen: writer." in result.output
        assert not list(folder.glob("once*")) + list(folder.glob("never*"))


def test_mistakes_are_told_and_nothing_is_left(folder, monkeypatch):
    pytest.importorskip("gepa")
    with ScriptedServer(model) as server, ScriptedServer(reflector) as teacher:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        args = ["--reflect", teacher.url, "--out", "best.json"]
        for more, said in (
            (["--agents", "writer", "--budget", "5"], "is too small"),
            (["--agents", "write*", "--budget", "50"], "exact names"),
            (["--agents", "writr", "--budget", "50"], "was never seen"),
            (["--agents", "writer", "--budget", "50", "--resume"], "no search to resume"),
        ):
            result = rl(*args, *more)
            assert result.exit_code == 2, result.output
            assert said in result.output
            assert not list(folder.glob("best*"))


@pytest.mark.parametrize("kept", [(), (_STATE,), (_STATE, journal.FILE)])
def test_resume_is_suggested_only_for_a_search_that_can_be_resumed(folder, kept):
    pytest.importorskip("gepa")
    (folder / "team.py").write_text(PROGRAM)
    search = folder / "best.json.search"
    search.mkdir()
    for name in kept:
        (search / name).write_text("{}")
    with ScriptedServer(reflector) as teacher:
        result = rl("--agents", "writer", "--reflect", teacher.url, "--budget", "50", "--out", "best.json")
    assert result.exit_code == 2, result.output
    assert "already exists" in result.output
    assert ("--resume" in result.output) == (len(kept) == 2)


@pytest.mark.skipif(sys.platform == "win32", reason="a process there can't interrupt itself")
def test_ctrl_c_does_not_wait_for_a_model_that_reflects_for_long(folder, monkeypatch, capfd):
    pytest.importorskip("gepa")
    released = threading.Event()

    def slow(body: dict[str, Any], seen: int) -> Reply:
        os.kill(os.getpid(), signal.SIGINT)
        released.wait(60)
        return reflector(body, seen)

    with ScriptedServer(model) as server, ScriptedServer(slow) as teacher:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        args = ["--agents", "writer,checker", "--reflect", teacher.url, "--budget", "40", "--out", "best.json"]
        try:
            result = rl(*args)
            assert not released.is_set()
        finally:
            released.set()
        assert result.exit_code != 0, result.output
        assert "a proposal of the reflection model will be cancelled. Press Ctrl-C again" in capfd.readouterr().err
        assert (folder / "best.json.search").exists()


def test_a_program_that_fails_everywhere_is_the_agents_failure(folder, monkeypatch):
    pytest.importorskip("gepa")
    with ScriptedServer(lambda _body, _seen: Reply(status=400, text="no")) as server:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        result = rl("--agents", "writer", "--budget", "50", "--reflect", server.url, "--out", "best.json")
    assert result.exit_code == 3, result.output
    assert "rollouts failed" in result.output


class Scripted:
    """A session in which a batch comes to these rewards: of the attempt or by agent; None failed."""

    rollouts = again = tokens = 0
    rewards: tuple[float | dict[str, float] | None, ...] = ()

    def check(self) -> None: ...
    def skip(self, rollouts: int, again: int, tokens: int) -> None: ...

    def run(self, tasks: Any, prompts: Any) -> list[CandidateRun]:
        return [CandidateRun(outcome(reward), None) for reward in self.rewards]


def outcome(reward: float | dict[str, float] | None) -> Outcome:
    rollout = Rollout(rollout_id="r", group_id="g", task={})
    attempt = AttemptRecord(attempt_id="a", rollout=rollout, number=1, fence=1, worker="w")
    earned: dict[Any, float] = reward if isinstance(reward, dict) else {} if reward is None else {None: reward}
    given = tuple(Reward(rollout_id="r", attempt_id="a", value=value, agent=agent) for agent, value in earned.items())
    return Outcome(rollout=rollout, attempt=None if reward is None else attempt, attempts=(attempt,), rewards=given)


def scores(adapter: SpansAdapter, session: Scripted, *rewards: float | dict[str, float] | None) -> list[float]:
    session.rewards = rewards
    found: list[float] = adapter.evaluate([{"q": 1}, {"q": 2}], {"writer": "w"}).scores
    return found


def test_no_prompt_gains_by_failing_where_rewards_are_below_0(tmp_path):
    pytest.importorskip("gepa")
    session = Scripted()
    first = SpansAdapter(session, {"writer": "w"}, SearchJournal(tmp_path / "journal.jsonl"))  # type: ignore[arg-type]
    assert scores(first, session, -1.0, -3.0) == [-1.0, -3.0]
    assert scores(first, session, None, None) == [-3.0, -3.0]
    again = SpansAdapter(session, {"writer": "w"}, SearchJournal(tmp_path / "journal.jsonl"))  # type: ignore[arg-type]
    assert [scores(again, session), scores(again, session)] == [[-1.0, -3.0], [-3.0, -3.0]]  # from the journal
    assert scores(again, session, None, 1.0) == [-3.0, 1.0]


def test_a_prompt_is_scored_by_the_reward_of_its_agent(tmp_path):
    """Of a game the total is 0, whoever wins it."""
    pytest.importorskip("gepa")
    session = Scripted()
    first = SpansAdapter(session, {"writer": "w"}, SearchJournal(tmp_path / "journal.jsonl"))  # type: ignore[arg-type]
    won, lost = {"writer": 1.0, "rival": -1.0}, {"writer": -1.0, "rival": 1.0}
    assert scores(first, session, won, {"writer": 0.5, "rival": -2.0}) == [1.0, 0.5]
    again = SpansAdapter(session, {"writer": "w"}, SearchJournal(tmp_path / "journal.jsonl"))  # type: ignore[arg-type]
    assert scores(again, session) == [1.0, 0.5]  # from the journal
    assert scores(again, session, None, {"rival": 1.0}) == [-2.0, 0.0]  # the lowest of any agent, as in training
    assert scores(again, session, lost, 0.25) == [-1.0, 0.25]


def test_a_search_that_is_out_of_tokens_says_so(folder, monkeypatch):
    pytest.importorskip("gepa")
    with ScriptedServer(model) as server, ScriptedServer(reflector) as teacher:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        args = ["--agents", "writer,checker", "--reflect", teacher.url, "--out", "best.json", "--budget", "60"]
        result = rl(*args, "--tokens", "1")
        assert result.exit_code == 0, result.output
        assert "it ended before its 60 rollouts" in result.output
        result = rl(*args, "--resume", "--json")
        assert json.loads(result.stdout.splitlines()[-1])["ended"] == "ceiling"


def test_a_search_ends_at_the_full_reward_and_says_when_nothing_is_left_to_improve(folder, monkeypatch):
    pytest.importorskip("gepa")

    def perfect(body: dict[str, Any], seen: int) -> Reply:
        system, text = (message["content"] for message in body["messages"])
        return Reply(text="OK" if "check" in system else text.upper())

    with ScriptedServer(perfect) as server, ScriptedServer(reflector) as teacher:
        monkeypatch.setenv("TEST_MODEL_URL", server.url)
        result = rl("--agents", "writer,checker", "--reflect", teacher.url, "--out", "best.json", "--budget", "60")
        assert result.exit_code == 0, result.output
        assert not teacher.requests
    assert "every task to choose by has the full reward of 1" in result.output
    assert "no better prompt was found, so there is nothing to apply" in result.output
    assert "attach(" not in result.output


def traces(*systems: str | None) -> list[Trace]:
    found = []
    for number, system in enumerate(systems):
        messages = [] if system is None else [{"role": "system", "content": system}]
        body = json.dumps({"messages": [*messages, {"role": "user", "content": "hi"}]})
        span = Span(
            operation=CHAT, name="m", trace_id=f"{number:032x}", span_id=f"{number + 1:016x}", start_ns=1, end_ns=2,
            agent="writer", attributes={REQUEST: body},
        )  # fmt: skip
        found.append(Trace.build([span]))
    return found


class ByTask:
    """A session without a program: each task's reward with the agent's own prompt, and another with any other."""

    rollouts = again = tokens = 0

    def __init__(self, others: float) -> None:
        self._others = others

    def check(self) -> None:
        """Nobody asks to stop."""

    def run(self, tasks: Any, prompts: Any) -> list[CandidateRun]:
        self.rollouts += len(tasks)
        (trace,) = traces(prompts["writer"]["after"] if prompts else "You write.")
        return [CandidateRun(outcome(self._others if prompts else task["earns"]), trace) for task in tasks]


@pytest.mark.parametrize(
    ("options", "train", "val", "others", "expected"),
    [
        ({"target": "team:run"}, 10.0, 10.0, 50.0, (50.0, "rollouts", True)),
        ({"command": "./agent", "work": Work(reward_range="0,10")}, 1.0, 1.0, 10.0, (10.0, "ceiling", True)),
        ({"target": "team:run"}, 1.0, 0.5, 1.0, (0.5, "rollouts", False)),
    ],
    ids=["more than 1", "declared range", "no proposal for full rewards"],
)
def test_a_reward_of_1_is_full_unless_a_rollout_has_more_or_the_range_says_so(
    tmp_path, options, train, val, others, expected
):
    pytest.importorskip("gepa")
    with ScriptedServer(reflector) as teacher:
        config = PromptsConfig(
            data=tmp_path / "tasks.jsonl", agents=("writer",), budget=12, out=tmp_path / "best.json",
            reflect=Endpoint(teacher.url, "m"), **options,
        )  # fmt: skip
        search = Search(config, ByTask(others), {"writer": "You write."}, tmp_path, Silent())  # type: ignore[arg-type]
        found = search.run([{"earns": train}], [{"earns": val}])
        assert (found.after, found.ended, bool(teacher.requests)) == expected


def test_of_a_template_only_the_fixed_part_is_the_prompt():
    assert read_prompts(traces("You write.", "You write."), ["writer"]) == {"writer": Prompt("You write.", whole=True)}
    start = read_prompts(traces("Write about: the sea", "Write about: the sky"), ["writer"])
    assert start == {"writer": Prompt("Write about: the", whole=False)}
    end = read_prompts(traces("Day 1. You are a careful poet.", "Day 20. You are a careful poet."), ["writer"])
    assert end["writer"].text == ". You are a careful poet."


@pytest.mark.parametrize(
    ("systems", "error", "said"),
    [
        ((None, None), ConfigError, "no system prompt"),
        (("You write.", None), ConfigError, "1 of 2 calls"),
        (("alpha one", "beta two"), ConfigError, "changes from call to call"),
        ((), UnknownAgentError, "was never seen"),
    ],
)
def test_what_is_no_prompt_is_told(systems, error, said):
    with pytest.raises(error, match=said):
        read_prompts(traces(*systems), ["writer"])


def test_a_prompt_stands_in_the_place_of_its_own_agents_alone():
    prompts = {"writer": {"before": "You write.", "after": "Rhyme."}}
    attempt = Attempt("r", "a", prompts=prompts)
    body = {
        "messages": [{"role": "system", "content": "You write. Be short."}, {"role": "user", "content": "You write."}]
    }
    assert with_prompts(body, "writer", attempt) == {
        "messages": [{"role": "system", "content": "Rhyme. Be short."}, {"role": "user", "content": "You write."}]
    }
    assert body["messages"][0]["content"] == "You write. Be short."
    assert with_prompts(body, "checker", attempt) is None
    assert with_prompts(body, None, attempt) is None
    assert with_prompts(body, "writer", Attempt("r", "a")) is None
    assert with_prompts({"instructions": "You write.", "input": "x"}, "writer", attempt)["instructions"] == "Rhyme."
    parts = {"messages": [{"role": "developer", "content": [{"type": "text", "text": "You write."}]}]}
    assert with_prompts(parts, "writer", attempt)["messages"][0]["content"] == [{"type": "text", "text": "Rhyme."}]


@pytest.mark.parametrize(
    ("before", "texts"),
    [
        ("You write.\nBe short.\nRhyme not.", ["Sing."]),
        ("You write.\nBe", ["Sing. short.", "Rhyme not."]),
        ("short.\nRhyme", ["You write.", "Be Sing. not."]),
        ("short. Rhyme", None),
    ],
)
def test_a_prompt_that_the_gateway_joined_stands_in_the_place_of_its_parts(before, texts):
    attempt = Attempt("r", "a", prompts={"writer": {"before": before, "after": "Sing."}})
    parts = [{"type": "text", "text": text} for text in ("You write.", "Be short.", "Rhyme not.")]
    parts[2]["cache_control"] = {"type": "ephemeral"}
    found = with_prompts({"system": parts, "messages": []}, "writer", attempt)
    assert (found and [part["text"] for part in found["system"]]) == texts
    assert texts is None or found["system"][-1]["cache_control"] == {"type": "ephemeral"}


def test_a_prompt_that_does_not_fit_is_told_once_and_changes_nothing(caplog):
    attempt = Attempt("r", "a", prompts={"teller": {"before": "You tell.", "after": "Rhyme."}})
    body = {"messages": [{"role": "system", "content": "You sing."}]}
    assert with_prompts(body, "teller", attempt) is None
    assert with_prompts(body, "teller", attempt) is None
    assert caplog.text.count("is not the one that the optimised prompt replaces") == 1


def test_an_attempts_prompts_go_through_its_environment():
    from lightning_spans.record.context import from_environment

    attempt = Attempt("r", "a", prompts={"writer": {"before": "a\nb", "after": "ü"}})
    assert from_environment(attempt.environment()) == attempt


class OneRun:
    """A session in which every batch comes to one rollout."""

    again = tokens = 0

    def __init__(self, ran: CandidateRun) -> None:
        self._ran = ran

    def check(self) -> None:
        """Nobody asks to stop."""

    def run(self, *_: Any) -> list[CandidateRun]:
        return [self._ran]


def test_the_reflecting_model_is_told_which_tools_an_agent_called_before(tmp_path):
    pytest.importorskip("gepa")
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    asked = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    body = json.dumps({"messages": [*asked, {"role": "tool", "tool_call_id": "c", "content": "2"}]})
    span = Span(
        operation=CHAT, name="m", trace_id="a" * 32, span_id="b" * 16, start_ns=1, end_ns=2, agent="writer",
        attributes={REQUEST: body},
    )  # fmt: skip
    outcome = Outcome(rollout=Rollout(rollout_id="r", group_id="g", task={}), attempts=(), attempt=None)
    ran = CandidateRun(outcome, Trace.build([span]))
    adapter = SpansAdapter(OneRun(ran), {"writer": "You add."}, SearchJournal(tmp_path / "journal.jsonl"))
    batch = adapter.evaluate([{}], {"writer": "You add."}, capture_traces=True)
    (record,) = adapter.make_reflective_dataset({}, batch, ["writer"])["writer"]
    assert record["Inputs"] == 'user: 1+1?\nassistant:  calls add({"x": 1})\ntool: 2'


def test_the_reflecting_model_is_told_what_responses_answered(tmp_path):
    pytest.importorskip("gepa")
    called = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"x": 1}'}
    gave = {"type": "function_call_output", "call_id": "c", "output": "2"}
    asked = {"instructions": "You add.", "input": [{"role": "user", "content": "1+1?"}, called, gave]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is 2."}]}
    span = Span(
        operation=CHAT, name="m", trace_id="a" * 32, span_id="b" * 16, start_ns=1, end_ns=2, agent="writer",
        attributes={REQUEST: json.dumps(asked), RESPONSE: json.dumps({"id": "r", "output": [said]})},
    )  # fmt: skip
    outcome = Outcome(rollout=Rollout(rollout_id="r", group_id="g", task={}), attempts=(), attempt=None)
    ran = CandidateRun(outcome, Trace.build([span]))
    adapter = SpansAdapter(OneRun(ran), {"writer": "You add."}, SearchJournal(tmp_path / "journal.jsonl"))
    batch = adapter.evaluate([{}], {"writer": "You add."}, capture_traces=True)
    (record,) = adapter.make_reflective_dataset({}, batch, ["writer"])["writer"]
    assert record["Inputs"] == 'user: 1+1?\nassistant:  calls add({"x": 1})\ntool: 2'
    assert record["Generated Outputs"] == "It is 2."


def test_the_file_has_only_what_changed_and_reads_back(tmp_path):
    before, after = {"a": "one\ntwo", "b": "same"}, {"a": "one\nthree\n", "b": "same"}
    write(tmp_path / "p.json", before, after, {"reward_before": 0.0})
    assert read_file(tmp_path / "p.json") == {"a": {"before": "one\ntwo", "after": "one\nthree\n"}}
    assert "-two" in diff(before, after)
    with pytest.raises(ConfigError, match="no such file"):
        read_file(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="that `lightning-rl prompts` wrote"):
        read_file(tmp_path / "other.json")
