"""The judge and the second judge, registered through the public hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_spans.hooks import hookimpl


@hookimpl
def lightning_register_judges(register: Callable[[str, Any], None]) -> None:
    """Register the judge that is a model."""
    from lightning_trainer.kits.judging.plan import plan_model_judge

    register("model", plan_model_judge)


@hookimpl
def lightning_register_callbacks(register: Callable[[str, Any], None]) -> None:
    """Register the second judge."""
    from lightning_trainer.kits.judging.second import SecondJudgeKind

    register("second_judge", SecondJudgeKind())
