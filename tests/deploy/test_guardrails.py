"""Guardrails: a candidate whose calls are worse than its bounds allow is rolled back, and an equal one is not."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from weakref import ref

import numpy as np
import pytest

from lightning_conformance import MemoryStore
from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import EXECUTE_TOOL, Span
from lightning_spans.store import Store, open_store
from lightning_spans.store.deployments import Assignment
from lightning_spans.store.protocol import Page
from lightning_trainer.gateway.calls.incoming import FELL_BACK
from lightning_trainer.kits.deploy.guardrails import raises_alarm, weigh_guardrails
from lightning_trainer.kits.deploy.routing import MARK, talk_of
from lightning_trainer.kits.deploy.table import read_histories
from lightning_trainer.kits.deploy.transitions import Note, Policy, begin_canary, name_candidate
from support.cli import call, told

GOOD: Mapping[str, Any] = {"reason": "stop", "text": "fine", "seconds": 1.0, "error": None, "fell_back": False}
BAD: Mapping[str, Mapping[str, Any]] = {
    "failed": {"error": "no answer"},
    "refused": {"reason": "content_filter"},
    "cut": {"reason": "length"},
    "slower-than-2.5": {"seconds": 3.0},
    "longer-than-100": {"text": "x" * 101},
}

NOTE = Note("because", "ada", at_ns=1)
CANARY = begin_canary(name_candidate(None, "writer", Policy("new"), NOTE, stable="old"), "writer", 0.2, NOTE)


def made(policy: str, place: int, *, number: int = 2, agent: str = "writer", talk: str = "", **how: Any) -> Call:
    """A call of the canary; `how` says what is bad about it."""
    how = {**GOOD, **how}
    end_ns = time.time_ns()
    mark = {FELL_BACK: {"from": policy, "error": "no"}} if how["fell_back"] else {}
    return Call(
        call_id=f"{policy}{place}{agent}{talk}",
        response_id=f"{policy}{place}",
        start_ns=end_ns - int(how["seconds"] * 1e9),
        end_ns=end_ns,
        policy="old" if how["fell_back"] else policy,
        policy_version=0,
        agent=agent,
        choices=(Choice(0, None, None, how["reason"], {"role": "assistant", "content": how["text"]}),),
        request={"messages": [{"role": "user", "content": talk or f"{policy} {place}"}]},
        sampling={MARK: number, **mark},
        error=how["error"],
    )


def add(store: Store, calls: list[Call], *, began: int | None = None) -> None:
    """Add calls, and the assignments of their conversations by the deployment `began`; None: by that of the calls."""
    store.add_calls(calls)
    for talk, one in {talk_of(one): one for one in calls}.items():
        policy = one.sampling[FELL_BACK]["from"] if FELL_BACK in one.sampling else one.policy
        number = one.sampling[MARK] if began is None else began
        store.add_assignments([Assignment(agent=str(one.agent), attempt_id=talk, policy=policy, number=number)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "lightning.db"
    open_store(str(path)).close()
    guards = [word for name in BAD for word in ("--guard", f"{name}=5%")]
    for words in (["candidate", "--model", "new", "--stable", "old"], ["canary", *guards]):
        result = call("deploy", *words, "--agent", "writer", "--store", path)
        assert result.exit_code == 0, result.output
    return path


def check(path: Path, calls: list[Call]) -> Mapping[str, Any]:
    with closing(open_store(str(path))) as store:
        add(store, calls)
    found = call("deploy", "check", "--store", path, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)["agents"]["writer"]


@pytest.mark.parametrize("name", [*BAD, "fell_back"])
def test_check_rolls_back_a_candidate_that_passes_a_guardrail_and_says_which(path: Path, name: str) -> None:
    bad = {"fell_back": True} if name == "fell_back" else BAD[name]
    calls = [made("new", place, **(bad if place < 100 else {})) for place in range(200)]
    assert check(path, [made("old", place) for place in range(400)])["stage"] == "canary"
    assert check(path, calls)["stage"] == "rolled_back"
    with closing(open_store(str(path))) as store:
        newest = read_histories(store)["writer"][-1]
    passed = "failed" if name == "fell_back" else name
    assert newest.actor == "guardrail"
    assert newest.reason.startswith(f"the guardrail {passed} is passed: +0.500 [+0.")
    assert newest.reason.endswith("at most +0.05 is allowed, 200 and 400 conversations")


def test_calls_that_are_not_of_the_canary_or_of_one_conversation_raise_no_alarm(path: Path) -> None:
    stable = [made("old", place) for place in range(400)]
    good = [made("new", place) for place in range(150)]
    others = [made("new", place, agent="reader", **BAD["failed"]) for place in range(300)]
    before = [made("new", place + 1000, number=1, **BAD["failed"]) for place in range(300)]
    one = [made("new", place, talk="hi", **BAD["failed"]) for place in range(300)]
    assert check(path, [*stable, *good, *others, *before, *one])["stage"] == "canary"


def test_a_candidate_that_is_like_the_stable_policy_is_seldom_rolled_back() -> None:
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(20):
        store, looks = MemoryStore(), False
        for start in range(0, 1000, 250):
            for policy, times in (("new", 1), ("old", 2)):
                failed = rng.random(250 * times) < 0.1
                add(
                    store,
                    [
                        made(policy, start * times + place, **(BAD["failed"] if bad else {}))
                        for place, bad in enumerate(failed)
                    ],
                )
            looks |= any(raises_alarm(*one) for one in weigh_guardrails(store, [CANARY], {"failed": 0.0}).values())
        alarms += looks
    assert alarms <= 2  # at most 2.5 % are promised


def test_conversations_that_began_before_the_canary_do_not_count() -> None:
    store = MemoryStore()
    for policy in ("new", "old"):
        add(store, [made(policy, place, **(BAD["failed"] if place < 100 else {})) for place in range(200)])
    add(store, [made("old", place) for place in range(1000, 2000)], began=1)  # they continue during the canary
    [(_, found)] = weigh_guardrails(store, [CANARY], {"failed": 0.05}).values()
    assert (found.candidate, found.stable, found.difference) == (200, 200, 0.0)


def test_a_conversation_that_continues_after_a_change_of_share_counts_once() -> None:
    store, larger = MemoryStore(), begin_canary(CANARY, "writer", 0.4, NOTE)
    for policy in ("new", "old"):
        calls = [made(policy, place) for place in range(200)]
        add(store, calls)
        store.add_calls([replace(one, call_id=f"{one.call_id} later", sampling={MARK: larger.number}) for one in calls])
    [(_, found)] = weigh_guardrails(store, [CANARY, larger], {"failed": 0.05}).values()
    assert (found.candidate, found.stable) == (200, 200)


def test_the_calls_of_a_canary_are_not_in_memory_all_at_once() -> None:
    class Watched(Call):
        __slots__ = ("__weakref__",)

    class Pages(MemoryStore):
        """Makes five pages of calls, and counts those in memory when a page is read."""

        most = 0
        given: ClassVar[list[ref[Call]]] = []

        def page(self, kind: Any, where: Any = None, *, after: int = 0, **options: Any) -> Page[Any]:
            if kind is not Call:
                return super().page(kind, after=after, **options)
            self.most = max(self.most, sum(one() is not None for one in self.given))
            calls = [made("old", 10 * after + place) for place in range(10)]
            calls = [Watched(**{each.name: getattr(call, each.name) for each in fields(call)}) for call in calls]
            self.given.extend(map(ref, calls))
            return Page(calls, after + 1 if after < 4 else None)

    store = Pages()
    talks = [talk_of(made("old", place)) for place in range(50)]
    store.add_assignments([Assignment(agent="writer", attempt_id=talk, policy="old", number=2) for talk in talks])
    [(_, found)] = weigh_guardrails(store, [CANARY], {"failed": 0.05}).values()
    assert (found.stable, store.most) == (50, 10)


@pytest.mark.parametrize(
    ("given", "say"),
    [("rude=1%", "no guardrail 'rude'"), ("failed=100%", "from 0 to below 1"), ("failed", "such as 5%")],
)
def test_a_guardrail_that_can_not_be_judged_is_refused(path: Path, given: str, say: str) -> None:
    told(call("deploy", "canary", "--agent", "writer", "--store", path, "--guard", given), say)


def begun(tmp_path: Path, *words: str) -> Path:
    """A store with a canary that was begun with these options."""
    path = tmp_path / "of_its_own.db"
    open_store(str(path)).close()
    for line in (("candidate", "--model", "new", "--stable", "old"), ("canary", "--share", "25%", *words)):
        result = call("deploy", *line, "--agent", "writer", "--store", path)
        assert result.exit_code == 0, result.output
    return path


def reward(path: Path, source: str, new: float, old: float, *, age_s: float = 0.0, most: float = 1.0) -> None:
    """Give 400 and 1,200 conversations rewards of a source, which are `most` in these shares of them."""
    at_ns = time.time_ns() - int(age_s * 1e9)
    with closing(open_store(str(path))) as store:
        for policy, size, rate in (("new", 400, new), ("old", 1200, old)):
            names = [f"conversation:{policy}{place}" for place in range(size)]
            assigned = partial(Assignment, agent="writer", policy=policy, number=2, at_ns=at_ns)
            store.add_assignments([assigned(attempt_id=name) for name in names])
            store.add_rewards(
                [
                    Reward(rollout_id=name, attempt_id=name, value=most * (place < rate * size), source=source)
                    for place, name in enumerate(names)
                ]
            )


def test_a_candidate_whose_tool_calls_fail_is_rolled_back(tmp_path: Path) -> None:
    path = begun(tmp_path, "--guard", "tool-failed=5%")
    calls, spans = [], []
    for policy, size in (("new", 200), ("old", 400)):
        for place in range(size):
            trace = f"{len(calls) + 1:032x}"
            calls.append(replace(made(policy, place), trace_id=trace))
            fails = policy == "new" and place < 100
            for agent, status in (("writer", "error" if fails else "ok"), ("reader", "error")):
                spans.append(
                    Span(
                        operation=EXECUTE_TOOL, name="look", trace_id=trace, span_id=os.urandom(8).hex(), start_ns=1,
                        end_ns=2, status=status, agent=agent, origin="live",
                    )
                )  # fmt: skip
    with closing(open_store(str(path))) as store:
        store.add_spans(spans)
    assert check(path, calls)["stage"] == "rolled_back"
    with closing(open_store(str(path))) as store:
        assert "the guardrail tool-failed is passed: +0.500" in read_histories(store)["writer"][-1].reason


def test_a_candidate_that_pleases_the_judge_is_stopped_by_the_outcome(tmp_path: Path) -> None:
    path = begun(tmp_path, "--outcome", "judge", "--guard", "outcome:shop=5%")
    reward(path, "judge", 0.95, 0.5)
    reward(path, "shop", 0.3, 0.6)
    where = ("--agent", "writer", "--store", path)
    status = json.loads(call("deploy", "status", "--store", path, "--json").stdout)["agents"]["writer"]
    assert (status["gate"]["decision"], status["guardrails"]["outcome:shop"]["alarm"]) == ("promote", True)
    assert "writer, guardrail outcome:shop: +0.300" in call("deploy", "status", "--store", path).stdout
    told(call("deploy", "promote", *where), "not promoted: the guardrail outcome:shop is passed")
    assert check(path, [])["stage"] == "rolled_back"


def test_a_gate_that_decides_early_waits_for_the_outcomes_of_its_guardrail(tmp_path: Path) -> None:
    path = begun(tmp_path, "--outcome", "judge", "--guard", "outcome:shop=5%")
    where = ("--agent", "writer", "--store", path)
    reward(path, "judge", 0.95, 0.5)
    told(call("deploy", "promote", *where), "outcome:shop has seen 0 and 0 conversations")
    reward(path, "shop", 0.5, 0.6)  # below, and not certainly
    status = json.loads(call("deploy", "status", "--store", path, "--json").stdout)["agents"]["writer"]
    assert status["guardrails"]["outcome:shop"]["alarm"] is False
    told(call("deploy", "promote", *where), "above its bound so far: +0.100")
    reward(path, "shop", 1.0, 0.6)  # more rewards of the same conversations: the mean counts
    assert call("deploy", "promote", *where).exit_code == 0


def test_guardrails_hold_if_outcomes_can_not_be_read_and_for_every_agent(tmp_path: Path) -> None:
    path = begun(tmp_path, "--guard", "failed=5%")
    for words in (["candidate", "--model", "new", "--stable", "old"], ["canary"]):
        assert call("deploy", *words, "--agent", "aaa", "--store", path).exit_code == 0
    reward(path, "latency", 1.0, 1.0, most=7.0)
    with closing(open_store(str(path))) as store:
        wrong = Assignment(agent="aaa", attempt_id="conversation:new0", policy="new", number=2)
        store.add_assignments([wrong])
        add(store, [made("old", place) for place in range(400)])
        add(store, [made("new", place, **BAD["failed"]) for place in range(200)])
    told(call("deploy", "check", "--store", path), "is not between 0 and 1")
    with closing(open_store(str(path))) as store:
        assert read_histories(store)["writer"][-1].stage == "rolled_back"


def test_an_outcome_that_arrives_days_later_counts_as_soon_as_it_is_there(tmp_path: Path) -> None:
    path = begun(tmp_path, "--wait-days", "3")

    def outcomes() -> int:
        found = json.loads(call("deploy", "status", "--store", path, "--json").stdout)
        return found["agents"]["writer"]["gate"]["n"]

    reward(path, "early", 0.5, 0.5, age_s=4 * 86_400)
    assert outcomes() == 1600
    with closing(open_store(str(path))) as store:
        young = Assignment(
            agent="writer", attempt_id="conversation:young", policy="new", number=2, at_ns=time.time_ns()
        )
        late = replace(young, attempt_id="conversation:late", at_ns=young.at_ns - 5 * 86_400 * 10**9)
        store.add_assignments([young, late])
        store.add_rewards([Reward(rollout_id="r", attempt_id=young.attempt_id, value=1.0)])
        assert outcomes() == 1600, "a conversation of today does not count yet"
        store.add_rewards([Reward(rollout_id="r", attempt_id=late.attempt_id, value=1.0)])
    assert outcomes() == 1601
