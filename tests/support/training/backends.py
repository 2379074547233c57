"""A backend of a plugin's own that remembers what it was handed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_trainer import TrainConfig
from lightning_trainer.rl.rows import Row
from support.fakes import FakeEngine


class Remembering:
    """A learner that writes down how many rows it was given."""

    def __init__(self, config: TrainConfig) -> None:
        self.engine = FakeEngine(lambda prompt: ["short", "a longer answer"][len(self.engine.prompts) % 2])
        self.engines = (self.engine,)
        self.given: list[int] = []
        self.closed = False
        self.seen: dict[Row, Any] = {}

    def update(self, rows: Sequence[Row]) -> dict[str, float]:
        self.given.append(len(rows))
        return {"loss": 0.0}

    def penalties(self, rows: Sequence[Row]) -> list[Any]:
        raise AssertionError("no divergence was asked for")

    def save(self, folder: Path, *, resumable: bool = True) -> None:
        (folder / "given.json").write_text(json.dumps(self.given))

    def strip(self, folder: Path) -> None:
        assert folder.is_dir()

    def load(self, folder: Path) -> None:
        self.given = json.loads((folder / "given.json").read_text())

    def close(self) -> None:
        self.closed = True
