"""The rollouts of one step, including those that replace groups without contrast, and what the step learns from."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace
    from lightning_trainer.report.speed.waits import Window
    from lightning_trainer.rl.batch.batch import Batch
    from lightning_trainer.rl.rollouts import Outcome
    from lightning_trainer.run.collecting.batches import Collection


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a step learns from, before it learns.

    Attributes:
        batch: the rows.
        outcomes: of all its rollouts, without those that callbacks added.
        traces: of the same rollouts.
        versions: number of each policy's weights, by its name.
        windows: in which the step waited for rollouts.
        metrics: of callbacks, and the seconds that it took.
    """

    batch: Batch
    outcomes: Sequence[Outcome]
    traces: Sequence[Trace]
    versions: Mapping[str, int]
    windows: Sequence[Window]
    metrics: Mapping[str, float]


class StepSampler:
    """Runs the rollouts of one step.

    Args:
        collection: of the run.
        step: number of earlier steps.
        seed: of the run, which chooses the other tasks.

    Attributes:
        seconds: time that the step has waited for rollouts.
        windows: begin and end of each wait, in nanoseconds since 1970.
    """

    def __init__(self, collection: Collection, step: int, seed: int) -> None:
        self._collection = collection
        self._step = step
        self._seed = seed
        self._places = collection.order.places(step)
        self.seconds = 0.0
        self.windows: list[Window] = []

    def run_batch(self) -> list[Outcome]:
        """Wait for the rollouts of the step's own tasks.

        Raises:
            LightningError: see `Collection.roll_out`.
        """
        with self._timed():
            return self._collection.of_step(self._step)

    def run_others(self, count: int, number: int) -> list[Outcome]:
        """Run groups of tasks that are not in the step yet.

        Args:
            count: of groups.
            number: of the round of replacements.

        Raises:
            LightningError: see `Collection.roll_out`.
        """
        collection, step = self._collection, self._step
        with self._timed():
            more = collection.order.others(count, self._places, f"{self._seed}/{step}/{number}")
            self._places.extend(more)
            what = f"rollouts for {count} groups without contrast"
            return collection.roll_out(collection.plan(more, f"t{step}r{number}"), what, step)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began, from_ns = time.monotonic(), time.time_ns()
        yield
        self.seconds += time.monotonic() - began
        self.windows.append((from_ns, time.time_ns()))
