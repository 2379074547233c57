"""The states of an agent's policy: one row for each transition, whatever happens while it is written."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from sqlalchemy import event

from lightning_conformance import MemoryStore
from lightning_spans.errors import ConfigError
from lightning_spans.schema.calls import Call
from lightning_spans.store import open_store
from lightning_spans.store.deployments import Deployment, Stage
from lightning_spans.store.protocol import each
from lightning_spans.store.sql.store import SqlStore
from lightning_trainer.gateway.app import create_app
from lightning_trainer.gateway.auth.keys import Keys
from lightning_trainer.gateway.http.serving import ServerThread
from lightning_trainer.kits.deploy import transitions
from lightning_trainer.kits.deploy.table import adapters_to_load, keep, policies_of, read_histories
from lightning_trainer.kits.deploy.transitions import (
    Note,
    Policy,
    begin_canary,
    name_candidate,
    promote,
    roll_back,
)
from support.cli import call, told
from support.fakes import FakeEngine

NOTE = Note("because", "ada", at_ns=1)
STEPS = {
    "candidate": ["candidate", "--agent", "writer", "--model", "new", "--stable", "old"],
    "canary": ["canary", "--agent", "writer", "--share", "20%"],
    "wider": ["canary", "--agent", "writer", "--share", "0.5"],
    "promote": ["promote", "--agent", "writer", "--override", "--reason", "better", "--by", "ada"],
    "rollback": ["rollback", "--agent", "writer"],
}


def deploy(store: Path, *arguments: str) -> dict:
    result = call("deploy", *arguments, "--store", store, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["agents"]


def test_a_candidate_with_unknown_names_is_refused_by_its_server(tmp_path: Path) -> None:
    keys = Keys.fresh()
    key = tmp_path / "lightning.key"
    key.write_text(keys.issue("admin"))
    with closing(open_store(str(tmp_path / "s.db"))) as store:
        ids = {"call_id": "c", "response_id": "c", "policy": "gpt", "policy_version": 0, "agent": "shop/writer"}
        store.add_calls([Call(**ids, start_ns=1, end_ns=2, origin="live")])
        thread = ServerThread(create_app(store, keys=keys, engine=FakeEngine(lambda _: "x", model="gpt")))
        try:
            where = ("--store", thread.start(), "--key-file", key)
            named = ("deploy", "candidate", *where, "--model", "gpt")
            told(call(*named, "--agent", "writer", "--stable", "gtp"), "--stable 'gtp' is not a model of http://")
            told(call(*named, "--agent", "writer", "--stable", "gtp"), "Did you mean 'gpt'? Its models: gpt.")
            mistyped = call(*named, "--agent", "wirter", "--stable", "gpt")
            assert "agent 'wirter'. Did you mean 'writer'?" in mistyped.stderr
            right = call(*named, "--agent", "writer", "--stable", "gpt")
        finally:
            thread.stop()
    assert "WARNING" not in right.stderr


@pytest.fixture
def path(tmp_path: Path) -> Path:
    open_store(str(tmp_path / "lightning.db")).close()
    return tmp_path / "lightning.db"


def test_a_candidate_goes_through_its_stages_and_each_is_in_the_history(path: Path) -> None:
    stages = [deploy(path, *arguments)["writer"] for arguments in STEPS.values()]
    assert [(one["stage"], one["stable"], one["candidate"], one["share"]) for one in stages] == [
        ("candidate", "old", "new", 0.0),
        ("canary", "old", "new", 0.2),
        ("canary", "old", "new", 0.5),
        ("stable", "new", None, 0.0),
        ("rolled_back", "old", "new", 0.0),
    ]
    history = deploy(path, "status", "--agent", "writer")["writer"]["history"]
    assert [one["number"] for one in history] == [1, 2, 3, 4, 5]
    assert (history[3]["reason"], history[3]["actor"]) == ("better", "ada")
    assert "rolled back" in call("deploy", "status", "--store", path).stdout


def test_what_can_not_follow_is_refused_with_what_to_do(path: Path) -> None:
    def refused(*arguments: str, say: str) -> None:
        told(call("deploy", *arguments, "--store", path), say)

    refused("canary", "--agent", "writer", say="deploy candidate --agent writer")
    refused("candidate", "--agent", "writer", "--model", "new", say="--stable MODEL")
    refused("candidate", "--agent", "writer", say="--checkpoint")
    refused("rollback", "--agent", "writer", say="nothing to roll back")
    deploy(path, *STEPS["candidate"])
    refused(*STEPS["candidate"], say="roll it back first")
    refused(*STEPS["promote"], say="Start a canary first")
    refused("canary", "--agent", "writer", "--share", "120%", say="at most 100 %")
    refused("canary", "--agent", "writer", "--share", "much", say="such as 5%")
    deploy(path, *STEPS["rollback"])
    refused("candidate", "--agent", "writer", "--model", "new", "--stable", "other", say="is old, not other")
    refused("candidate", "--agent", "writer", "--model", "old", say="already")
    refused("status", "--agent", "reader", say="writer")


def test_of_two_people_who_change_an_agent_at_once_the_second_is_refused() -> None:
    store = MemoryStore()
    first = name_candidate(None, "writer", Policy("new"), NOTE, stable="old")
    keep(store, first)
    keep(store, first)  # asked again, since its answer was lost
    with pytest.raises(ConfigError, match=r"changed meanwhile \(candidate, by ada\)"):
        keep(store, name_candidate(None, "writer", Policy("other"), NOTE, stable="old"))
    assert list(each(store, Deployment)) == [first]


def test_rollbacks_go_back_one_promotion_at_a_time() -> None:
    history = [name_candidate(None, "writer", Policy("v1"), NOTE, stable="v0")]
    for version in ("v2", "v3"):
        history.append(begin_canary(history[-1], "writer", 0.05, NOTE))
        history.append(promote(history[-1], "writer", NOTE))
        history.append(name_candidate(history[-1], "writer", Policy(version), NOTE))
    for stable, rejected in (("v2", "v3"), ("v1", "v2"), ("v0", "v1")):
        if stable == "v2":
            history.append(promote(begin_canary(history[-1], "writer", 0.05, NOTE), "writer", NOTE))
        history.append(roll_back(history, "writer", NOTE))
        assert (history[-1].stable, history[-1].candidate) == (stable, rejected)
    assert policies_of(history).retired == (), "what was rolled back answers no conversation any more"
    with pytest.raises(ConfigError, match="nothing to roll back"):
        roll_back(history, "writer", NOTE)


def test_a_second_rollback_of_one_candidate_leaves_the_stable_policy(path: Path) -> None:
    history = [name_candidate(None, "writer", Policy("v1"), NOTE, stable="v0")]
    history += [begin_canary(history[-1], "writer", 0.05, NOTE)]
    history += [promote(history[-1], "writer", NOTE)]
    history += [name_candidate(history[-1], "writer", Policy("v2"), NOTE)]
    with closing(open_store(str(path))) as store:
        for row in history:
            keep(store, row)
        refused = call("deploy", *STEPS["rollback"], "--last-promotion", "--store", path)
        told(refused, "has the candidate v2 in the stage candidate")
        keep(store, roll_back(history, "writer", Note("the guardrail failed is passed", "guardrail")))
    refused = call("deploy", *STEPS["rollback"], "--store", path)
    told(refused, "v2 was rolled back already, by guardrail: v1 answers writer")
    told(refused, "lightning-rl deploy rollback --agent writer --last-promotion")
    after = deploy(path, *STEPS["rollback"], "--last-promotion")["writer"]
    assert (after["stable"], after["candidate"]) == ("v0", "v1")


def test_the_last_versions_stay_loaded() -> None:
    def adapter(number: int) -> Policy:
        return Policy(f"writer@{number}", f"/runs/{number}", "base")

    history = [name_candidate(None, "writer", adapter(0), NOTE, stable="vendor")]
    for number in range(1, 6):
        history.append(promote(begin_canary(history[-1], "writer", 1.0, NOTE), "writer", NOTE))
        history.append(name_candidate(history[-1], "writer", adapter(number), NOTE))
    loaded = adapters_to_load({"writer": history}, kept=2)
    assert sorted(loaded) == ["writer@2", "writer@3", "writer@4", "writer@5"]  # two earlier, stable, candidate
    assert loaded["writer@3"] == adapter(3)


def _die_before(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqlStore, "add_deployments", lambda *_: os._exit(9))


def _die_in_the_transaction(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SqlStore.add_deployments

    def write(store: SqlStore, deployments: list[Deployment]) -> int:
        event.listen(store._database.engine, "commit", lambda _: os._exit(9))
        return real(store, deployments)

    monkeypatch.setattr(SqlStore, "add_deployments", write)


def _die_after(_: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SqlStore.add_deployments
    monkeypatch.setattr(SqlStore, "add_deployments", lambda *given: os._exit(9 if real(*given) else 8))


MADE: Mapping[str, Callable[[Any, list[Deployment]], Deployment]] = {
    "name_candidate": lambda make, past: make(
        past[-1] if past else None, "writer", Policy(f"new{len(past)}"), NOTE, stable=None if past else "old"
    ),
    "begin_shadow": lambda make, past: make(past[-1] if past else None, "writer", 0.5, NOTE),
    "begin_canary": lambda make, past: make(past[-1] if past else None, "writer", 0.5, NOTE),
    "approve": lambda make, past: make(past[-1] if past else None, "writer", NOTE),
    "promote": lambda make, past: make(past[-1] if past else None, "writer", NOTE),
    "roll_back": lambda make, past: make(past, "writer", NOTE),
}
"""How a test makes each transition from a history."""


def every_transition() -> dict[str, tuple[list[Deployment], Deployment]]:
    """The transitions of the module that are possible, from every stage: the history before, and the new row."""
    own = [one for one in vars(transitions).values() if inspect.isfunction(one) and one.__name__[0] != "_"]
    own = [one for one in own if one.__module__ == transitions.__name__]
    makes = [one for one in own if get_type_hints(one)["return"] is Deployment]
    found: dict[str, tuple[list[Deployment], Deployment]] = {}
    histories: list[list[Deployment]] = [[]]
    for past in histories:  # grows
        for make in makes:
            try:
                made = MADE[make.__name__](make, past)
            except ConfigError:
                continue
            before = f"{past[-1].stage}, {'another' if past[-1].previous else 'no'} before" if past else "nothing"
            if found.setdefault(f"{before}: {make.__name__}", (past, made)) == (past, made):
                histories.append([*past, made])
    return found


EVERY = every_transition()


def test_every_stage_has_transitions() -> None:
    assert {made.stage for _, made in EVERY.values()} == set(get_args(Stage))
    assert {name.rpartition(" ")[2] for name in EVERY} == set(MADE)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(("die", "done"), [(_die_before, False), (_die_in_the_transaction, False), (_die_after, True)])
def test_a_kill_at_any_transition_leaves_the_old_policy_or_the_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str, die: Callable[..., None], done: bool
) -> None:
    before, made = EVERY[name]
    with closing(open_store(str(path))) as store:
        for row in before:
            keep(store, row)
    child = os.fork()
    if not child:
        die(path, monkeypatch)
        with closing(open_store(str(path))) as store:
            keep(store, made)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    with closing(open_store(str(path))) as store:
        assert read_histories(store).get("writer", []) == [*before, *([made] if done else [])]
        keep(store, made)  # it can simply be made again
        assert read_histories(store)["writer"] == [*before, made]
