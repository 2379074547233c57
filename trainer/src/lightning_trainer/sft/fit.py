"""The loop: batches, a look at the held-out loss now and then, the weights of the lowest kept."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from lightning_trainer.backends.protocol import Learner
from lightning_trainer.report.metrics import MetricLog
from lightning_trainer.report.progress import Progress
from lightning_trainer.rl.rows import Row
from lightning_trainer.run.interrupts import Interrupted
from lightning_trainer.sft.batches import batches

CHECKPOINT: Final = "checkpoint"
_LOOKED_AT: Final = 200  # most held-out rows: more tell little more, and cost
_RISE: Final = 0.1  # of the steps, in which the learning rate rises
_LONGEST_RISE: Final = 20
_LOOKS: Final = 4  # in an epoch
_SELDOMEST: Final = 50  # steps between two looks, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What came of it.

    Attributes:
        before: mean loss of a token before: of held-out rows where there are any, else of some that are learned.
        after: likewise with the weights that were kept.
        steps: that were taken.
        best: steps after which the weights were kept.
        tokens: learned, those of several epochs each time.
        seconds: that steps and looks took.
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
        held_out: to look at; empty: it never stops early, and the last weights are kept.
        folder: gets ``checkpoint``.
        log: of metrics.
        progress: is told what happens.
        check: raises where somebody asked the program to stop.
        batch_size: rows in a step.
        steps: of them all.
        eval_every: steps between two looks; None: four in an epoch.
        group_by_prefix: rows that are drawn together for their common beginnings.
        patience: looks without a lower loss after which it stops.
        seed: of the order.
        from_step: number of the first step in the log, where others came before.
        update: learns from a batch; None: `Learner.update`.
        loss: what is looked at; None: the mean loss of a token.
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
    _lowest: float = field(default=math.inf, init=False)
    _best: int = field(default=0, init=False)
    _waited: int = field(default=0, init=False)

    def run(self) -> Fitted:
        """Take the steps.

        Raises:
            Interrupted: somebody asked to stop; the newest weights are kept, unless better ones are.
        """
        began = time.monotonic()
        before = self._look(0)
        taken, tokens = 0, Counter[str]()
        update = self.update or self.learner.update
        self.progress.begin(self.from_step, self.from_step + self.steps)
        drawn = batches(self.rows, self.batch_size, self.steps, self.seed, self.group_by_prefix)
        try:
            for taken, batch in enumerate(drawn, 1):
                self.check()
                self.progress.phase("learning", taken - 1, self.steps)
                metrics = update(batch)
                tokens.update(tokens=int(metrics["tokens"]))
                shown = {name: metrics[name] for name in _SHOWN if name in metrics}
                self.log.add("train", self.from_step + taken - 1, {**shown, "rows": float(len(batch))})
                self.progress.step(self.from_step + taken - 1, shown)
                if taken % self._every == 0 and taken < self.steps and self._stops(taken):
                    break
            self._keep(taken, self._look(taken) if self._waited < self.patience else math.inf)
        except Interrupted:
            if taken > 1 and self._best == 0:
                self._save()
            raise
        return Fitted(
            before=before, after=self._lowest, steps=taken, best=self._best, tokens=tokens["tokens"],
            seconds=time.monotonic() - began,
        )  # fmt: skip

    @property
    def _every(self) -> int:
        in_epoch = math.ceil(len(self.rows) / self.batch_size)
        return self.eval_every or max(1, min(_SELDOMEST, in_epoch // _LOOKS))

    def _stops(self, step: int) -> bool:
        """Look, keep the weights if they are the best, and say whether it was long ago that any were."""
        if not self.held_out:
            return False
        self._keep(step, self._look(step))
        return self._waited >= self.patience

    def _look(self, step: int) -> float:
        rows = (self.held_out or self.rows)[:_LOOKED_AT]
        self.progress.phase("looking at the held-out loss" if self.held_out else "measuring the loss")
        loss = mean_loss(self.learner, rows) if self.loss is None else self.loss(rows)
        self.log.add("val", self.from_step + step, {"loss": loss})
        of = "held out" if self.held_out else "on what is learned"
        self.progress.note(f"loss {of} after {self.from_step + step} steps: {loss:.4f}")
        return loss

    def _keep(self, step: int, loss: float) -> None:
        if loss < self._lowest or (not self.held_out and loss < math.inf):
            self._lowest, self._best, self._waited = loss, step, 0
            self._save()
        else:
            self._waited += 1

    def _save(self) -> None:
        self.progress.phase("saving")
        self.learner.save(self.folder / CHECKPOINT, resumable=False)


_SHOWN: Final[tuple[str, ...]] = (
    "loss", "grad_norm", "tokens", "packed_tokens", "seconds", "accuracy", "margin", "skipped",
)  # fmt: skip


def mean_loss(learner: Learner, rows: Sequence[Row]) -> float:
    """Return the mean over tokens of what is learned of - log p, in nats."""
    found = learner.logprobs(rows)
    total = sum(float(each.sum(dtype="f8")) for each in found)
    return -total / max(1, sum(len(each) for each in found))


def schedule(steps: int) -> tuple[int, int]:
    """Return the steps in which the learning rate rises, and all of them."""
    rise = min(_LONGEST_RISE, math.ceil(_RISE * steps))
    return rise, max(steps, rise + 1)
