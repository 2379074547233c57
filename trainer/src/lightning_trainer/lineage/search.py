"""Find the checkpoints that learned from a call, a trace or a rollout, and the parents of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_trainer.lineage.blocks import block_of
from lightning_trainer.lineage.chain import VerifiedChain, verify_chain
from lightning_trainer.lineage.manifest import MANIFEST, POINTER
from lightning_trainer.lineage.reading import IDS, CheckpointLineage, Line, Pointer, parents_of, read_pointer, steps_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AffectedCheckpoint:
    """A checkpoint that learned from any of the requested ids.

    Attributes:
        folder: its folder.
        ids: the ids that it learned from directly; empty: it started from a checkpoint that did.
        kinds: kinds of these ids: ``calls``, ``rewards`` and so on.
        steps: the steps that learned from them; steps count from 0.
    """

    folder: Path
    ids: tuple[str, ...] = ()
    kinds: frozenset[str] = frozenset()
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _CheckpointNode:
    affected: AffectedCheckpoint
    head: str
    parents: frozenset[str]


def find_checkpoints(runs: Sequence[Path], ids: Collection[str], key: bytes | None = None) -> list[AffectedCheckpoint]:
    """Find the checkpoints that learned from any of these ids, and their descendants.

    Args:
        runs: folders of runs; checkpoints are found at any depth.
        ids: of calls, rewards, rollouts, attempts or traces, and names of tenants.
        key: key that manifests must be signed with; None: signatures are not checked.

    Returns:
        Those that learned from the ids directly first; each part sorted by folder.

    Raises:
        ConfigError: a manifest was changed.
    """
    known = list(_known_checkpoints(runs, frozenset(ids), key))
    reached = {one.head for one in known if one.affected.ids}
    while more := {one.head for one in known if one.parents & reached} - reached:
        reached |= more
    found = [one.affected for one in known if one.head in reached]
    return sorted(found, key=lambda one: (not one.ids, str(one.folder)))


def find_ancestors(runs: Sequence[Path], lineage: CheckpointLineage) -> list[Path]:
    """Find the checkpoints that this one descends from, nearest first, if they are in a folder of runs.

    Raises:
        ConfigError: a manifest was changed.
    """
    wanted = set(lineage.parents)
    known = list(_known_checkpoints(runs, frozenset(), None)) if wanted else []
    found: list[Path] = []
    while wanted:
        here = [one for one in known if one.head in wanted and one.affected.folder not in found]
        found += [one.affected.folder for one in here]
        wanted = {parent for one in here for parent in one.parents}
    return found


def describe(found: Sequence[AffectedCheckpoint]) -> list[str]:
    """Describe the affected checkpoints, one line each."""
    lines = []
    for one in found:
        reason = block_of(one.folder)
        blocked = f" BLOCKED: {reason}" if reason is not None else ""
        steps = ", ".join(map(str, one.steps[:5])) + (", ..." if len(one.steps) > 5 else "")
        how = f"learned from {len(one.ids)} of it in step {steps}" if one.ids else "started from a checkpoint above"
        lines.append(f"{one.folder}: {how}.{blocked}")
    return lines


def each_step(runs: Sequence[Path]) -> Iterator[Line]:
    """Yield the steps in the manifests of all checkpoints, each once.

    Raises:
        ConfigError: a manifest was changed.
    """
    seen: set[str] = set()
    for _, chain, pointer in _each_checkpoint(runs, None):
        for place, line in steps_of(chain, pointer):
            if chain.hashes[place] not in seen:
                seen.add(chain.hashes[place])
                yield line


def _known_checkpoints(runs: Sequence[Path], ids: frozenset[str], key: bytes | None) -> Iterator[_CheckpointNode]:
    for folder, chain, pointer in _each_checkpoint(runs, key):
        yield _look_through(folder, chain, pointer, ids)


def _each_checkpoint(runs: Sequence[Path], key: bytes | None) -> Iterator[tuple[Path, VerifiedChain, Pointer]]:
    chains: dict[tuple[int, int], VerifiedChain] = {}  # by file: the checkpoints of a run link to the same file
    for path in sorted({path for folder in runs if folder.is_dir() for path in folder.rglob(POINTER)}):
        manifest, pointer = path.with_name(MANIFEST), read_pointer(path.parent)
        if pointer is None or not manifest.is_file():
            continue
        status = manifest.stat()
        file = (status.st_dev, status.st_ino)
        if file not in chains:
            chains[file] = verify_chain(manifest, key)
        yield path.parent, chains[file], pointer


def _look_through(folder: Path, chain: VerifiedChain, pointer: Pointer, ids: frozenset[str]) -> _CheckpointNode:
    found, kinds, steps = set[str](), set[str](), []
    for _, line in steps_of(chain, pointer):
        named = {kind: ids.intersection(line.get(kind, ())) for kind in IDS}
        if any(named.values()):
            found.update(*named.values())
            kinds.update(kind for kind, those in named.items() if those)
            steps.append(int(line["step"]))
    affected = AffectedCheckpoint(
        folder=folder.resolve(), ids=tuple(sorted(found)), kinds=frozenset(kinds), steps=tuple(steps)
    )
    return _CheckpointNode(affected, pointer.head, parents_of(chain.lines[: pointer.lines]))
