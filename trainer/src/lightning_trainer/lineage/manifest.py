"""The manifest of a run: one line when it starts or resumes, and one for the sources of each step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.lineage.chain import ChainWriter, read_head, read_signing_key

MANIFEST: Final = "lineage.jsonl"  # in a run's folder
POINTER: Final = "lineage.json"  # in a checkpoint: how much of the manifest counts for it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The inputs of a run.

    Attributes:
        model: the model that it starts from, as named by the user.
        parent: lineage head of the checkpoint that it starts from; None: that has no lineage.
        data: files, each with ``path`` and ``sha256``.
        code: the program's files, likewise.
        options: digest of the options.
    """

    model: str
    parent: str | None = None
    data: Sequence[Mapping[str, str]] = ()
    code: Sequence[Mapping[str, str]] = ()
    options: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSources:
    """The sources of a step. All fields are sorted, without duplicates.

    Attributes:
        calls: ids of model calls.
        rewards: ids of rewards.
        rollouts: ids of rollouts.
        attempts: ids of attempts.
        traces: ids of traces.
        sources: sources of the rewards, and ``origin:NAME`` of data that was recorded outside this run.
        prompts: digests of system prompts by agent.
        tasks: ids of the traces that its tasks were made of.
        lines: lines of data files, ``FILE, line N``.
        tenants: the tenants that the data belongs to.
    """

    calls: Sequence[str] = ()
    rewards: Sequence[str] = ()
    rollouts: Sequence[str] = ()
    attempts: Sequence[str] = ()
    traces: Sequence[str] = ()
    sources: Sequence[str] = ()
    prompts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    tasks: Sequence[str] = ()
    lines: Sequence[str] = ()
    tenants: Sequence[str] = ()


_LISTS: Final = [each for each in fields(StepSources) if each.name != "prompts"]


def merge_sources(parts: Sequence[StepSources]) -> StepSources:
    """Return the sources of a step that consists of these parts."""
    named = {each.name: sorted_once(one for part in parts for one in getattr(part, each.name)) for each in _LISTS}
    agents = sorted({agent for part in parts for agent in part.prompts})
    prompts = {agent: sorted_once(one for part in parts for one in part.prompts.get(agent, ())) for agent in agents}
    return StepSources(**named, prompts=prompts)


class Manifest:
    """Writes the manifest of a run. May be used from any thread.

    Args:
        folder: folder of the run.

    Raises:
        ConfigError: the signing key or the existing file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / MANIFEST
        self._chain = ChainWriter(self._path, read_signing_key())

    def begin(self, facts: RunFacts, step: int) -> None:
        """Record the inputs of a run that starts, or resumes after `step` steps, which voids the later steps."""
        self._append({"kind": "begin", "step": step, "at_ns": time.time_ns(), **asdict(facts)})

    def add_step(self, step: int, sources: StepSources) -> None:
        """Record the sources of a step; steps count from 0."""
        values = {name: value for name, value in asdict(sources).items() if value}
        self._append({"kind": "step", "step": step, "at_ns": time.time_ns(), **values})

    def _append(self, values: Mapping[str, Any]) -> None:
        try:
            self._chain.append(values)
        except OSError as error:
            raise ConfigError(
                f"{self._path} can't be written, and a checkpoint must say what it learned from: {error.strerror}."
            ) from error


def mark_checkpoint(run: Path, checkpoint: Path, steps: int) -> None:
    """Write into a checkpoint how much of its run's manifest it learned from.

    The manifest is linked into the checkpoint, so that it is copied with the checkpoint.

    Raises:
        OSError: it cannot be written.
        ConfigError: the manifest cannot be read.
    """
    manifest = run / MANIFEST
    if not manifest.exists():
        return
    head = read_head(manifest)
    pointer = {"lines": head.lines, "head": head.hash, "steps": steps, "run": str(run.resolve())}
    (checkpoint / POINTER).write_text(json.dumps(pointer, indent=2) + "\n", encoding="utf-8")
    linked = checkpoint / MANIFEST
    linked.unlink(missing_ok=True)
    try:
        os.link(manifest, linked)
    except OSError:  # a file system without hard links
        linked.write_bytes(manifest.read_bytes())


def sorted_once(values: Iterable[str | None]) -> list[str]:
    """Return the distinct non-empty values, sorted."""
    return sorted({value for value in values if value})
