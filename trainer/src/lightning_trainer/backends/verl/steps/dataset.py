"""The user's task file as verl's data set. Prompts are the agent's business: a row holds the task and its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import Dataset

from lightning_trainer.run.data import batch_at, load_tasks

SOURCE: Final = "lightning"  # what verl calls a data source; its validation metrics carry it


class TaskDataset(Dataset[dict[str, Any]]):
    """Tasks in the order in which the run takes them, which is that of the torch backend.

    Made by verl as `data.custom_cls`. ``train:PATH`` gives every place of every step's batch, so that one pass is the
    whole run; ``val:PATH`` gives each held-out task once.
    """

    def __init__(self, data_files: str, config: Any, **_: Any) -> None:
        kind, path = data_files.split(":", maxsplit=1)
        self._tasks = load_tasks(Path(path), config.lightning.columns)
        self._order = list(range(len(self._tasks)))
        if kind == "train":
            size, steps, seed = config.train_batch_size, config.lightning.steps, config.lightning.seed
            self._order = [task for step in range(steps) for task in batch_at(step, len(self._tasks), size, seed)]

    def __len__(self) -> int:
        """Number of places."""
        return len(self._order)

    def __getitem__(self, place: int) -> dict[str, Any]:
        """Return the row of one place."""
        return {
            "raw_prompt": [],  # verl counts prompts by this field
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),  # verl's batches must hold a tensor
            "data_source": SOURCE,
            "reward_model": {},
            "index": place,
            "task": self._tasks[self._order[place]],
        }
