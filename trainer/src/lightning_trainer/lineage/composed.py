"""The lineage of a checkpoint, or of a file of prompts, that is composed of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from lightning_trainer.lineage.blocks import block_checkpoint
from lightning_trainer.lineage.manifest import (
    MANIFEST,
    Manifest,
    RunFacts,
    StepSources,
    mark_checkpoint,
    merge_sources,
)
from lightning_trainer.lineage.reading import Line, read_lineage, read_pointer


def compose_lineage(parts: Sequence[Path], run: Path, composed: Path) -> None:
    """Record that a checkpoint is composed of others, and block it if one of them is blocked.

    It descends from each part, and a step of its manifest has everything that the part learned from.

    Args:
        parts: folders of checkpoints, or of searches for prompts. Those without a lineage are left out.
        run: folder of the new manifest, other than `composed`; an earlier manifest there is replaced.
        composed: folder of the new checkpoint.

    Raises:
        ConfigError: the lineage of a part was changed, or the new one can't be written.
    """
    (run / MANIFEST).unlink(missing_ok=True)
    known = [read_lineage(part) for part in parts if read_pointer(part) is not None]
    if not known:
        return
    for folder in (run, composed):
        folder.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(run)
    for step, part in enumerate(known):
        begun = {name: part.begun[name] for name in ("model", "data", "code", "options") if name in part.begun}
        manifest.begin(RunFacts(**begun, parent=part.head), step)
        manifest.add_step(step, merge_sources([_sources_of(line) for line in part.steps]))
        if part.blocked is not None:
            block_checkpoint(composed, part.blocked)
    mark_checkpoint(run, composed, len(known))


def _sources_of(line: Line) -> StepSources:
    return StepSources(**{each.name: line[each.name] for each in fields(StepSources) if each.name in line})
