"""Three task sets: to train on, to choose between methods, and to compare with the base what was chosen."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lightning_spans.errors import ConfigError
from lightning_trainer.kits.improve.config import ImproveConfig
from lightning_trainer.report.metrics import write_atomically
from lightning_trainer.report.progress import Progress
from lightning_trainer.run.data import Task, batch_at, load_tasks

FEW: Final = 20  # with fewer tasks in each half, only large differences can be distinguished from chance
_LEAST: Final = 4  # fewest held-out tasks
_SHARE: Final = 3  # without tasks to hold out, one of so many is held out
FEWEST: Final = _SHARE * _LEAST  # fewest tasks that can be divided


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """The files of the three sets.

    Attributes:
        folder: folder of the files.
    """

    folder: Path

    @property
    def train(self) -> Path:
        """Tasks to train on."""
        return self.folder / "train.jsonl"

    @property
    def choose(self) -> Path:
        """Held-out tasks for choosing between methods."""
        return self.folder / "choose.jsonl"

    @property
    def decide(self) -> Path:
        """The other held-out tasks. They are not used for any choice; all held-out tasks decide together."""
        return self.folder / "decide.jsonl"

    def write(self, config: ImproveConfig, progress: Progress) -> None:
        """Divide the configured tasks, and write all three sets. A resumed search reads them from here."""
        train, held_out = _divide(config, progress)
        order = list(range(len(held_out)))
        random.Random(f"{config.train.seed}/held out").shuffle(order)
        half = len(order) // 2
        self.folder.mkdir(exist_ok=True)
        _write(self.train, train)
        _write(self.choose, [held_out[place] for place in sorted(order[:half])])
        _write(self.decide, [held_out[place] for place in sorted(order[half:])])
        if len(order) < 2 * FEW:
            progress.note(
                f"WARNING: {len(order)} held-out tasks decide whether something is better than the base. With fewer"
                f" than {2 * FEW}, only large differences stand out from chance. Add tasks to --data or --val."
            )

    def some_to_learn(self, count: int, seed: int, file: Path) -> Path:
        """Write `count` training tasks, sampled like a run's first batch, and return the file."""
        tasks = load_tasks(self.train)
        _write(file, [tasks[place] for place in batch_at(0, len(tasks), min(count, len(tasks)), seed)])
        return file


def _divide(config: ImproveConfig, progress: Progress) -> tuple[list[Task], list[Task]]:
    """Return training tasks and held-out tasks.

    Raises:
        ConfigError: there are too few of either.
    """
    tasks = load_tasks(config.train.data, config.train.columns)
    if config.train.val is not None:
        held_out = load_tasks(config.train.val, config.train.columns)
        known = {_key(task) for task in held_out}
        train = [task for task in tasks if _key(task) not in known]
        if len(train) < len(tasks):
            progress.note(f"{len(tasks) - len(train)} tasks of {config.train.data} are held out, not trained on")
    else:
        distinct = list(dict.fromkeys(map(_key, tasks)))  # duplicates of a task are on the same side
        count = len(distinct) // _SHARE
        chosen = set(random.Random(f"{config.train.seed}/split").sample(distinct, count))
        held_out = [json.loads(text) for text in distinct if text in chosen]
        train = [task for task in tasks if _key(task) not in chosen]
    if len(held_out) < _LEAST or len(train) < 2:
        raise ConfigError(
            f"{len(train)} tasks to learn from and {len(held_out)} held out are too few: 2 and {_LEAST} are the least,"
            f" and {2 * FEW} held out are better. Give more tasks, or held-out ones with --val."
        )
    return train, held_out


def _key(task: Task) -> str:
    return json.dumps(task, sort_keys=True)


def _write(file: Path, tasks: Sequence[Task]) -> None:
    lines = (json.dumps(task, ensure_ascii=False) + "\n" for task in tasks)
    write_atomically(file, "".join(lines).encode("utf-8", "replace"))
