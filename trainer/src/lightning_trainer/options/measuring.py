"""Options of commands that run a program on tasks without training it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from lightning_trainer.options.limits import LimitOptions
from lightning_trainer.options.policies import NameRuleOptions
from lightning_trainer.options.program import TargetOptions
from lightning_trainer.options.record import OptionRecord
from lightning_trainer.options.sampling import AnswerOptions
from lightning_trainer.options.tasks import ColumnOptions, TaskOptions
from lightning_trainer.work import Work


class RequestOptions(AnswerOptions, NameRuleOptions):
    """How answers are sampled if nothing is learned from them: as the agents' requests specify."""

    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature, set on all calls but those of agents whose policy is `base` or `fixed`. Default: the
    temperature in the request."""
    sampling: Literal["plain", "asked"] = "asked"
    """`plain` ignores top_p, top_k, min_p and penalties in requests, as in training; `asked` applies them."""
    load: dict[str, Any] = Field(default_factory=dict)
    """Further options of the backend that loads weights."""


class MeasuringOptions(RequestOptions, LimitOptions, ColumnOptions, TaskOptions, TargetOptions):
    """A program to run on tasks."""

    work: Work = Field(default_factory=Work)
    """Of a command: where it works, and what gives its reward."""


class SuccessOptions(OptionRecord):
    """What counts as a success."""

    success: float | None = None
    """Minimum reward of a success. [default: the recorded reward]"""
