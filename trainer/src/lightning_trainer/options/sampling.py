"""Options of how answers are sampled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lightning_trainer.options.record import OptionRecord


class SeedOptions(OptionRecord):
    """The seed."""

    seed: int = Field(default=0, ge=0)
    """Seed of the order of the data, of sampling and of initialisation."""


class AnswerOptions(OptionRecord):
    """How long an answer may be."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of an answer if the agent's request sets no limit."""


class ContextOptions(OptionRecord):
    """How long a conversation may be."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and answer together. Default: the model's own limit; for Phi-3 and Phi-4 with
    longrope positions, the limit of their short ones."""


class SampleOptions(OptionRecord):
    """How the trained agents are sampled."""

    temperature: float | None = Field(default=None, gt=0)
    """Sampling temperature, set on all calls of the trained agents. Default: the temperature in the agent's request,
    otherwise 1."""
    sampling: Literal["plain", "asked"] = "plain"
    """`plain` samples from the policy itself: the top_p, top_k, min_p and penalties of the agent's requests are ignored
    and recorded. `asked` applies them, and leaves the tokens that they changed out of training."""
