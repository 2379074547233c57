from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_conformance.stores.samples import a_span
from lightning_spans.errors import NothingToLearnError
from lightning_spans.schema.calls import Call
from lightning_spans.store import Store, open_store
from lightning_trainer.rl.rollouts import plan
from lightning_trainer.run.collecting import capture
from lightning_trainer.run.collecting.batches import Collection
from lightning_trainer.run.collecting.capture import FirstTask
from lightning_trainer.run.state import State
from support.rl.world import World, options_of

ROLLOUTS = plan([{"q": 1}, {"q": 2}], name="run:t0", size=2, mode="train", max_attempts=1, timeout_s=60.0)


class NothingError(Exception):
    pass


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(capture, "LOOK_S", 0.0)
    store = open_store(str(tmp_path / "s.db"))
    store.enqueue(ROLLOUTS)
    yield store
    store.close()


def ended(store: Store, statuses: dict[str, str]) -> None:
    for attempt in store.claim("w", limit=9):
        rollout_id = attempt.rollout.rollout_id
        if rollout_id in statuses:
            store.finish(attempt.attempt_id, attempt.fence, status=statuses[rollout_id])  # type: ignore[arg-type]


def look(store: Store) -> None:
    FirstTask(store, ROLLOUTS, lambda number: NothingError(str(number)))()


def ids(group: int) -> list[str]:
    return [rollout.rollout_id for rollout in ROLLOUTS if rollout.group_id.endswith(f"-{group}")]


def test_first_task_that_left_nothing_is_told_while_the_others_run(store: Store) -> None:
    look(store)
    ended(store, dict.fromkeys(ids(1), "succeeded"))
    with pytest.raises(NothingError, match="2"):
        look(store)


@pytest.mark.parametrize("what", ["span", "call"])
def test_first_task_that_left_a_model_call_is_well(store: Store, what: str) -> None:
    ended(store, dict.fromkeys(ids(0), "succeeded"))
    if what == "span":
        store.add_spans([a_span(operation="chat", rollout_id=ids(0)[1], attempt_id=f"{ids(0)[1]}.1")])
    else:
        store.add_calls(
            [
                Call(
                    call_id="c",
                    response_id="c",
                    start_ns=1,
                    end_ns=2,
                    policy="p",
                    policy_version=0,
                    rollout_id=ids(0)[0],
                )
            ]
        )
    look(store)


def test_tasks_that_failed_or_have_not_ended_say_nothing(store: Store) -> None:
    ended(store, {ids(0)[0]: "succeeded", **dict.fromkeys(ids(1), "failed")})
    look(store)


def test_rollouts_that_are_not_there_yet_say_nothing(tmp_path: Path) -> None:
    empty = open_store(str(tmp_path / "empty.db"))
    look(empty)
    empty.close()


def test_a_step_without_a_usable_call_ends_a_run_that_has_never_seen_its_agents() -> None:
    world = World()
    world.rollout("a", [("writer", "a draft")], {None: 1.0})
    run: Any = SimpleNamespace(config=options_of(agents=("checker",)), tasks=[{}], folder=Path("out"))
    nobody: Any = None
    collection = Collection(run, nobody, {}, nobody)
    batch = world.batch(agents=("checker",))
    collection.refuse_barren(batch, world.outcomes, State(step=3, identity={}, agents=("checker", "writer")))
    for state in (State(step=0, identity={}), State(step=3, identity={}, agents=("writer",))):
        with pytest.raises(NothingToLearnError, match="Agents seen: writer: 1 call"):
            collection.refuse_barren(batch, world.outcomes, state)
