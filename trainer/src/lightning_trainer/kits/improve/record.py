"""The two validations of a search, in the format of a run: `runs` and the viewer show them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from lightning_trainer.kits.evaluation.summary import Summary
from lightning_trainer.report.metrics import LOG_NAME, write_atomically
from lightning_trainer.rl.scores import BY_TASK, Score


def write_metrics(folder: Path, before: Summary, after: Summary | None) -> None:
    """Write the rewards without and with the kept changes as the validations before and after one step.

    Args:
        folder: folder of the search.
        before: summary of the unchanged agents.
        after: summary with the kept changes; None: nothing is kept.
    """
    lines = [_validation(0, before), *([] if after is None else [_validation(1, after)])]
    write_atomically(folder / LOG_NAME, "".join(json.dumps(line) + "\n" for line in lines).encode())


def _validation(step: int, summary: Summary) -> dict[str, Any]:
    reward = summary.reward
    score = Score(
        reward=reward.mean, low=reward.low, high=reward.high, tasks=summary.tasks,
        by_agent={name: m for name, each in summary.by_agent.items() if name and (m := each.reward.mean) is not None},
        rollouts=summary.counted + summary.left_out, failed=summary.crashed + summary.left_out,
    )  # fmt: skip
    by_task = {"": {str(task): value for task, value in summary.by_task.items()}}
    return {"kind": "val", "step": step, "time": round(time.time(), 3), BY_TASK: by_task, **score.metrics()}
