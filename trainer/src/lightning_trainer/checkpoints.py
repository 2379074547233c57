"""Checkpoints of a run: whole or not there, the newest ones kept, and checked before a run goes on from one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError

STATE_NAME: Final = "state.json"
NEWEST: Final = "checkpoint"  # in the run's folder: a link to the newest one
FOLDER: Final = "checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run stands. With the backend's own files it is all that the next step depends on.

    Attributes:
        step: steps taken.
        identity: options that must be the same for the next batch to be the same, by name.
        agents: names of the agents seen so far.
        flat_steps: steps so far in which no reward differed within its group, if there was no other kind; else None.
        rewards: mean training reward of each step taken.
        seconds: time that the run has taken.
    """

    step: int
    identity: dict[str, Any]
    agents: tuple[str, ...] = ()
    flat_steps: int | None = 0
    rewards: tuple[float | None, ...] = field(default=())
    seconds: float = 0.0


def save(run: Path, state: State, write: Callable[[Path], None], *, keep: int) -> Path:
    """Write a checkpoint.

    Args:
        run: the run's folder.
        state: where it stands.
        write: writes the backend's files into a folder.
        keep: checkpoints that stay; older ones go.

    Returns:
        The folder; ``run/checkpoint`` links to it.

    Raises:
        ConfigError: the disk is full or not writable; checkpoints that were there before stay.
    """
    final = run / FOLDER / f"step-{state.step:06d}"
    draft = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        write(draft)
        (draft / STATE_NAME).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        for path in draft.rglob("*"):
            _sync(path)
        _put(draft, final)
        _link(run / NEWEST, final)
        _prune(run, keep)
    except OSError as error:
        raise ConfigError(f"the checkpoint {final} can't be written: {error.strerror}. Is the disk full?") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def find(resume: Path) -> tuple[Path, Path]:
    """Find what to go on from.

    Args:
        resume: a run's folder, or one of its checkpoints.

    Returns:
        The run's folder and the checkpoint's.

    Raises:
        ConfigError: neither is there.
    """
    checkpoint = resume / NEWEST if (resume / NEWEST).exists() else resume
    checkpoint = checkpoint.resolve()
    if not (checkpoint / STATE_NAME).is_file():
        raise ConfigError(
            f"{resume} holds no checkpoint: there is no {NEWEST} or {STATE_NAME} in it. Give a run's folder."
        )
    return checkpoint.parent.parent, checkpoint


def read_state(checkpoint: Path) -> State:
    """Read where a run stood.

    Raises:
        ConfigError: the file can't be read.
    """
    try:
        values = json.loads((checkpoint / STATE_NAME).read_text(encoding="utf-8"))
        return State(**{**values, "agents": tuple(values["agents"]), "rewards": tuple(values["rewards"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{checkpoint / STATE_NAME} can't be read: {error}. Give another checkpoint.") from None


def check_identity(state: State, identity: dict[str, Any], checkpoint: Path) -> None:
    """Make sure that a run that goes on is the same run.

    Raises:
        ConfigError: an option differs; the message names it with both values.
    """
    for name, now in identity.items():
        before = state.identity.get(name)
        if before != now:
            raise ConfigError(
                f"{checkpoint} is of a run with {name} = {before!r}, not {now!r}. "
                "Go on with the same, or start a new run without --resume."
            )


def _put(draft: Path, final: Path) -> None:
    """Move a folder to its place, where an older one may be: a run that goes on may take the same step again."""
    aside = draft.with_name(f"{draft.name}.old")
    if final.exists():
        final.rename(aside)
    draft.rename(final)
    shutil.rmtree(aside, ignore_errors=True)


def _link(link: Path, target: Path) -> None:
    draft = link.with_name(f".{link.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(os.path.relpath(target, link.parent))
    draft.replace(link)


def _prune(run: Path, keep: int) -> None:
    by_age = sorted((run / FOLDER).glob("step-*"), key=lambda path: (path / STATE_NAME).stat().st_mtime_ns)
    for old in by_age[:-keep]:
        shutil.rmtree(old)


def _sync(path: Path) -> None:
    if path.is_file():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
