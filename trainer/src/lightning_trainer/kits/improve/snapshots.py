"""A run's folder composed of the base, with an adapter or a prompt for some agents. `eval` and `serve` read it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lightning_spans.record.prompts import read_prompts
from lightning_trainer.config.files import CONFIG_NAME, to_json
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.kits.prompts import result as prompt_files
from lightning_trainer.lineage.blocks import BLOCKED, search_folder
from lightning_trainer.lineage.composed import compose_lineage
from lightning_trainer.lineage.manifest import MANIFEST, POINTER
from lightning_trainer.models import NEWEST, resolve
from lightning_trainer.policies import ADAPTERS_NAME, BASE
from lightning_trainer.report.metrics import write_atomically

PROMPTS_NAME: Final = "prompts.json"
_STATE: Final = re.compile(r"(trainer\.(json|safetensors)|state\.json)")  # files that only resuming needs
_OF_WHOLE: Final = (ADAPTERS_NAME, MANIFEST, POINTER, BLOCKED)  # files about a checkpoint with all of its adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The result of a method for one agent: one of the two.

    Attributes:
        checkpoint: checkpoint of a run that trained only this agent's adapter.
        prompts: a file with its prompt.
    """

    checkpoint: Path | None = None
    prompts: Path | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A folder with weights and prompts of all agents.

    Attributes:
        folder: the folder.
    """

    folder: Path

    @property
    def prompts(self) -> Path | None:
        """The file with the prompts that are not the program's own; None if there is none."""
        file = self.folder / PROMPTS_NAME
        return file if file.is_file() else None

    @property
    def checkpoint(self) -> Path:
        """The model with the adapters, or the base."""
        return self.folder / NEWEST

    def write(self, config: TrainConfig, names: Mapping[str, str], changes: Mapping[str, Change]) -> None:
        """Write the snapshot.

        Args:
            config: configuration of the base, with the agents.
            names: adapter of each agent that the model answers.
            changes: by agent; the others use the base unchanged.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        checkpoints = {agent: each.checkpoint for agent, each in changes.items() if each.checkpoint is not None}
        policies = {agent: f"lora:{name}" if agent in checkpoints else BASE for agent, name in names.items()}
        shutil.rmtree(self.checkpoint, ignore_errors=True)
        if self.checkpoint.is_symlink():
            self.checkpoint.unlink()
        if checkpoints:
            _join(self.checkpoint, {names[agent]: path for agent, path in checkpoints.items()})
        compose_lineage(list(checkpoints.values()), self.folder, self.checkpoint)
        if not checkpoints:
            self.checkpoint.symlink_to(resolve(config.model).absolute())
        kept = without_empty(config.model_dump())
        kept |= {"policies": policies if checkpoints else {}, "agents": tuple(checkpoints or names)}
        write_atomically(self.folder / CONFIG_NAME, to_json(TrainConfig(**kept)).encode())
        _write_prompts(self.folder / PROMPTS_NAME, [e.prompts for e in changes.values() if e.prompts is not None])


def without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def adapter_names(agents: Sequence[str]) -> dict[str, str]:
    """Return a unique adapter name for each agent that is valid as a folder name."""
    names: dict[str, str] = {}
    for agent in agents:
        plain = re.sub(r"[^A-Za-z0-9_-]+", "_", agent).strip("_-") or "agent"
        name, number = plain, 1
        while name in {*names.values(), BASE, "default"}:
            number += 1
            name = f"{plain}-{number}"
        names[agent] = name
    return names


def _join(folder: Path, checkpoints: Mapping[str, Path]) -> None:
    """Merge the adapters of several checkpoints of the same base into one."""
    first = next(iter(checkpoints.values()))
    folder.mkdir()
    for path in first.iterdir():  # the tokenizer
        if path.is_file() and not _STATE.fullmatch(path.name) and path.name not in _OF_WHOLE:
            shutil.copy2(path, folder / path.name)
    for name, checkpoint in checkpoints.items():
        shutil.copytree(checkpoint / name, folder / name, ignore=lambda _, found: filter(_STATE.fullmatch, found))
    index = {**json.loads((first / ADAPTERS_NAME).read_text(encoding="utf-8")), "adapters": list(checkpoints)}
    write_atomically(folder / ADAPTERS_NAME, (json.dumps(index, indent=2) + "\n").encode())


def _write_prompts(path: Path, files: Sequence[Path]) -> None:
    path.unlink(missing_ok=True)
    search = search_folder(path)
    shutil.rmtree(search, ignore_errors=True)
    compose_lineage([search_folder(file) for file in files], search / "lineage", search)
    changed = {agent: each for file in files for agent, each in read_prompts(file).items()}
    if changed:
        before = {agent: each["before"] for agent, each in changed.items()}
        prompt_files.write(path, before, {agent: each["after"] for agent, each in changed.items()}, {})
