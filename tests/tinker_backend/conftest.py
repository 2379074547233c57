"""A tiny model folder, and a scripted server that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_trainer.backends.tinker.learner import TinkerLearner
from lightning_trainer.backends.tinker.options import make
from lightning_trainer.rl.rows import Row
from support.models.tiny import make_tiny_model
from support.tinker import Server, install

URL = "http://tinker.invalid"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tinker") / "tiny").resolve()


@pytest.fixture
def server(model: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    scripted = Server(models=[str(model)])
    install(monkeypatch, scripted)
    return scripted


@pytest.fixture
def opened(model: Path, server: Server) -> Iterator[Callable[..., TinkerLearner]]:
    """Makes learners on the server."""
    learners: list[TinkerLearner] = []

    def make_learner(**options: Any) -> TinkerLearner:
        learners.append(TinkerLearner(make(str(model), {"tinker_url": URL, "lora_rank": 2, **options})))
        return learners[-1]

    yield make_learner
    for learner in learners:
        learner.close()


@pytest.fixture
def rows() -> Callable[..., list[Row]]:
    """Makes rows of unequal length, of two responses each where there is room."""

    def make_rows(*lengths: int, policy: str = "tiny", seed: int = 0, **more: Any) -> list[Row]:
        random = np.random.default_rng(seed)
        return [_row(random, length, number, policy, **more) for number, length in enumerate(lengths)]

    return make_rows


def _row(random: np.random.Generator, length: int, number: int, policy: str, **more: Any) -> Row:
    mask = np.zeros(length, bool)
    mask[3 : 3 + (length - 3) // 2] = True
    mask[-2:] = True
    first = int(mask.sum()) // 2
    lengths = (first, int(mask.sum()) - first)
    values = {"attempt_id": f"a{number}", "rollout_id": f"r{number}", "group_id": "g", **more}
    return Row(
        tokens=random.integers(3, 250, length).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, random.uniform(-7, -4, length), 0.0).astype(np.float32),
        advantages=np.where(mask, random.normal(0, 1, length), 0.0),
        lengths=lengths,
        agent=policy,
        policy=policy,
        **values,
    )
