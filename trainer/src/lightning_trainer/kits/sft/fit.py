"""The loop: take steps, evaluate the held-out loss from time to time, and keep the weights with the lowest loss."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Final

from lightning_trainer.backend_protocol import Learner
from lightning_trainer.kits.sft.batches import batches
from lightning_trainer.kits.sft.lineage import LineageWriter
from lightning_trainer.kits.sft.resume import CHECKPOINT
from lightning_trainer.kits.sft.standing import Standing
from lightning_trainer.report.metrics import MetricLog
from lightning_trainer.report.progress import Progress
from lightning_trainer.rl.rows import Row
from lightning_trainer.run.interrupts import SavedInterrupt
from lightning_trainer.run.state import LONGEST_UNSAVED_S

_LOOKED_AT: Final = 200  # maximum held-out rows: more add cost but little information
_RISE: Final = 0.1  # share of the steps in which the learning rate rises
_LONGEST_RISE: Final = 20
_LOOKS: Final = 4  # evaluations per epoch
_SELDOMEST: Final = 50  # maximum steps between two evaluations


@dataclass(frozen=True, slots=True, kw_only=True)
class FitResult:
    """Result of the loop.

    Attributes:
        before: mean loss per token before learning: of held-out rows if there are any, otherwise of some training rows.
        after: the same with the weights that were kept.
        steps: number of steps taken.
        best: number of steps after which the weights were kept.
        tokens: number of tokens learned, counted again in each epoch.
        seconds: duration of steps and evaluations.
    """

    before: float
    after: float
    steps: int
    best: int
    tokens: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class Fit:
    """Learns from rows.

    Attributes:
        learner: takes the steps.
        rows: to learn from.
        held_out: rows to evaluate; empty: it never stops early, and the last weights are kept.
        folder: where ``checkpoint`` is written.
        log: of metrics.
        progress: callback for progress events.
        check: raises if the program was asked to stop.
        batch_size: rows in a step.
        steps: total number of steps.
        eval_every: steps between two evaluations; None: four per epoch.
        group_by_prefix: number of rows that are batched together because of their common prefix.
        patience: evaluations without a lower loss after which it stops.
        seed: of the order.
        from_step: number of the first step in the log, if other steps came before.
        update: learns from a batch; None: `Learner.update`.
        loss: what is evaluated; None: the mean loss per token.
        standing: state of the loop; initially that of an earlier process, with the learner restored to it.
        keep: saves the state of the loop and the learner: every quarter of an hour, and on an interrupt.
        lineage: records what each step learns from, and marks checkpoints; None: nothing is recorded.
    """

    learner: Learner
    rows: Sequence[Row]
    held_out: Sequence[Row]
    folder: Path
    log: MetricLog
    progress: Progress
    check: Callable[[], None]
    batch_size: int
    steps: int
    group_by_prefix: int = 1
    eval_every: int | None = None
    patience: int = 3
    seed: int = 0
    from_step: int = 0
    update: Callable[[list[Row]], dict[str, float]] | None = None
    loss: Callable[[Sequence[Row]], float] | None = None
    standing: Standing = field(default_factory=Standing)
    keep: Callable[[Standing], None] | None = None
    lineage: LineageWriter | None = None
    _began: float = field(default_factory=time.monotonic, init=False)
    _kept_at: float = field(default_factory=time.monotonic, init=False)

    def run(self) -> FitResult:
        """Take the steps.

        Raises:
            SavedInterrupt: the program was asked to stop; the newest weights are saved unless better ones are, and so
                is the state of the loop.
        """
        self._began -= self.standing.seconds
        before = self._look(0) if self.standing.before is None else self.standing.before
        self.standing = replace(self.standing, before=before)
        update = self.update or self.learner.update
        self.progress.begin(self.from_step, self.from_step + self.steps)
        drawn = batches(self.rows, self.batch_size, self.steps, self.seed, self.group_by_prefix)
        try:
            for step, batch in islice(enumerate(drawn), self.standing.taken, None):
                self.check()
                self.progress.phase("learning", step, self.steps)
                if self.lineage is not None:
                    self.lineage.add_step(self.from_step + step, batch)
                self._took(update(batch), step, len(batch))
                taken = step + 1
                if taken % self._every == 0 and taken < self.steps and self._stops():
                    break
                if taken < self.steps and time.monotonic() - self._kept_at >= LONGEST_UNSAVED_S:
                    self._keep()
            self._see(self._look(self.standing.taken) if self.standing.waited < self.patience else math.inf)
        except SavedInterrupt:
            if self.standing.taken:
                if self.standing.best == 0:
                    self._save()
                self._keep()
            raise
        now = self.standing
        return FitResult(
            before=before, after=math.inf if now.lowest is None else now.lowest, steps=now.taken, best=now.best,
            tokens=now.tokens, seconds=self._seconds,
        )  # fmt: skip

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _took(self, metrics: dict[str, float], step: int, rows: int) -> None:
        tokens = self.standing.tokens + int(metrics["tokens"])
        self.standing = replace(self.standing, taken=step + 1, tokens=tokens)
        shown = {name: metrics[name] for name in _SHOWN if name in metrics}
        self.log.add("train", self.from_step + step, {**shown, "rows": float(rows)})
        self.progress.step(self.from_step + step, shown)

    def _keep(self) -> None:
        if self.keep is not None:
            self.progress.phase("saving")
            self.keep(replace(self.standing, seconds=self._seconds))
            self._kept_at = time.monotonic()

    @property
    def _every(self) -> int:
        in_epoch = math.ceil(len(self.rows) / self.batch_size)
        return self.eval_every or max(1, min(_SELDOMEST, in_epoch // _LOOKS))

    def _stops(self) -> bool:
        """Whether patience is exhausted, after an evaluation that saves the weights if they are the best."""
        if not self.held_out:
            return False
        self._see(self._look(self.standing.taken))
        return self.standing.waited >= self.patience

    def _look(self, step: int) -> float:
        rows = (self.held_out or self.rows)[:_LOOKED_AT]
        self.progress.phase("looking at the held-out loss" if self.held_out else "measuring the loss")
        loss = mean_loss(self.learner, rows) if self.loss is None else self.loss(rows)
        self.log.add("val", self.from_step + step, {"loss": loss})
        of = "held out" if self.held_out else "on what is learned"
        self.progress.note(f"loss {of} after {self.from_step + step} steps: {loss:.4f}")
        return loss

    def _see(self, loss: float) -> None:
        """Save the weights if no loss was lower; otherwise count the evaluation."""
        now = self.standing
        if loss < math.inf and (not self.held_out or now.lowest is None or loss < now.lowest):
            self.standing = replace(now, lowest=loss, best=now.taken, waited=0)
            self._save()
        else:
            self.standing = replace(now, waited=now.waited + 1)

    def _save(self) -> None:
        self.progress.phase("saving")
        self.learner.save(self.folder / CHECKPOINT, resumable=False)
        if self.lineage is not None:
            self.lineage.mark(self.folder / CHECKPOINT, self.from_step + self.standing.taken)


_SHOWN: Final[tuple[str, ...]] = (
    "loss", "grad_norm", "tokens", "packed_tokens", "seconds", "accuracy", "margin", "skipped",
)  # fmt: skip


def mean_loss(learner: Learner, rows: Sequence[Row]) -> float:
    """Return the mean of - log p over the learned tokens, in nats."""
    found = learner.logprobs(rows)
    total = sum(float(each.sum(dtype="f8")) for each in found)
    return -total / max(1, sum(len(each) for each in found))


def schedule(steps: int) -> tuple[int, int]:
    """Return the number of steps in which the learning rate rises, and the total."""
    rise = min(_LONGEST_RISE, math.ceil(_RISE * steps))
    return rise, max(steps, rise + 1)
