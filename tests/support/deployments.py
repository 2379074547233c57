"""A store of agents in each stage of a deployment, with outcomes, calls and copies; and the folder of a loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_spans.schema.calls import Call, Choice
from lightning_spans.schema.rewards import Reward
from lightning_spans.schema.spans import SHADOW
from lightning_spans.store import Store, open_store
from lightning_spans.store.deployments import Assignment, Deployment
from lightning_trainer.kits.deploy.approvals import APPROVAL, NEEDS_APPROVAL
from lightning_trainer.kits.deploy.gate import Bounds
from lightning_trainer.kits.deploy.outcomes import GateRules
from lightning_trainer.kits.deploy.routing import CONVERSATION, MARK
from lightning_trainer.kits.deploy.shadow.comparison import ShadowRules
from lightning_trainer.kits.deploy.transitions import (
    Note,
    Policy,
    approve,
    begin_canary,
    begin_shadow,
    name_candidate,
    promote,
    roll_back,
)
from lightning_trainer.kits.loop.record import StageResult, open_round, write_status

START_NS = 1_795_600_000_000_000_000
FEEDBACK = "evaluator:shop/feedback"
RULES = GateRules(bounds=Bounds(), sources=(FEEDBACK,), guardrails={"failed": 0.02, "longer-than-100": 0.05})


def note(place: int, reason: str = "", actor: str = "ada") -> Note:
    """The note of a transition; each is a minute after the one before."""
    return Note(reason, actor, at_ns=START_NS + place * 60_000_000_000)


def make_deployments(path: Path) -> Path:
    """Write the store."""
    with closing(open_store(str(path))) as store:
        writer = _history("writer", stage="canary")
        histories = [
            writer,
            _history("reader", stage="shadow"),
            _history("planner", stage="stable"),
            _history("router", stage="rolled_back"),
        ]
        for history in histories:
            store.add_deployments(history)
        fill_canary(store, writer)
        _copy(store, "writer", writer[1].number, agrees=90)
        _copy(store, "reader", 2, agrees=60)
    return path


def canary_history(agent: str) -> list[Deployment]:
    """Return the transitions of an agent whose candidate is in a canary."""
    return _history(agent, stage="canary")


def _history(agent: str, *, stage: str) -> list[Deployment]:
    named = name_candidate(None, agent, Policy(f"{agent}@3f2a91c0"), note(0, "run 12"), stable="gpt")
    rows = [replace(named, details={NEEDS_APPROVAL: True} if agent == "writer" else {})]
    rows.append(replace(begin_shadow(rows[-1], agent, 0.2, note(1)), details={SHADOW: ShadowRules().to_details()}))
    if stage != "shadow":
        rows.append(replace(begin_canary(rows[-1], agent, 0.05, note(2)), details=RULES.to_details()))
    if stage == "canary":
        rows.append(begin_canary(rows[-1], agent, 0.25, note(3, "no alarm for a day")))
        approved = approve(rows[-1], agent, note(4, "read 50 answers", "grace"))
        rows.append(replace(approved, details={APPROVAL: "signed"}))
    if stage == "stable":
        rows.append(promote(rows[-1], agent, note(4, "the gate allows it", "loop")))
    if stage == "rolled_back":
        rows.append(roll_back(rows, agent, note(4, "the gate rejects it: -0.200", "gate")))
    return rows


def fill_canary(store: Store, history: Sequence[Deployment], *, good: float = 0.62, talks: int = 240) -> None:
    """Give conversations of both policies to the newest canary, with their calls and outcomes."""
    current = history[-1]
    number = max(one.number for one in history if one.stage == "canary" and APPROVAL not in one.details)
    for policy, size, rate in ((str(current.candidate), talks, good), (current.stable, 3 * talks, 0.5)):
        ids = [f"conversation:{policy}{place}" for place in range(size)]
        store.add_assignments(
            [Assignment(agent=current.agent, attempt_id=i, policy=policy, number=number) for i in ids]
        )
        store.add_calls([_call(current.agent, policy, number, place) for place in range(size)])
        store.add_rewards([_outcome(i, float(place < rate * size)) for place, i in enumerate(ids)])


def _outcome(talk: str, value: float) -> Reward:
    return Reward(rollout_id=talk, attempt_id=talk, value=value, source=FEEDBACK, reward_id=talk)


def _call(agent: str, policy: str, number: int, place: int) -> Call:
    answer = {"role": "assistant", "content": "x" * (120 if place % 50 == 0 else 20)}
    return Call(
        call_id=f"{agent}{policy}{place}",
        response_id=f"{agent}{policy}{place}",
        start_ns=START_NS + 3 * 60_000_000_000 + place,
        end_ns=START_NS + 3 * 60_000_000_000 + 10**9 + place,
        policy=policy,
        policy_version=0,
        agent=agent,
        choices=(Choice(0, None, None, "stop", answer),),
        request={"messages": [{"role": "user", "content": f"{policy} {place}"}]},
        sampling={MARK: number, CONVERSATION: f"conversation:{policy}{place}"},
    )


def _copy(store: Store, agent: str, number: int, *, agrees: int) -> None:
    """Add 100 copies of a shadow."""

    def copied(place: int) -> Call:
        seen: dict[str, Any] = {"rules": ["cut"] if place < 3 else [], "prompt_tokens": 800, "completion_tokens": 60}
        mark = {
            "agent": agent, "conversation": f"c{place}", "of": f"live{place}", "dropped": 0, "off path": 0,
            "kind": "text", "agrees": place < agrees, "candidate": {**seen, "seconds": 0.8},
            "stable": {**seen, "rules": [], "seconds": 1.2},
        }  # fmt: skip
        call = _call(agent, f"{agent}@3f2a91c0", number, place)
        return replace(call, call_id=f"copy {agent}{place}", origin=SHADOW, sampling={MARK: number, SHADOW: mark})

    store.add_calls([copied(place) for place in range(100)])


def make_loop(folder: Path, *, agent: str = "writer") -> Path:
    """Write the folder of a loop whose first round was rejected, and whose second one waits for its canary."""
    folder.mkdir(parents=True)
    options = {"agent": agent}
    first = open_round(folder, options)
    first.write("select", StageResult({"tasks": 120}))
    first.write("train", StageResult({"checkpoint": "runs/1"}, "rejected", "no task had a signal"))
    second = open_round(folder, options)
    for stage, facts in (
        ("select", {"tasks": 240}),
        ("train", {"checkpoint": "runs/2"}),
        ("evaluate", {"difference": 0.081}),
        ("candidate", {"policy": f"{agent}@3f2a91c0"}),
        ("shadow", {"copies": 200, "failed": 1}),
    ):
        second.write(stage, StageResult(facts))
    second.wait("canary", "the decision of the gate: 960 of about 4200 outcomes")
    write_status(folder)
    return folder


def make_many(path: Path, *, agents: int, transitions: int) -> Path:
    """Write a store of many agents, each with candidates that were rolled back, the last in a canary."""
    with closing(open_store(str(path))) as store:
        for number in range(agents):
            agent, rows = f"agent {number:02}", list[Deployment]()
            while len(rows) < transitions // agents - 2:
                before = (rows[-1], None) if rows else (None, "gpt")
                policy, at = Policy(f"{agent}@{len(rows)}"), note(len(rows))
                rows.append(name_candidate(before[0], agent, policy, at, stable=before[1]))
                rows.append(roll_back(rows, agent, note(len(rows), "complaints")))
            rows.append(name_candidate(rows[-1], agent, Policy(f"{agent}@last"), note(len(rows))))
            rows.append(replace(begin_canary(rows[-1], agent, 0.05, note(len(rows))), details=RULES.to_details()))
            store.add_deployments(rows)
    return path


def newest(path: Path, agent: str) -> dict[str, Any]:
    """Return what `lightning-rl deploy status --json` prints of an agent."""
    from support.cli import call

    found = call("deploy", "status", "--agent", agent, "--store", path, "--json")
    assert found.exit_code == 0, found.output
    status: dict[str, Any] = json.loads(found.stdout)["agents"][agent]
    return status
