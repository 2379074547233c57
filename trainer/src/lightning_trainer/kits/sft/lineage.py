"""The manifest of examples that are learned: files and lines, and the records that they were made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_trainer.kits.sft.config import SftConfig
from lightning_trainer.kits.sft.data import Example, is_store
from lightning_trainer.lineage.facts import read_facts
from lightning_trainer.lineage.manifest import Manifest, RunFacts, StepSources, mark_checkpoint, sorted_once
from lightning_trainer.lineage.permits import split_tenants
from lightning_trainer.rl.rows import Row
from lightning_trainer.session.programs import digest, system_prompt

_KINDS = {
    "calls": "call_ids", "rewards": "reward_ids", "rollouts": "rollout_id", "attempts": "attempt_id",
    "traces": "trace_id",
}  # fmt: skip


def sft_facts(config: SftConfig) -> RunFacts:
    """Return what learning starts from: the model, the files, the options."""
    files = [name for name in config.data if not is_store(name)]
    return read_facts(config.model_dump(mode="json"), model=str(config.model), data=[*files, config.val], program=None)


class LineageWriter:
    """Records what each step of `Fit` learns from.

    Args:
        folder: of the run.
        facts: what the run starts from.
        taken: number of steps taken before.
    """

    def __init__(self, folder: Path, facts: RunFacts, taken: int) -> None:
        self._folder, self._facts, self._taken = folder, facts, taken
        self._manifest = Manifest(folder)
        self._examples: Sequence[Example] = ()
        self._worse: Sequence[Example] = ()
        self._begun = False

    def learning_from(self, examples: Sequence[Example], worse: Sequence[Example] = ()) -> None:
        """Set the examples that the next rows are made of; for pairs, the worse answers too."""
        self._examples, self._worse = examples, worse

    def add_step(self, step: int, rows: Iterable[Row]) -> None:
        """Record what a step learns from."""
        if not self._begun:
            self._manifest.begin(self._facts, self._taken)
            self._begun = True
        places = sorted({int(row.attempt_id) for row in rows})
        examples = [part[place] for part in (self._examples, self._worse) if part for place in places]
        self._manifest.add_step(step, sources_of_examples(examples))

    def mark(self, checkpoint: Path, steps: int) -> None:
        """Write into a checkpoint of this many steps which lines of the manifest apply to it."""
        mark_checkpoint(self._folder, checkpoint, steps)


def sources_of_examples(examples: Sequence[Example]) -> StepSources:
    """Return the sources of examples."""
    prompts: dict[str, set[str]] = {}
    for example in examples:
        said = system_prompt({"messages": list(example.messages)})
        prompts.setdefault(example.agent or "", set()).add(digest(said))
    found = {
        kind: sorted_once(one for example in examples for one in example.provenance.get(name, ()))
        for kind, name in _KINDS.items()
    }
    origins = {origin for example in examples for origin in example.provenance.get("origin", ())}
    return StepSources(
        **found,
        lines=sorted_once(example.source for example in examples),
        tenants=sorted_once(
            name
            for example in examples
            for text in example.provenance.get("tenant", ())
            for name in split_tenants(text)
        ),
        sources=sorted(f"origin:{origin}" for origin in origins),
        prompts={agent: sorted(digests) for agent, digests in sorted(prompts.items())},
    )
