"""Options of the program to run: the agent, and what gives its reward."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from lightning_trainer.options.record import OptionRecord


class TargetOptions(OptionRecord):
    """The agent, and the function that gives its reward."""

    target: str | None = None
    """The agent, `module:function`. It is imported with the current folder on the path and called as run(task)."""
    command: str | None = None
    """The agent as a command, for programs in other languages. It gets the task as JSON on stdin and in
    LIGHTNING_TASK."""
    reward: str | None = None
    """Reward function `module:function`, called as score(task, result); or `judge`, a model that compares the rollouts
    of a group (see judge). Default: the agent returns the reward."""


class JudgingOptions(OptionRecord):
    """The judge."""

    judge: dict[str, Any] = Field(default_factory=dict)
    """Options of the judge: endpoint, model, rubric, weight (1) and others. With reward = judge, the judge gives the
    reward. With another reward, the judge's score times the weight is added (torch backend)."""


class AgentOptions(JudgingOptions, TargetOptions):
    """The agent, and what gives its reward."""
