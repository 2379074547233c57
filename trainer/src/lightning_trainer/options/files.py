"""Options that name the folder of a run, its store, its server's port, or a key."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from lightning_trainer.options.record import OptionRecord


class RunFolderOptions(OptionRecord):
    """The folder that a run writes."""

    out: Path | None = None
    """Folder of the run. Default: runs/DATE."""


class ResumeOptions(OptionRecord):
    """The run to continue."""

    resume: Path | None = None
    """Resume this run folder or checkpoint exactly where it stopped."""


class StoreOptions(OptionRecord):
    """Where traces are kept."""

    store: str | None = None
    """Store URL for traces and rollouts. Default: SQLite in the run's folder."""


class PortOptions(OptionRecord):
    """Where a server listens."""

    port: int = Field(default=0, ge=0, le=65535)
    """Port of the run's server on 127.0.0.1; 0 picks a free port."""
