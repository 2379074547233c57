"""A recorded attempt is run again up to a call and on from there: real clients, real processes, a scripted engine."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lightning_conformance.plugins.script import Reply
from lightning_conformance.plugins.server import ScriptedServer
from lightning_spans.errors import ConfigError
from lightning_spans.schema.attempts import Rollout
from lightning_spans.schema.replays import Replay
from lightning_spans.schema.rewards import Reward
from lightning_spans.store import Store, open_store
from lightning_spans.store.traces import traces_of
from lightning_trainer.cli import cli
from lightning_trainer.gateway.replay.sessions import summary
from lightning_trainer.kits.forks import ForkResult, plan, recorded, result
from lightning_trainer.kits.replay.regression import RecordReplay, Regression
from lightning_trainer.report.progress import Silent
from lightning_trainer.rl.rollouts import Outcome
from lightning_trainer.rl.told import answer_text
from lightning_trainer.runner.runner import Runner
from lightning_trainer.runner.target import Job
from lightning_trainer.session.answers import AnswerSource
from lightning_trainer.session.sampling import SamplingOptions
from lightning_trainer.session.session import Session, serve
from support.fakes import FakeEngine

pytest.importorskip("openai")

PROGRAM = '''
import asyncio, datetime, itertools, json, os, random
import httpx, openai
import lightning_openai
from lightning_spans import agent, tool

lightning_openai.attach(tracer="embedded")
client = openai.AsyncOpenAI(base_url=os.environ["OWN_URL"], api_key="mine", max_retries=1)
drawn = itertools.count(random.randrange(1000))  # no run is as the one before
THERE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "far", "stop_reason": "end_turn"}
DONE = {"done": True, "done_reason": "stop", "created_at": "2026-01-01T00:00:00Z"}
THERE["usage"] = {"input_tokens": 3, "output_tokens": 4}


async def say(name, text, **more):
    with agent(name):
        reply = await client.chat.completions.create(
            model="own", messages=[{"role": "user", "content": text}], **more
        )
        return reply.choices[0].message.content


async def team(task):
    """A writer, two parallel readers of which one is not trained, and a judge."""
    draft = await say("writer", "write " + task["q"])
    one, two = await asyncio.gather(say("reader", "read " + draft), say("stranger", "look at " + draft))
    last = await say("judge", f"judge {one} and {two}")
    return sum(map(ord, draft + one + two + last)) % 97 / 97


@tool
def note(text):
    with open("notes.txt", "a") as file:
        file.write(text + "\\n")
    return {"letters": len(text)}


async def notes(task):
    draft = await say("writer", "write " + task["q"])
    kept = note(draft)
    return len(await say("judge", f"judge {draft} of {kept['letters']}" + os.environ.get("CHANGED", ""))) / 99


async def silent(task):
    await notes(task)


def without_an_answer(error, reached=None):
    """A client of an endpoint that can't be reached, or never answers; `reached` is set when it is asked."""

    async def handle(request):
        if reached is not None:
            reached.set()
        if error is None:
            await asyncio.Event().wait()
        raise error("gone", request=request)

    http = httpx.AsyncClient(transport=httpx.MockTransport(handle))
    return openai.AsyncOpenAI(base_url="http://nowhere.invalid/v1", api_key="mine", max_retries=0, http_client=http)


async def errors(task):
    told = []
    timed_out, unreachable = map(without_an_answer, (httpx.ReadTimeout, httpx.ConnectError))
    for name, at, more in (
        ("writer", client, {"temperature": 1000}),
        ("stranger", client, {}),
        ("stranger", timed_out, {}),
        ("stranger", unreachable, {}),
    ):
        try:
            with agent(name):
                await at.chat.completions.create(model="own", messages=[{"role": "user", "content": "refuse"}], **more)
        except openai.APIError as error:
            told.append(f"{type(error).__name__}: {error}, {error.code}, {error.body}")
    return len(await say("judge", "judge " + "; ".join(told))) / 99


async def race(task):
    """Two are asked at once, and the one that is not needed any more is cancelled."""
    with agent("stranger"):
        reached = asyncio.Event()
        own, asked = without_an_answer(None, reached), [{"role": "user", "content": "?"}]
        slow = asyncio.ensure_future(own.chat.completions.create(model="own", messages=asked))
    if os.path.exists("hasty"):
        slow.cancel()  # before it was asked, as on a machine where other answers come first
    quick = await say("reader", await say("writer", "write " + task["q"]))
    if os.path.exists("patient"):
        await reached.wait()
    slow.cancel()
    return len(await say("judge", quick)) / 99


async def continued(task):
    first = await client.completions.create(model="own", prompt="Once upon a time")
    return len(await say("judge", first.choices[0].text)) / 99


async def vendor(task):
    """Agents that are not trained ask in the forms of Anthropic and of Ollama, without a client of openai's."""

    async def answer(request):
        text = f"{next(drawn)} of {len(request.content)}"
        if request.url.path == "/api/chat":
            return httpx.Response(200, json={"model": "far", "message": {"role": "assistant", "content": text}, **DONE})
        return httpx.Response(200, json={**THERE, "content": [{"type": "text", "text": text}]})

    said = []
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as own:
        for text in ("look at " + await say("writer", "write " + task["q"]), "again"):
            with agent("stranger"):
                body = {"model": "far", "max_tokens": 9, "messages": [{"role": "user", "content": text}]}
                there = await own.post("http://vendor.invalid/v1/messages", json=body)
            said.append(there.json()["content"][0]["text"])
        with agent("passer-by"):
            body = {"model": "far", "stream": False, "messages": [{"role": "user", "content": "hello"}]}
            there = await own.post("http://vendor.invalid/api/chat", json=body)
        said.append(there.json()["message"]["content"])
    return len(await say("judge", f"judge {said}")) / 99


async def clock(task):
    draft = await say("writer", "write " + task["q"])
    return len(await say("judge", f"it is {datetime.datetime.now():%H:%M:%S.%f}: judge {draft}")) / 99
'''


@dataclass
class World:
    """A server with a scripted policy, and a program that runs on it."""

    session: Session
    engine: FakeEngine
    own: ScriptedServer
    store: Store

    def rollout(self, name: str, **changes: Any) -> Outcome:
        made = Rollout(rollout_id=name, group_id=name, task={"q": "a poem"}, timeout_s=600.0, **changes)
        return self.session.run([made], Silent(), "recording")[0]

    def fork(self, name: str, rollout_id: str, *, times: int = 1, **replay: Any) -> ForkResult:
        source = recorded(self.store, rollout_id=rollout_id)
        rollouts = plan(
            source, name=name, replay=Replay(attempt_id=source.attempt_id, **replay), times=times, tokens=False
        )
        return result(self.store, source, self.session.run(rollouts, Silent(), "forks"))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Open a world in which a function of the program runs."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    numbers = itertools.count()

    @contextlib.contextmanager
    def opened(function: str, **job: Any) -> Iterator[World]:
        own = ScriptedServer(
            lambda body, _: Reply("too long", status=400) if "refuse" in str(body) else Reply(f"own {next(numbers)}")
        )
        monkeypatch.setenv("OWN_URL", own.url)
        engine = FakeEngine(lambda prompt: f"drawn {next(numbers)} " + hashlib.md5(prompt.encode()).hexdigest())
        store = open_store(str(tmp_path / "store.db"))
        runner = Runner(Job(target=f"program:{function}", **job), workers=1, concurrency=4, logs=tmp_path)
        runner.start()
        try:
            sampling = SamplingOptions(answered=("writer", "reader", "judge"), seed=1)
            with serve(store, runner, AnswerSource(model=engine.model, engines=[engine]), sampling) as session:
                yield World(session, engine, own, store)
        finally:
            runner.stop()
            store.close()
            own.close()

    return opened


def test_a_fork_goes_as_recorded_up_to_its_call_and_on_from_there(world: Any) -> None:
    with world("team") as here:
        first = here.rollout("r")
        asked, at_own = len(here.engine.prompts), len(here.own.requests)
        found = here.fork("fork", "r", call=3, times=2)
        assert found.recorded == pytest.approx(sum(reward.value for reward in first.rewards))
        assert found.ended == ()
        assert len(found.continuations) == 2
        assert len(here.engine.prompts) == asked + 2  # the judge's call, and no other
        assert len(here.own.requests) == at_own  # the stranger's answer is the recorded one
        (old,) = traces_of(here.store, rollout_ids=["r"])
        for continuation in found.continuations:
            (new,) = traces_of(here.store, attempt_ids=[continuation.attempt_id])
            assert [node.span.agent for node in new.chats] == [node.span.agent for node in old.chats]
            before = [(n.answer.prompt_token_ids, n.answer.choices) for n in old.chats[:3]]
            assert [(n.answer.prompt_token_ids, n.answer.choices) for n in new.chats[:3]] == before
            assert [bool(n.call and "replayed" in n.call.sampling) for n in new.chats] == [True] * 3 + [False]
            assert new.chats[3].answer.prompt_token_ids == old.chats[3].answer.prompt_token_ids
            assert new.chats[3].answer.choices != old.chats[3].answer.choices


def test_what_an_own_endpoint_answered_to_the_forked_call_is_told(world: Any) -> None:
    with world("team") as here:
        here.rollout("r")
        (old,) = traces_of(here.store, rollout_ids=["r"])
        (stranger,) = (number for number, node in enumerate(old.chats) if node.span.agent == "stranger")
        said = {old.chats[stranger].answer.choices[0].message["content"]}
        found = here.fork("fork", "r", call=stranger, times=2)
        assert found.ended == ()
        answers = [str(each.answer) for each in found.continuations]
        assert [answer[:4] for answer in answers] == ["own ", "own "]
        assert len({*answers, *said}) == 3


def test_a_time_of_day_in_a_prompt_ends_the_fork_with_its_reason(world: Any) -> None:
    with world("clock") as here:
        here.rollout("r")
        found = here.fork("fork", "r", call=1)
        assert found.continuations == ()
        (ended,) = found.ended
        assert "`judge`'s first call (call 1) is another: message 1 (user) differs: a time of day" in ended.reason
        (rollout,) = here.store.rollouts(group_ids=["fork:r-1"])
        assert rollout.status == "failed"
        assert len(here.store.attempts(rollout_ids=[rollout.rollout_id])) == 1  # it is not tried again


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        pytest.param("errors", 5, id="refusals, time-outs and lost connections"),
        pytest.param("race", 4, id="a call that its agent left"),
        pytest.param("continued", 2, id="text completions of an own endpoint"),
        pytest.param("vendor", 5, id="Anthropic's and Ollama's forms at own endpoints"),
    ],
)
def test_a_program_replays_to_its_last_call(world: Any, function: str, calls: int) -> None:
    with world(function) as here:
        first = here.rollout("r")
        (old,) = traces_of(here.store, rollout_ids=["r"])
        assert len(old.chats) == calls
        found = here.fork("whole", "r")
        assert found.ended == ()
        (again,) = found.continuations
        assert (again.error, again.reward) == (None, sum(reward.value for reward in first.rewards))
        (new,) = traces_of(here.store, attempt_ids=[again.attempt_id])
        kinds = [[node.span.attributes.get("error.type") for node in trace.chats] for trace in (old, new)]
        asked = [kind for kind in kinds[0] if kind != "CancelledError"]  # a call that is left may be left before it is
        assert kinds[1] in (kinds[0], asked)


def test_a_call_that_its_agent_left_may_be_left_before_it_is_asked(world: Any) -> None:
    with world("race") as here:
        here.rollout("r")
        Path("hasty").touch()
        assert here.fork("whole", "r").ended == ()


def test_a_call_that_its_agent_left_after_the_forked_one_is_made_anew(world: Any) -> None:
    with world("race") as here:
        here.rollout("r")
        (old,) = traces_of(here.store, rollout_ids=["r"])
        (reader,) = (number for number, node in enumerate(old.chats) if node.span.agent == "reader")
        Path("patient").touch()
        found = here.fork("fork", "r", call=reader)
        assert found.ended == ()
        (continuation,) = found.continuations
        (new,) = traces_of(here.store, attempt_ids=[continuation.attempt_id])
        (slow,) = (node for node in new.chats if node.span.agent == "stranger")
        assert summary(here.store, continuation.attempt_id)["own"] == 1
        assert slow.call is None  # no gateway held it: it went to its own endpoint
        assert slow.span.attributes["error.type"] == "CancelledError"


def test_a_tool_that_writes_to_a_file_does_not_write_twice(world: Any, tmp_path: Path) -> None:
    with world("notes") as here:
        first = here.rollout("r")
        written = (tmp_path / "notes.txt").read_text()
        assert written.count("\n") == 1
        found = here.fork("late", "r", call=1, times=2)
        assert [each.error for each in found.continuations] == [None, None]
        again = here.fork("whole", "r")
        assert [each.reward for each in again.continuations] == [sum(reward.value for reward in first.rewards)]
        assert (tmp_path / "notes.txt").read_text() == written
        early = here.fork("early", "r", call=0)
        assert early.ended == ()
        assert (tmp_path / "notes.txt").read_text() != written  # after the fork it ran: the draft is another
        with pytest.raises(ConfigError, match="the tool note has side effects and ran after call 0"):
            here.fork("refused", "r", call=0, refuse_tools=("no*",))


def test_the_command_forks_and_replays(world: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = ["program:notes", "--store", str(tmp_path / "store.db"), "--rollout", "r", "--workers", "1", "--json"]
    with world("notes") as here:
        here.rollout("r")
    with ScriptedServer(lambda *_: Reply("own answer")) as own:
        monkeypatch.setenv("OWN_URL", own.url)
        told = _run("fork", *whole, "--dry-run")
        assert (told["replays"], told["ended"]) == (True, [])
        told = _run("fork", *whole, "--call", "1", "--say", "quite good")
        assert [each["answer"] for each in told["continuations"]] == ["quite good"]
        assert told["continuations"][0]["reward"] == pytest.approx(len("quite good") / 99)
        assert own.requests == []
        monkeypatch.setenv("CHANGED", " strictly")
        told = _run("fork", *whole, "--dry-run", status=2)
        assert "`judge`'s first call (call 1) is another: message 1 (user) differs" in told["ended"][0]["reason"]
        none = CliRunner().invoke(cli, ["fork", *whole, "--call", "1", "--say", "quite good"])
        assert (none.exit_code, "differs" in none.stdout) == (2, True)
        (replayed,) = _run("replay", *whole, "--success", "0")["replays"]
        assert "message 1 (user) differs" in replayed["parted"]
        assert (replayed["succeeds"], replayed["reason"]) == (True, None)
        assert replayed["reward"] == pytest.approx(len("own answer") / 99)
        assert len(own.requests) == 1
        for least, status in (("0", 0), ("0.5", 1)):
            assert _run("replay", *whole, "--success", "1", "--fail-under", least, status=status)["succeed"] == 0


@pytest.mark.parametrize(("least", "status"), [("0.55", 0), ("0.56", 1)])
def test_a_share_that_is_exactly_the_required_one_is_enough(
    monkeypatch: pytest.MonkeyPatch, least: str, status: int
) -> None:
    found = Regression(tuple(RecordReplay(str(place), succeeds=place < 55) for place in range(100)))
    monkeypatch.setattr("lightning_trainer.kits.replay.replay_all", lambda *_: found)
    assert _run("replay", "program:run", "--json", "--fail-under", least, status=status)["succeed"] == 55


def test_what_a_judge_or_a_rule_gave_is_not_set_beside_what_nobody_judged(world: Any, tmp_path: Path) -> None:
    with world("silent", needs_reward=False) as here:
        first = here.rollout("r")
        assert first.attempt is not None
        of = {"rollout_id": "r", "attempt_id": first.attempt.attempt_id}
        later = [("judge", "1"), ("tool_status", f"air/{of['attempt_id']}/tool_status/1"), ("evaluator:shop", "2")]
        here.store.add_rewards(
            [Reward(**of, value=0.9, source=source, reward_id=reward_id) for source, reward_id in later]
        )
        source = recorded(here.store, rollout_id="r")
        assert [reward.value for reward in source.rewards] == [0.9] * 3
        assert replace(source, rewards=(*source.rewards, Reward(**of, value=0.5, source="run"))).reward == 0.5
        found = here.fork("fork", "r", call=1)
        assert (found.recorded, [each.reward for each in found.continuations]) == (None, [None])

    words = ["--store", str(tmp_path / "store.db"), "--rollout", "r", "--workers", "1", "--json"]
    (replayed,) = _run("replay", "program:silent", *words, "--success", "0.5")["replays"]
    assert (replayed["recorded"], replayed["reward"], replayed["succeeds"]) == (None, None, False)
    assert "it got no reward" in replayed["reason"]
    (tmp_path / "config.json").write_text(json.dumps({"target": "program:silent", "reward": "judge"}))
    for refused in (["fork", *words, "--call", "1", "--say", "fine"], ["replay", *words]):
        said = CliRunner().invoke(cli, refused)
        assert said.exit_code == 2
        assert "a judge can't score forks and replays" in said.output
    assert _run("fork", *words, "--dry-run")["replays"] is True


def test_the_key_of_one_server_is_not_sent_to_another(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world("notes") as here:
        here.rollout("r")
    monkeypatch.setenv("LIGHTNING_UPSTREAM_KEY", "secret-of-the-first")
    (tmp_path / "key").write_text("secret-of-the-second\n")
    with ScriptedServer(lambda *_: Reply("quite good")) as first, ScriptedServer(lambda *_: Reply("fine")) as second:
        words = ["program:notes", "--store", str(tmp_path / "store.db"), "--rollout", "r", "--workers", "1", "--json"]
        words += ["--call", "1", "--model", "m", "--endpoint", first.url]
        for more in ([], ["--with-key", str(tmp_path / "key")]):
            told = _run("fork", *words, "--with", f"m2={second.url}", *more)
            assert [each["answer"] for each in told["continuations"]] == ["fine"]
        keys = [request.headers.get("authorization") for request in second.requests]
        assert keys == [None, "Bearer secret-of-the-second"]
        _run("fork", *words, "--with", f"m2={first.url}")
        assert [request.headers.get("authorization") for request in first.requests] == ["Bearer secret-of-the-first"]
    refused = CliRunner().invoke(cli, ["fork", *words, "--with-key", str(tmp_path / "key")])
    assert refused.exit_code == 2
    assert "--with-key is the key of a server" in refused.output


def test_a_temperature_holds_for_the_forked_call_and_is_refused_where_nothing_is_drawn_here(
    world: Any, tmp_path: Path
) -> None:
    with world("notes") as here:
        here.rollout("r")
    words = ["program:notes", "--store", str(tmp_path / "store.db"), "--rollout", "r", "--workers", "1", "--json"]
    words += ["--temperature", "0.5"]
    with ScriptedServer(lambda *_: Reply("fine")) as server:
        _run("fork", *words, "--call", "1", "--with", f"m={server.url}")
        assert [request.body["temperature"] for request in server.requests] == [0.5]
    for refused in (["fork", *words, "--call", "1", "--say", "fine"], ["replay", *words]):
        said = CliRunner().invoke(cli, refused)
        assert said.exit_code == 2
        assert "temperature: of calls that come to a model named here" in said.output


def test_a_store_at_which_others_work_is_not_forked(world: Any, tmp_path: Path) -> None:
    with world("notes") as here:
        here.rollout("r")
        here.session.runner.stop()
        here.store.enqueue([Rollout(rollout_id="waits", group_id="g", task={})])
        words = ["fork", "program:notes", "--store", str(tmp_path / "store.db"), "--rollout", "r", "--dry-run"]
        found = CliRunner().invoke(cli, words)
        assert found.exit_code == 2
        assert "1 of its rollouts is queued or running" in found.output


def _run(*words: str, status: int = 0) -> Any:
    found = CliRunner().invoke(cli, list(words))
    assert found.exit_code == status, found.output
    return json.loads(found.stdout.rstrip("\n").rpartition("\n")[2])


def test_what_cant_be_forked_is_refused(world: Any) -> None:
    with world("clock") as here:
        here.rollout("r")
        with pytest.raises(ConfigError, match="has 2 calls, numbered 0 to 1: there is no call 2"):
            here.fork("beyond", "r", call=2)
        here.store.delete(rollout_ids=["r"])
        with pytest.raises(ConfigError, match="rollout r is not in the store"):
            here.fork("deleted", "r", call=0)


CALLED = {"name": "look", "arguments": '{"at": 1}'}


@pytest.mark.parametrize(
    "message",
    [
        {"content": "Yes.", "tool_calls": [{"id": "c", "type": "function", "function": CALLED}]},
        {"content": [{"type": "text", "text": "Yes."}], "tool_calls": [{"id": "c", "function": CALLED}]},
        {"output": [{"type": "message", "content": [{"text": "Yes."}]}, {"type": "function_call", **CALLED}]},
    ],
    ids=["chat completions", "parts", "Responses"],
)
def test_an_answer_is_told_as_people_read_it(message: dict[str, Any]) -> None:
    assert answer_text(message) == 'Yes.\nlook({"at": 1})'


def test_an_answer_in_blocks_is_told_as_people_read_it() -> None:
    blocks = [{"type": "text", "text": "Yes."}, {"type": "tool_use", "name": "look", "input": {"at": 1}}]
    assert answer_text({"content": blocks}) == 'Yes.\nlook({"at": 1})'
    assert answer_text({"content": None}) == ""
