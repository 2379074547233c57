"""Checkpoints of a run: complete or absent, the newest ones kept, and checked before a run continues from one."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from lightning_spans.errors import ConfigError
from lightning_spans.schema.attempts import RolloutStatus
from lightning_trainer.config.files import CONFIG_NAME
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.models import BEST, NEWEST
from lightning_trainer.report.metrics import LOG_NAME
from lightning_trainer.run.data import Task, digest
from lightning_trainer.session.drafts import remove_folder, replace_folder
from lightning_trainer.session.folder import check_unchanged

STATE_NAME: Final = "state.json"
FOLDER: Final = "checkpoints"
LONGEST_UNSAVED_S: Final = 900.0  # seconds of work that a kill may cost, if steps are long
OPEN: Final[tuple[RolloutStatus, ...]] = ("queued", "running")  # rollouts that nobody waits for once a process is gone


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a run. With the backend's own files, it is all that the next step depends on.

    Attributes:
        step: steps taken.
        identity: options that must be the same for the next batch to be the same, by name.
        agents: names of the agents seen so far.
        flat_steps: steps so far in which no reward differed within its group, if all steps with training rows were like
            that; else None.
        kept: what callbacks keep for later steps, by name: `callbacks.Callback.kept`.
        rewards: mean training reward of each step taken.
        successes: estimates of each task's success by policy: `curriculum.Estimates`.
        slowed: factors of the learning rates of policies that fell: `cliffs.CliffGuard`.
        seconds: time that the run has taken.
        resumable: whether the backend's files are complete, so that the run can continue from here.
    """

    step: int
    identity: dict[str, Any]
    agents: tuple[str, ...] = ()
    flat_steps: int | None = 0
    kept: dict[str, Any] = field(default_factory=dict)
    rewards: tuple[float | None, ...] = field(default=())
    successes: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    slowed: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    resumable: bool = True


def save(
    run: Path,
    state: State,
    write: Callable[[Path], None],
    *,
    keep: int,
    strip: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint.

    Args:
        run: the run's folder.
        state: the run's state.
        write: writes the backend's files into a folder.
        keep: checkpoints that stay; older ones are removed.
        strip: removes from older ones what only resuming needs; None keeps them complete.

    Returns:
        The folder; ``run/checkpoint`` links to it.

    Raises:
        ConfigError: the disk is full or not writable; existing checkpoints stay.
    """
    final = run / FOLDER / f"step-{state.step:06d}"
    try:
        with replace_folder(final) as draft:
            write(draft)
            (draft / STATE_NAME).write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        set_link(run / NEWEST, final)
        _prune(run, keep)
        if strip is not None:
            for older in checkpoints_by_age(run)[:-1]:
                _strip(older, strip)
    except OSError as error:
        raise ConfigError(_unwritten(run, final, error)) from error
    return final


def set_link(link: Path, target: Path) -> None:
    """Create a relative link, or replace the one that is there.

    Raises:
        OSError: it cannot be created.
    """
    draft = link.with_name(f".{link.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    draft.symlink_to(os.path.relpath(target, link.parent))
    draft.replace(link)


def mark_newest(run: Path, checkpoint: Path) -> None:
    """Link ``run/checkpoint`` to the checkpoint that a run resumes from, which may be an earlier one.

    Raises:
        ConfigError: the link cannot be created.
    """
    own = run / FOLDER / checkpoint.name
    if not (own / STATE_NAME).is_file() or own.resolve() != checkpoint.resolve():  # another backend's, or elsewhere
        return
    try:
        set_link(run / NEWEST, own)
    except OSError as error:
        raise ConfigError(_unwritten(run, run / NEWEST, error)) from error


def mark_best(run: Path, step: int) -> None:
    """Link ``run/checkpoint-best`` to the checkpoint of a step, which stays as long as it is the best.

    Raises:
        ConfigError: the link cannot be created.
    """
    checkpoint = run / FOLDER / f"step-{step:06d}"
    if not checkpoint.is_dir():  # nothing was learned yet
        return
    try:
        set_link(run / BEST, checkpoint)
    except OSError as error:
        raise ConfigError(_unwritten(run, run / BEST, error)) from error


def unmark_best(run: Path, step: int | None) -> None:
    """Remove the link, unless it is to the checkpoint of this step: a resumed run may continue from an earlier one."""
    if (run / BEST).is_symlink() and (step is None or (run / BEST).resolve().name != f"step-{step:06d}"):
        (run / BEST).unlink()


def checkpoints_by_age(run: Path) -> list[Path]:
    """Return the checkpoints of a run, the newest last. Those that a killed older version half removed are left out."""
    states = (run / FOLDER).glob(f"step-*/{STATE_NAME}")
    return [path.parent for path in sorted(states, key=lambda path: path.stat().st_mtime_ns)]


def find(resume: Path) -> tuple[Path, Path]:
    """Find the state to continue from.

    Args:
        resume: a run's folder, or one of its checkpoints.

    Returns:
        The run's folder and the checkpoint's.

    Raises:
        ConfigError: neither exists.
    """
    checkpoint = resume / NEWEST if (resume / NEWEST).exists() else resume
    checkpoint = checkpoint.resolve()
    if not resume.exists():
        raise ConfigError(f"there is no folder {resume}. Give the folder of a run.")
    if not (checkpoint / STATE_NAME).is_file() and (resume / CONFIG_NAME).is_file():
        raise ConfigError(
            f"{resume} ended before its first checkpoint, so it can't be resumed. Start again with the"
            f" options in {resume / CONFIG_NAME} and another --out; --save-every 1 writes one after each step."
        )
    if not (checkpoint / STATE_NAME).is_file() and (resume / LOG_NAME).is_file():
        raise ConfigError(
            f"{resume} ended before its first checkpoint, while it was loading, so it can't be resumed."
            " Start again with another --out, or delete the folder."
        )
    if not (checkpoint / STATE_NAME).is_file():
        raise ConfigError(
            f"{resume} has no checkpoint: it contains neither {NEWEST} nor {STATE_NAME}. Give a run's folder."
        )
    return resume if (resume / NEWEST).exists() else checkpoint.parent.parent, checkpoint


def read_state(checkpoint: Path) -> State:
    """Read the state of a run.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        values = json.loads((checkpoint / STATE_NAME).read_text(encoding="utf-8"))
        if "spread" in values:  # of an older version
            values["kept"] = {"spread": values.pop("spread")}
        State(**values)  # no name is unknown, and none is missing
        return TypeAdapter(State).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        named = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{checkpoint / STATE_NAME} can't be read: {named}: {first['msg']}. Give another checkpoint."
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{checkpoint / STATE_NAME} can't be read: {error}. Give another checkpoint.") from None


def identity_of(config: TrainConfig, tasks: Sequence[Task]) -> dict[str, Any]:
    """Return what must stay the same for a run to continue: with it the next batch is the same."""
    return {
        "data": digest(tasks),
        "batch_size": config.batch_size,
        "group_size": config.group_size,
        "seed": config.seed,
        "lora_rank": config.lora_rank,
        "lora_alpha": config.lora_alpha or 2.0 * config.lora_rank,
        "base_bits": config.base_bits,
    }


def check_resumable(state: State, checkpoint: Path) -> None:
    """Check that a checkpoint has what resuming needs.

    Raises:
        ConfigError: it contains only weights.
    """
    if not state.resumable:
        run = checkpoint.parent.parent
        newest = (run / NEWEST).resolve()
        whole = newest != checkpoint and (newest / STATE_NAME).is_file() and read_state(newest).resumable
        first = f"Resume from the newest complete one: --resume {run}. Or start" if whole else "Start"
        then = "" if whole else " A run without --checkpoint weights keeps what --resume needs."
        raise ConfigError(
            f"{checkpoint} holds only weights (checkpoint = {'newest' if whole else 'weights'}), from which no"
            f" run can be resumed exactly. {first} a new run from these weights, without --resume: --model"
            f" {checkpoint}.{then}"
        )


def check_identity(state: State, identity: Mapping[str, Any], checkpoint: Path) -> None:
    """Check that a resumed run is the same run.

    Raises:
        ConfigError: see `check_unchanged`.
    """
    check_unchanged(
        checkpoint,
        state.identity,
        identity,
        f"Only {', '.join(identity)}, the model and its adapters must stay; every other option may change, such as"
        " steps, until, learning_rate or val.",
    )


def _prune(run: Path, keep: int) -> None:
    best = (run / BEST).resolve()
    for old in checkpoints_by_age(run)[:-keep]:
        if old.resolve() != best:
            remove_folder(old)


def _strip(checkpoint: Path, strip: Callable[[Path], None]) -> None:
    """Note that a run cannot resume from a checkpoint, and only then remove the files. Its time stamp stays."""
    path = checkpoint / STATE_NAME
    times = path.stat()
    values = json.loads(path.read_text(encoding="utf-8"))
    if values.get("resumable", True):
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(json.dumps({**values, "resumable": False}, indent=2) + "\n", encoding="utf-8")
        os.utime(draft, ns=(times.st_atime_ns, times.st_mtime_ns))
        draft.replace(path)
    strip(checkpoint)


def _unwritten(run: Path, final: Path, error: OSError) -> str:
    """Return the error for a checkpoint that cannot be written, with what is left to resume from."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    free = f" ({shutil.disk_usage(run).free / 1e9:.2f} GB are free)" if full and run.exists() else ""
    what = f"the checkpoint {final} can't be written: {error.strerror}{free}."
    if not (run / NEWEST).exists():
        return f"{what} There is no earlier checkpoint. --checkpoint weights writes smaller ones."
    newest = (run / NEWEST).resolve()
    then = f"then continue with --resume {run}" if read_state(newest).resumable else f"then start from --model {newest}"
    return f"{what} {newest.name} is complete; free disk space, {then}."
