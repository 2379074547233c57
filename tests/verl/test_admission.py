"""Which tasks are trained on when slow, hard ones and fast, easy ones are collected while the trainer learns.

A simulation of time around verl's own replay buffer: groups end when their task's time has passed, a step of the
trainer takes a unit of time, and a trainer that waits for its batch moves the clock.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl.protocol")

from verl.trainer.ppo.v1 import replay_buffer

from lightning_trainer.backends.verl.options.describe import compose_options
from lightning_trainer.backends.verl.options.overrides import Site, overrides
from lightning_trainer.backends.verl.steps.replay import AsyncReplay
from lightning_trainer.config.train import TrainConfig

pytestmark = pytest.mark.timeout(300)

BATCH, STEPS = 8, 60
HARD_EVERY = 4  # a quarter of the tasks is hard
HARD_TIME, EASY_TIME = 3.5, 0.5  # in steps of the trainer


class World:
    """Stands for TransferQueue, for the collector, and for the time."""

    def __init__(self) -> None:
        self.now, self.step = 0.0, 1
        self.admitted = 0
        self.groups: dict[str, tuple[float, int]] = {}  # when it ends, and the step in which it was admitted

    def admit(self, prompts: int) -> int:
        for _ in range(prompts):
            hard = self.admitted % HARD_EVERY == 0
            name = f"{'hard' if hard else 'easy'}{self.admitted}"
            self.groups[name] = (self.now + (HARD_TIME if hard else EASY_TIME), self.step)
            self.admitted += 1
        return prompts

    def kv_list(self) -> dict[str, dict[str, Any]]:
        items: dict[str, Any] = {}
        for name, (end, step) in self.groups.items():
            status = "finished" if end <= self.now else "running"
            items[name] = {"is_prompt": True, "status": status, "global_steps": step}
            if status == "finished":
                items[f"{name}_0_0"] = {"min_global_steps": step}
        return {"train": items}

    def kv_clear(self, *, partition_id: str, keys: list[str]) -> None:
        assert partition_id == "train"
        for name in keys:
            self.groups.pop(name, None)

    def pass_time(self) -> None:
        self.now += 0.125


def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, staleness: int, **passed: str) -> list[tuple[str, int]]:
    """Return the groups that were trained on, each with its age in steps."""
    config = TrainConfig(
        target="a:b", data="d.jsonl", model="m", backend="verl", batch_size=BATCH, staleness=staleness, verl=passed
    )
    sampler = compose_options(overrides(config, Site(folder=tmp_path), None, flash_attention=False)).trainer.v1.sampler
    world = World()
    monkeypatch.setattr(replay_buffer, "tq", world)
    clock = SimpleNamespace(**{**vars(time), "sleep": lambda _: world.pass_time()})  # other threads sleep as they did
    monkeypatch.setattr(replay_buffer, "time", clock)
    buffer = AsyncReplay(
        trainer_mode="colocate_async",
        trainer_config=None,
        max_off_policy_threshold=sampler.max_off_policy_threshold,
        max_off_policy_strategy=sampler.max_off_policy_strategy,
        sampler_kwargs=None,
        refill_fn=world.admit,
    )
    world.admit(BATCH * staleness)
    trained = []
    for world.step in range(1, STEPS + 1):
        world.admit(BATCH)
        batch, _ = buffer.sample(world.step, "train", BATCH)
        names = [key.partition("_")[0] for key in batch.keys]
        assert len(names) == BATCH
        trained += [(name, world.step - tag["min_global_steps"]) for name, tag in zip(names, batch.tags, strict=True)]
        world.now += 1.0
    return trained


def share(trained: list[tuple[str, int]]) -> float:
    return sum(name.startswith("hard") for name, _ in trained) / len(trained)


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_hard_tasks_are_trained_on_in_their_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, staleness: int
) -> None:
    paced = simulated(monkeypatch, tmp_path, staleness)
    dropping = simulated(monkeypatch, tmp_path, staleness, **{"trainer.v1.sampler.max_off_policy_strategy": "drop"})
    assert share(paced) == pytest.approx(1 / HARD_EVERY, abs=0.02)
    assert share(dropping) < 0.05  # what was done before
    # Nothing is thrown away: what was admitted first has been trained on, but for what is still ahead.
    numbers = sorted(int(name[4:]) for name, _ in paced)
    assert numbers[: BATCH * (STEPS - 2 * staleness)] == list(range(BATCH * (STEPS - 2 * staleness)))
    assert max(age for _, age in paced) <= staleness
