"""The options of `lightning-rl eval`. The command's flags are made of them, so this module imports little."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from lightning_trainer.options.files import RunFolderOptions, StoreOptions
from lightning_trainer.options.measuring import MeasuringOptions
from lightning_trainer.options.policies import EndpointOptions
from lightning_trainer.options.program import JudgingOptions
from lightning_trainer.options.tasks import CountOptions


class EvalFields(StoreOptions, RunFolderOptions, CountOptions, EndpointOptions, JudgingOptions, MeasuringOptions):
    """What to evaluate, on what, and what to compare it with."""

    model: str | None = None
    """A run, a checkpoint, a model folder, a hub id; with `endpoint` the model name in the requests. Default: the
    program's own endpoints."""
    against: str | None = None
    """Baseline to compare with, task by task: an evaluation folder, a run, a model, a URL or MODEL=URL."""
    prompts: Path | None = None
    """File written by `lightning-rl prompts`; its system prompts replace those of the agents, except for --against."""
    agents: tuple[str, ...] | None = None
    """Names or globs of the agents that the model answers. Default: those that the run trained, otherwise all that have
    a name."""
    samples: int = Field(default=1, ge=1)
    """Rollouts per task."""
    seed: int | None = Field(default=None, ge=0)
    """Sampling seed. Default: 0 for weights loaded here, none for endpoints."""
