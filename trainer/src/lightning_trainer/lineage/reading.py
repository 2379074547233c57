"""The lineage of a checkpoint: the verified manifest lines that count for it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.lineage.blocks import block_of
from lightning_trainer.lineage.chain import VerifiedChain, verify_chain
from lightning_trainer.lineage.manifest import MANIFEST, POINTER

Line = Mapping[str, Any]
IDS: Final = ("calls", "rewards", "rollouts", "attempts", "traces", "tasks", "tenants")  # searchable fields of a step
_NEWEST: Final = ("checkpoint-best", "checkpoint")  # in a run's folder; `serve` prefers the best


@dataclass(frozen=True, slots=True, kw_only=True)
class Pointer:
    """How much of a manifest a checkpoint learned from.

    Attributes:
        lines: number of lines of the manifest.
        head: hash of the last of them; identifies the checkpoint's lineage.
        steps: steps of the run before the checkpoint.
        run: folder of the run.
    """

    lines: int
    head: str
    steps: int
    run: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLineage:
    """The sources of a checkpoint.

    Attributes:
        checkpoint: its folder.
        manifest: the file that records them.
        head: identifies its lineage.
        signed: whether signatures were checked; None: lines are signed, but no key was given.
        begun: the inputs of its run; of a checkpoint that is composed of others, those of the last one.
        parents: heads of the checkpoints that it descends from.
        steps: the sources of each of its steps.
        blocked: why it must not be served; None: it may be.
    """

    checkpoint: Path
    manifest: Path
    head: str
    signed: bool | None
    begun: Line
    parents: frozenset[str]
    steps: tuple[Line, ...] = field(repr=False)
    blocked: str | None

    def all_of(self, name: str) -> list[str]:
        """Return the distinct values of one field of its steps, sorted."""
        return sorted({one for step in self.steps for one in step.get(name, ())})

    @property
    def prompts(self) -> dict[str, list[str]]:
        """Digests of the system prompts of each agent."""
        found: dict[str, set[str]] = {}
        for step in self.steps:
            for agent, digests in step.get("prompts", {}).items():
                found.setdefault(agent, set()).update(digests)
        return {agent: sorted(digests) for agent, digests in sorted(found.items())}


def read_lineage(name: Path, key: bytes | None = None) -> CheckpointLineage:
    """Read and verify the sources of a checkpoint.

    Args:
        name: its folder, or that of its run.
        key: key that the manifest must be signed with; None: signatures are not checked.

    Raises:
        ConfigError: it has no lineage, or the manifest was changed.
    """
    checkpoint = resolve_checkpoint(name)
    pointer = read_pointer(checkpoint)
    manifest = checkpoint / MANIFEST
    if pointer is None or not manifest.is_file():
        raise ConfigError(
            f"{name} has no lineage: there is no {POINTER} in it. Earlier versions and other programs write none."
        )
    chain = verify_chain(manifest, key, lines=pointer.lines)
    if not chain.hashes or chain.hashes[-1] != pointer.head:
        raise ConfigError(
            f"{manifest} is not the file that belongs to {checkpoint}: line {pointer.lines} has another hash."
            " It was rewritten, or belongs to another run."
        )
    begun: Line = next((line for line in reversed(chain.lines) if line["kind"] == "begin"), {})
    return CheckpointLineage(
        checkpoint=checkpoint, manifest=manifest, head=pointer.head, signed=chain.signed, begun=begun,
        parents=parents_of(chain.lines),
        steps=tuple(line for _, line in steps_of(chain, pointer)), blocked=block_of(checkpoint),
    )  # fmt: skip


def parents_of(lines: Iterable[Line]) -> frozenset[str]:
    """Return the heads of the checkpoints that a run started from, or that a checkpoint is composed of."""
    return frozenset(line["parent"] for line in lines if line["kind"] == "begin" and line.get("parent"))


def steps_of(chain: VerifiedChain, pointer: Pointer) -> Iterator[tuple[int, Line]]:
    """Return the lines of the steps that count for a checkpoint, each with its index in the chain.

    If a run resumed from an earlier step, the steps that it had recorded after that are void.
    """
    kept: list[tuple[int, Line]] = []
    for place, line in enumerate(chain.lines[: pointer.lines]):
        if line["kind"] == "begin":
            kept = [(at, step) for at, step in kept if step["step"] < line["step"]]
        else:
            kept.append((place, line))
    return ((place, line) for place, line in kept if line["step"] < pointer.steps)


def resolve_checkpoint(name: Path) -> Path:
    """Return the folder of a checkpoint; for a run's folder, the checkpoint that `serve` uses.

    Raises:
        ConfigError: there is no such folder.
    """
    folder = next((name / each for each in _NEWEST if (name / each).is_dir()), name)
    if not folder.is_dir():
        raise ConfigError(f"there is no checkpoint {name}. Give the folder of a run or of a checkpoint.")
    return folder.resolve()


def read_pointer(checkpoint: Path) -> Pointer | None:
    """Read how much of its manifest a checkpoint learned from; None if that is not recorded."""
    path = checkpoint / POINTER
    if not path.is_file():
        return None
    try:
        pointer = Pointer(**json.loads(path.read_text(encoding="utf-8")))
        if [type(each) for each in (pointer.lines, pointer.head, pointer.steps, pointer.run)] != [int, str, int, str]:
            raise TypeError("it has values of other types")
        return pointer
    except (OSError, ValueError, TypeError, RecursionError):
        raise ConfigError(f"{path} can't be read, so it is unknown what {checkpoint} learned from.") from None


def head_of(name: Path) -> str | None:
    """Return the lineage head of a checkpoint or run; None if it has none, or is not a folder."""
    if not name.is_dir():
        return None
    pointer = read_pointer(resolve_checkpoint(name))
    return pointer.head if pointer is not None else None
