"""The options of `lightning-rl eval`. The command's flags are made of them, so this module imports little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from lightning_trainer.options.measuring import MeasuringOptions


class EvalFields(MeasuringOptions):
    """What to evaluate, on what, and what to compare it with."""

    judge: dict[str, Any] = Field(default_factory=dict)
    """Options of a judge, see `judging.options`."""
    model: str | None = None
    """A run, a checkpoint, a model folder, a hub id; with `endpoint` the model name in the requests. Default: the
    program's own endpoints."""
    endpoint: str | None = None
    """URL of an OpenAI-compatible server."""
    against: str | None = None
    """Baseline to compare with, task by task: an evaluation folder, a run, a model, a URL or MODEL=URL."""
    prompts: Path | None = None
    """File written by `lightning-rl prompts`; its system prompts replace those of the agents, except for --against."""
    agents: tuple[str, ...] | None = None
    """Names or globs of the agents that the model answers. Default: those that the run trained, otherwise all that have
    a name."""
    tasks: int | None = Field(default=None, ge=1)
    """Use only the first N tasks."""
    samples: int = Field(default=1, ge=1)
    """Rollouts per task."""
    seed: int | None = Field(default=None, ge=0)
    """Sampling seed. Default: 0 for weights loaded here, none for endpoints."""
    out: Path | None = None
    """Folder. Default: evals/DATE."""
    store: str | None = None
    """Store URL. Default: SQLite in the folder."""
