"""A run as one row, from its folder alone, so that a list of many runs opens no store."""

from __future__ import annotations

from typing import Any

from lightning_trainer.kits.view.answers.runs import RunRow
from lightning_trainer.kits.view.runs import Run
from lightning_trainer.report.metrics import newest_validations


def run_row(run: Run) -> RunRow:
    """Return a run as the list of runs shows it."""
    lines, options = run.lines(), run.options
    train = [line for line in lines if line["kind"] == "train"]
    val = newest_validations(lines)
    curve = [float(line["reward"]) for line in train if line.get("reward") is not None]
    held_out = [float(line["reward"]) for line in val if line.get("reward") is not None]
    times = [float(line["time"]) for line in lines if "time" in line]
    agents = options.get("agents")
    return RunRow(
        name=run.name,
        model=_text(options.get("model")),
        agents=[str(name) for name in agents] if isinstance(agents, list) else None,
        steps=len(train),
        started_s=min(times, default=None),
        updated_s=max(times, default=None),
        reward_first=curve[0] if curve else None,
        reward_last=curve[-1] if curve else None,
        val_first=held_out[0] if held_out else None,
        val_last=held_out[-1] if held_out else None,
        alarms=sum(line["kind"] == "alarm" for line in lines),
        curve=curve,
        options=run.shown_options,
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
