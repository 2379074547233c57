"""The user's task file as verl's data set. Prompts are up to the agent: a row contains the task and its position."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import Dataset

from lightning_trainer.run.data import batch_at, load_tasks

SOURCE: Final = "lightning"  # verl's data source; its validation metrics contain this name


class TaskDataset(Dataset[dict[str, Any]]):
    """Tasks in the order of the run, which is that of the torch backend.

    Created by verl as `data.custom_cls`. ``train:PATH`` contains every position of every step's batch, so that one pass
    is the whole run; ``val:PATH`` contains each held-out task once.
    """

    def __init__(self, data_files: str, config: Any, **_: Any) -> None:
        kind, path = data_files.split(":", maxsplit=1)
        self._tasks = load_tasks(Path(path), config.lightning.columns)
        self._order = list(range(len(self._tasks)))
        if kind == "train":
            size, steps, seed = config.train_batch_size, config.lightning.steps, config.lightning.seed
            self._order = [task for step in range(steps) for task in batch_at(step, len(self._tasks), size, seed)]

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self._order)

    def __getitem__(self, place: int) -> dict[str, Any]:
        """Return the row of one position."""
        return {
            "raw_prompt": [],  # verl counts prompts by this field
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),  # verl's batches must contain a tensor
            "data_source": SOURCE,
            "reward_model": {},
            "index": place,
            "task": self._tasks[self._order[place]],
        }
