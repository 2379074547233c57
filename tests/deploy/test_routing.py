"""Which policy answers a deployed agent, over a gateway that runs: sticky, with a way back, and no request lost."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest

from lightning_conformance import MemoryStore
from lightning_spans.errors import StoreError
from lightning_spans.store import open_store
from lightning_spans.store.deployments import Assignment, Deployment
from lightning_trainer.gateway.upstream.upstream import Upstream
from lightning_trainer.kits.deploy import serving
from lightning_trainer.kits.deploy.routing import MARK, draw
from lightning_trainer.kits.deploy.serving import deploying
from lightning_trainer.kits.deploy.table import keep
from lightning_trainer.kits.deploy.transitions import (
    Policy,
    begin_canary,
    name_candidate,
    promote,
    roll_back,
)
from support.fakes import FakeEngine, served
from support.gateway.deployed import NOTE, Deployed, deployed
from support.gateway.lora_server import Vllm, write_checkpoint


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Deployed]:
    with deployed(tmp_path) as found:
        yield found


def names(share: float, above: float = 0.0) -> list[str]:
    """Conversations that a canary of this share gives to the candidate, and one of `above` does not."""
    drawn = {f"c{number}": draw("writer", "new", f"conversation:c{number}") for number in range(400)}
    return [name for name, at in drawn.items() if above <= at < share][:6]


def test_only_the_share_of_a_canary_is_answered_by_the_candidate(here: Deployed) -> None:
    assert here.say("c") == "old"
    here.change(name_candidate, Policy("new"), stable="old")
    assert set(here.all_say(names(0.1))) == {"old"}, "a candidate answers nobody"
    here.change(begin_canary, 0.1)
    chosen = [draw("writer", "new", f"conversation:x{number}") < 0.1 for number in range(20)]
    assert here.all_say([f"x{number}" for number in range(20)]) == ["new" if one else "old" for one in chosen]
    assert here.say(names(0.1)[0], agent="reader") == "old"
    assert here.say(names(0.1)[0], agent=None) == "old"
    calls = here.server.store.calls(origin="live")
    assert {call.policy for call in calls if call.sampling.get(MARK) == 2} == {"old", "new"}


def test_each_candidate_and_each_agent_begins_with_conversations_of_its_own() -> None:
    few = {
        tuple(number for number in range(400) if draw(agent, candidate, f"conversation:c{number}") < 0.1)
        for agent, candidate in (("writer", "new"), ("writer", "newer"), ("reader", "new"))
    }
    assert len(few) == 3


def test_a_conversation_keeps_its_policy_when_the_share_grows_and_when_the_candidate_is_promoted(
    here: Deployed, tmp_path: Path
) -> None:
    few, more = names(0.1), names(0.9, above=0.1)
    here.change(name_candidate, Policy("new"), stable="old")
    here.change(begin_canary, 0.1)
    before = here.all_say([*few, *more])
    assert set(before) == {"new", "old"}
    here.change(begin_canary, 0.9)
    assert here.all_say([*few, *more]) == before
    here.change(promote)
    assert here.all_say([*few, *more]) == before
    assert here.say("begun afterwards") == "new"
    store = open_store(str(tmp_path / "server.db"))
    with deployed(tmp_path / "again", store=store) as another:  # or the same server, started again
        another.follow()
        assert another.all_say([*few, *more]) == before


def test_after_a_rollback_no_call_goes_to_the_candidate(here: Deployed) -> None:
    few = names(0.5)
    here.change(name_candidate, Policy("new"), stable="old")
    here.change(begin_canary, 0.5)
    assert set(here.all_say(few)) == {"new"}
    here.change(roll_back)
    assert set(here.all_say(few)) == {"old"}
    here.change(name_candidate, Policy("new"))
    here.change(begin_canary, 0.5)
    here.change(promote)
    assert here.say("after") == "new"
    here.change(roll_back)
    assert {here.say("after"), *here.all_say(few)} == {"old"}


def test_an_attempt_is_a_conversation_and_so_are_messages_that_begin_alike(here: Deployed) -> None:
    here.change(name_candidate, Policy("new"), stable="old")
    here.change(begin_canary, 0.5)
    for attempt in ("a1", "a2", "a3", "a4"):
        expected = "new" if draw("writer", "new", attempt) < 0.5 else "old"
        texts = {here.say(text=text, key=here.server.key(attempt)) for text in ("one", "two")}
        assert texts == {expected}
    create = here.client().chat.completions.create
    for number in range(6):
        first: list[Any] = [{"role": "system", "content": "s"}, {"role": "user", "content": f"{number}"}]
        longer = [*first, {"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]
        replies = [create(model="old", messages=messages) for messages in (first, longer)]
        assert len({reply.choices[0].message.content for reply in replies}) == 1
    given = here.server.store.page(Assignment).records
    assert len([one for one in given if one.attempt_id.startswith("messages:")]) == 6


def test_a_candidate_that_fails_costs_no_request(tmp_path: Path) -> None:
    def break_down(_: str) -> Exception:
        return RuntimeError("out of memory")

    engines = [FakeEngine(lambda _: "old", model="old"), FakeEngine(break_down, model="new")]
    with deployed(tmp_path, engine=engines) as here:
        here.change(name_candidate, Policy("new"), stable="old")
        here.change(begin_canary, 1.0)
        assert here.say("c") == "old"
        stream = here.client("c").chat.completions.create(
            model="old", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "old"
        message = here.client("c").responses.create(model="old", input="hi")
        assert message.output_text == "old"
        call, *_ = here.server.store.calls(origin="live")
        assert (call.policy, call.error) == ("old", None)
        assert call.sampling["fell_back"]["from"] == "new"
        assert "out of memory" in call.sampling["fell_back"]["error"]


def test_a_policy_that_is_not_served_leaves_the_one_before_it_answering(here: Deployed) -> None:
    here.change(name_candidate, Policy("writer@0", "/nowhere", "no upstream"), stable="old")
    here.change(begin_canary, 1.0)
    assert here.say("c") == "old"
    assert "no upstream" in here.loader.problems["writer@0"]
    here.change(promote)
    assert here.say("c") == here.say("d") == "old"
    keep(here.server.store, name_candidate(None, "reader", Policy("mistyped"), NOTE, stable="gone"))
    here.follow()
    assert here.loader.problems.keys() >= {"gone", "mistyped"}
    assert "--upstream mistyped=URL" in here.loader.problems["mistyped"]
    with pytest.raises(openai.InternalServerError, match="'gone' of reader is not served here"):
        here.say("c", agent="reader")


def test_a_table_that_can_not_be_read_leaves_the_policies_as_they_are(here: Deployed) -> None:
    here.change(name_candidate, Policy("new"), stable="old")
    here.change(begin_canary, 1.0)
    assert here.say("c") == "new"
    closed = MemoryStore()
    closed.close()
    here.table._store = closed
    with pytest.raises(StoreError):
        here.table.read()
    assert here.say("c") == "new"


def test_a_row_that_becomes_visible_late_is_seen(here: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PostgreSQL a transaction may end after one whose rows come behind its own."""
    here.change(name_candidate, Policy("new"), stable="old")
    newest = here.server.store.page(Deployment, newest_first=True, limit=1)
    real = here.table._store.page
    seen = SimpleNamespace(page=lambda *given, **more: newest if more.get("newest_first") else real(*given, **more))
    here.table._store = cast(Any, seen)
    here.change(begin_canary, 1.0)
    assert here.say("c") == "old"
    monkeypatch.setattr(serving, "_WHOLE_S", 0.0)
    here.follow()
    assert here.say("d") == "new"


def test_an_adapter_is_loaded_next_to_a_vendors_model_and_unloaded_after_its_last_versions(tmp_path: Path) -> None:
    vllm = Vllm()
    url = f"{vllm.thread.start()}/v1"
    vllm.contents["vendor"] = ("vendor", "")
    try:
        upstreams = [Upstream("vendor", url), Upstream("base", url)]
        with deployed(tmp_path / "here", engine=None, upstreams=upstreams) as here:
            stable: dict[str, str] = {"stable": "vendor"}
            loaded = []
            for number in range(4):
                folder = write_checkpoint(tmp_path / f"run{number}", str(number)) / "writer"
                loaded.append(f"writer@{number}")
                here.change(name_candidate, Policy(loaded[-1], str(folder), "base"), **stable)
                assert loaded[-1] in vllm.contents, "it is loaded before it answers anybody"
                here.change(begin_canary, 1.0)
                assert here.say(f"c{number}") == f"writer {number}"
                here.change(promote)
                stable = {}
            here.follow()  # none of those before is in a call
            assert [name for name in loaded if name in vllm.contents] == loaded[2:]
            assert here.say("c2") == "writer 2", "its conversation goes on"
            assert here.say("c0") == "writer 3"
            here.change(roll_back)
            assert here.say("c3") == here.say("d") == "writer 2"
    finally:
        vllm.thread.stop()


def test_a_rollback_under_load_loses_no_request(tmp_path: Path) -> None:
    """64 streams are under way when the candidate is rolled back; they end, and all that follow are the old one's."""
    begun, may_end = threading.Semaphore(0), threading.Event()

    def answer(_: str) -> str:
        begun.release()
        return "new" * 40

    engines = [FakeEngine(lambda _: "old", model="old"), FakeEngine(answer, model="new", delay_s=0.01)]
    with deployed(tmp_path, engine=engines) as here, ThreadPoolExecutor(64) as pool:
        here.change(name_candidate, Policy("new"), stable="old")
        here.change(begin_canary, 1.0)

        def stream(number: int) -> tuple[str, str | None]:
            chunks = here.client(f"c{number}").chat.completions.create(
                model="old", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert may_end.wait(60)
            return said, here.say(f"c{number}")

        streams = [pool.submit(stream, number) for number in range(64)]
        for _ in streams:
            assert begun.acquire(timeout=60)
        here.change(roll_back)
        may_end.set()
        assert {one.result() for one in streams} == {("new" * 40, "old")}


def test_an_evaluator_rewards_a_conversation_that_has_been(here: Deployed) -> None:
    here.change(name_candidate, Policy("new"), stable="old")
    here.say("known")
    headers = {"authorization": f"Bearer {here.server.keys.issue('evaluator', holder='shop')}"}

    def reward(name: str) -> int:
        given = {"rollout_id": name, "attempt_id": name, "value": 1.0, "source": "feedback", "reward_id": name}
        body = {"rewards": [given]}
        return httpx.post(f"{here.server.url}/api/rewards", json=body, headers=headers).status_code

    assert (reward("conversation:known"), reward("conversation:other")) == (200, 400)
    (kept,) = here.server.store.rewards(attempt_ids=["conversation:known"])
    assert kept.source == "evaluator:shop/feedback"


def test_a_callers_key_calls_models_and_sends_spans_and_nothing_else(here: Deployed) -> None:
    assert here.say("c") == "old"
    with httpx.Client(base_url=here.server.url, headers={"authorization": f"Bearer {here.key}"}) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.post("/v1/traces", json={"resourceSpans": []}).status_code == 200
        for method in ("deployments", "assignments", "rewards", "rollouts", "delete", "query"):
            assert client.post(f"/api/{method}", json={}).status_code == 403
        assert client.get("/api/deployments").status_code == 403


def test_a_server_follows_the_table_by_itself(tmp_path: Path) -> None:
    with served(
        tmp_path, engine=[FakeEngine(lambda _: "old", model="old"), FakeEngine(lambda _: "new", model="new")]
    ) as server:
        first = name_candidate(None, "writer", Policy("new"), NOTE, stable="old")
        keep(server.store, first)
        with deploying(server.app):
            here = Deployed(server, None, None, server.keys.issue("caller"))
            assert here.say("before") == "old"
            with closing(open_store(str(tmp_path / "server.db"))) as another:  # as `lightning-rl deploy` opens it
                keep(another, begin_canary(first, "writer", 1.0, NOTE))
            numbers = itertools.count()
            assert any(here.say(f"c{next(numbers)}") == "new" for _ in iter(int, 1))
