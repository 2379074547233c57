"""The callback that writes lineage: a manifest line for each batch, and a pointer in each checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_spans.store.traces import traces_of
from lightning_trainer.callbacks import Callback, CallbackContext, CallbackKind, StepRollouts
from lightning_trainer.lineage.manifest import Manifest, mark_checkpoint
from lightning_trainer.run.learned_from import run_facts, sources_of

if TYPE_CHECKING:
    from lightning_spans.adapter.trace import Trace
    from lightning_trainer.rl.batch.batch import Batch


class LineageKind(CallbackKind):
    """The lineage callback's kind, active in every run."""

    def open(self, context: CallbackContext) -> AbstractContextManager[Callback]:
        """Return the callback that writes the manifest of a run.

        Raises:
            ConfigError: the signing key, or the manifest of the resumed run, cannot be read.
        """
        run = context.run
        return nullcontext(LineageCallback(Manifest(run.folder), context))


class LineageCallback(Callback):
    """Writes the sources of each step.

    Args:
        manifest: manifest of the run.
        context: context that the callback is opened with.
    """

    def __init__(self, manifest: Manifest, context: CallbackContext) -> None:
        self._manifest = manifest
        self._run = context.run
        self._begun = False

    def after_batch(self, batch: Batch, rollouts: StepRollouts) -> tuple[Batch, Mapping[str, float]]:
        """Write the sources of the batch before it is learned from."""
        if not self._begun:
            self._manifest.begin(run_facts(self._run.config), rollouts.step)
            self._begun = True
        traces = [*rollouts.seen, *self._more_traces(batch, rollouts)]
        self._manifest.add_step(rollouts.step, sources_of(batch, traces, self._tasks(batch, rollouts)))
        return batch, {}

    def _tasks(self, batch: Batch, rollouts: StepRollouts) -> dict[str, Mapping[str, Any]]:
        """Return the tasks of a batch by rollout; those of rows that another callback added are in the store."""
        tasks = {one.rollout.rollout_id: one.rollout.task for one in rollouts.outcomes}
        added = {row.rollout_id for row in batch.rows} - tasks.keys()
        more = self._run.store.rollouts(rollout_ids=sorted(added)) if added else []
        return {**tasks, **{one.rollout_id: one.task for one in more}}

    def _more_traces(self, batch: Batch, rollouts: StepRollouts) -> list[Trace]:
        """Read the traces of rows that were added by another callback."""
        added = {row.attempt_id for row in batch.rows} - {trace.attempt_id for trace in rollouts.seen}
        return traces_of(self._run.store, attempt_ids=sorted(added)) if added else []

    def after_save(self, checkpoint: Path, step: int) -> None:
        """Write into a checkpoint which manifest lines count for it."""
        mark_checkpoint(self._run.folder, checkpoint, step)
