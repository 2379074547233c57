"""The runs to show: the folders of runs, or one store without a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from lightning_spans.errors import ConfigError
from lightning_trainer.config.files import CONFIG_NAME, read_shown
from lightning_trainer.config.passwords import without_passwords
from lightning_trainer.config.train import TrainConfig
from lightning_trainer.intervals import Declared
from lightning_trainer.kits.view.reader import StoreReader
from lightning_trainer.report.log.lines import Line, read_newest
from lightning_trainer.report.metrics import LOG_NAME
from lightning_trainer.run.group_ids import prefix_of
from lightning_trainer.session.folder import HOLDER, is_held
from lightning_trainer.work import Work

STORE_NAME: Final = "lightning.db"


@dataclass(frozen=True, slots=True)
class Run:
    """A run, or a store that no run's folder names.

    Attributes:
        name: its name on pages; unique among those shown.
        store: URL or path of its store.
        folder: its folder; None for a store alone.
        trusted: whether the folder may choose which store is opened and which reward rules are imported.
    """

    name: str
    store: str
    folder: Path | None = None
    trusted: bool = False

    @property
    def options(self) -> Mapping[str, Any]:
        """The options it was started with; {} if they are unknown."""
        return read_shown(self.folder) if self.folder and (self.folder / CONFIG_NAME).exists() else {}

    @property
    def shown_options(self) -> dict[str, Any]:
        """The same for display: without the passwords in addresses."""
        return {name: without_passwords(value) for name, value in self.options.items()}

    @property
    def config(self) -> TrainConfig | None:
        """The same, validated; None if they are unknown, or of a version with other options."""
        known = {name: value for name, value in self.options.items() if value is not None}
        try:
            return TrainConfig(**known) if known else None
        except (ConfigError, ValueError):
            return None

    @property
    def declared(self) -> Declared:
        """The range of its rewards; None if no command gives them, or the options are unknown."""
        return Work.declared_in(self.options)

    @property
    def rules(self) -> frozenset[str]:
        """Sources of rewards from automatic rules, which are not part of the run's score."""
        return frozenset(self.options.get("rewards") or {})

    @property
    def imports(self) -> frozenset[str]:
        """The rules that may be imported."""
        return self.rules if self.trusted else frozenset()

    @property
    def is_elsewhere(self) -> bool:
        """Whether its store is outside of its folder, and is not opened because the folder is not trusted."""
        return bool(self.options.get("store")) and not self.trusted

    @property
    def shared(self) -> bool:
        """Whether its store may contain other runs, because it is not in its folder."""
        return self.folder is not None and bool(self.options.get("store"))

    @property
    def prefix(self) -> str:
        """The prefix of its rollout ids if other runs may share its store, otherwise empty."""
        return prefix_of(self.folder) if self.folder is not None and self.shared else ""

    @property
    def has_store(self) -> bool:
        """Whether there is a store to read. Supervised fine-tuning has none, nor has a run with a deleted store."""
        file = self.store.removeprefix("sqlite:///")
        return "://" in file or Path(file).is_file()

    def lines(self) -> list[Line]:
        """Return the metrics of its steps and validations, and its alarms."""
        return read_newest(self.folder / LOG_NAME) if self.folder is not None else []

    @property
    def changed(self) -> tuple[int, ...]:
        """A value that changes with every write: sizes and times of files, or a store's mark.

        Raises:
            StoreError: the store is on a server that does not answer.
        """
        paths = [self.folder / LOG_NAME, self.folder / HOLDER] if self.folder is not None else []
        file = self.store.removeprefix("sqlite:///")
        mark: tuple[int, ...] = ()
        if "://" in file:
            with closing(StoreReader(self.store)) as reader:
                mark = reader.state_mark()
        else:
            paths += [Path(file), Path(f"{file}-wal")]
        return (*(part for path in paths for part in stamp_of(path)), *mark)

    @property
    def state(self) -> str:
        """``running`` if something is at work; otherwise ``stopped``, or ``idle`` for a store without a run's folder.

        Raises:
            StoreError: the store cannot be read.
        """
        if self.folder is not None and is_held(self.folder):
            return "running"
        if self.folder is not None and not self.has_store:
            return "stopped"
        with closing(StoreReader(self.store)) as reader:
            if reader.at_work():
                return "running"
        return "stopped" if self.folder is not None else "idle"


def stamp_of(path: Path) -> tuple[int, int]:
    """Return a file's size and time of its last change; zeros if there is none."""
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def run_of(folder: Path, *, trusted: bool = False) -> Run | None:
    """Return the run in a folder; None if there is none. An untrusted folder's store is the one inside it."""
    if not (folder / LOG_NAME).is_file() and not (folder / STORE_NAME).is_file():  # models have a config.json, too
        return None
    run = Run(folder.absolute().name, str(folder / STORE_NAME), folder, trusted)
    store = run.options.get("store")
    return replace(run, store=str(store)) if store and trusted else run


def runs_in(path: Path, *, trusted: bool = False) -> list[Run]:
    """Return the run in a folder, or all runs in the folders below it, the newest first.

    Args:
        path: the folder.
        trusted: whether it may choose which store is opened and which reward rules are imported.

    Raises:
        ConfigError: there is no run.
    """
    own = run_of(path, trusted=trusted)
    if own is not None:
        return [own]
    below = sorted(path.iterdir(), key=lambda each: stamp_of(each)[1]) if path.is_dir() else []
    found = [run for each in reversed(below) if each.is_dir() and (run := run_of(each, trusted=trusted)) is not None]
    if not found:
        raise ConfigError(
            f"{path} is not the folder of a run and contains none. Name one, such as runs/2026-11-20, or --store."
        )
    return found


class Runs:
    """The runs that pages may request by name. Folders made later are found when the list is read.

    Args:
        path: a run's folder, or one that contains such folders.
        store: URL of a store instead.
        trusted: see `runs_in`.
    """

    def __init__(self, path: Path | None = None, *, store: str | None = None, trusted: bool = False) -> None:
        self._path = path
        self._trusted = trusted
        self._store = store

    def all(self) -> Sequence[Run]:
        """Return all runs, the newest first."""
        if self._store is not None:
            return [Run("store", self._store)]
        return runs_in(self._path, trusted=self._trusted) if self._path is not None else []
